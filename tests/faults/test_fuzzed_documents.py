"""Every document is read, or refused without another effect; `make faults` is long."""

import pytest
from families import LONG
from fuzzing import DOCUMENTS, Victim, hostile
from hypothesis import HealthCheck, given, seed, settings
from raw_stores import memory_directory

SEEDS = range(20) if LONG else range(1)
EXAMPLES = 2000 if LONG else 160


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


@pytest.mark.parametrize("number", SEEDS)
def test_no_document_does_harm(victim, number):
    drawn = []

    @seed(number)
    @settings(
        max_examples=EXAMPLES,
        database=None,
        suppress_health_check=[HealthCheck.too_slow],
    )
    @given(hostile())
    def run(case):
        victim.survives(*case)
        drawn.append(case[0])

    run()
    assert len(drawn) >= EXAMPLES // 2
