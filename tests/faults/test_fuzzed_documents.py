"""Hostile documents, for a long time: `make faults`."""

from collections import Counter

import pytest
from families import LONG
from fuzzing import Victim, hostile
from hypothesis import HealthCheck, given, seed, settings
from raw_stores import memory_directory

SEEDS = range(20) if LONG else range(1)
EXAMPLES = 2000 if LONG else 160


@pytest.mark.parametrize("number", SEEDS)
def test_no_document_does_harm(number):
    counts = Counter()
    with memory_directory() as place:
        victim = Victim(place)

        @seed(number)
        @settings(
            max_examples=EXAMPLES,
            database=None,
            suppress_health_check=[HealthCheck.too_slow],
        )
        @given(hostile())
        def run(case):
            refusals = victim.survives(*case)
            counts[case[0], "refused" if refusals else "read"] += 1

        run()
    for (name, outcome), count in sorted(counts.items()):
        print(f"seed {number}: {name}: {outcome} {count}")
    assert counts.total() >= EXAMPLES // 2
