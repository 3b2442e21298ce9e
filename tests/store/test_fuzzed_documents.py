"""Every document is read or refused, with no other effect."""

import pytest
from fuzzing import DOCUMENTS, Victim, hostile
from hypothesis import HealthCheck, given, seed, settings
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


@seed(16)
@settings(
    max_examples=120,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(hostile())
def test_no_document_does_harm(victim, case):
    victim.survives(*case)
