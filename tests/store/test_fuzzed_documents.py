"""Every document is read, or refused without another effect; faults/ draws changes."""

import pytest
from fuzzing import DOCUMENTS, Victim
from raw_stores import memory_directory


@pytest.fixture(scope="module")
def victim():
    with memory_directory() as place:
        yield Victim(place)


@pytest.mark.parametrize("name", DOCUMENTS)
def test_what_is_whole_is_read(victim, name):
    refusals = victim.survives(name, [("put", [], None)], True)
    assert bool(refusals) == (name != "store/lock")
    victim.place.joinpath(name).write_bytes(victim.whole[name])
    for use in victim.uses(name):
        use()
