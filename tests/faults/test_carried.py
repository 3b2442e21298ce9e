"""Runs with batch statistics and dropout that are killed go on as one run."""

from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("carrying_program.py")
NUM_STEPS = 14
POINTS = ("unpublish:2", "make_carry:1", "make_carry:2", "write_carry:2")
POINTS += ("sync:2", "sync:3", "write_record:2", "flip:2", "flip:3")


@pytest.mark.faults
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", ["update", "stream"])
def test_killed_anywhere_it_has_the_losses_of_one_run(place, run_python, kind):
    expected = run_python(PROGRAM, place / "one", kind, NUM_STEPS).stdout.splitlines()
    found = set()
    for point in POINTS:
        words = (place / "killed", kind, NUM_STEPS, point)
        killed = run_python(PROGRAM, *words, check=False)
        assert killed.returncode == -9, (point, killed.stdout, killed.stderr)
        found |= set(killed.stdout.splitlines())
    lines = run_python(PROGRAM, place / "killed", kind, NUM_STEPS).stdout.splitlines()
    assert lines[-1] == expected[-1]  # the accuracy
    assert found | set(lines) == set(expected)
