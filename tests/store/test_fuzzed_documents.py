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


@pytest.mark.long
@pytest.mark.parametrize(
    "max_examples", [40, pytest.param(120, marks=pytest.mark.long)]
)
def test_no_document_does_harm(victim, max_examples):
    @seed(16)
    @settings(
        max_examples=max_examples,
        database=None,
        suppress_health_check=[HealthCheck.too_slow],
    )
    @given(hostile())
    def survives(case):
        victim.survives(*case)

    survives()
