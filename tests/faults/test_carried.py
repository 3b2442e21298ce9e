"""Runs with batch statistics and dropout that are killed go on as one run."""

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[1] / "support" / "carrying_program.py"
NUM_STEPS = 14
POINTS = ("unpublish:2", "make_carry:1", "make_carry:2", "write_carry:2", "unlink:5")
POINTS += ("sync:2", "sync:3", "write_record:2", "flip:2", "flip:3")


def run(*words):
    done = subprocess.run(
        [sys.executable, str(PROGRAM), *map(str, words)],
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout.splitlines(), done.stderr


@pytest.mark.faults
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", ["update", "stream"])
def test_killed_at_ten_points_it_has_the_losses_of_one_run(place, kind):
    status, expected, errors = run(place / "one", kind, NUM_STEPS)
    assert status == 0, errors
    found = set()
    for point in POINTS:
        status, lines, errors = run(place / "killed", kind, NUM_STEPS, point)
        assert status == -9, (point, lines, errors)
        found |= set(lines)
    status, lines, errors = run(place / "killed", kind, NUM_STEPS)
    assert status == 0, errors
    assert lines[-1] == expected[-1]  # the accuracy
    assert found | set(lines) == set(expected)
