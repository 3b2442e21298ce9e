"""The kill campaign of `scripts/kill_campaign.py`, a bounded number of kills."""

from pathlib import Path

import pytest
from families import LONG

SCRIPT = Path(__file__).parents[2] / "scripts" / "kill_campaign.py"
NUM_KILLS = 720 if LONG else 36


@pytest.mark.faults
@pytest.mark.timeout(1800)
def test_killed_runs_go_on_with_the_same_bits(place, run_python):
    options = ["--directory", place, "--kills", NUM_KILLS, "--num-steps", 12]
    result = run_python(SCRIPT, *options, limit_s=1800)
    print(result.stdout)
    assert f"{NUM_KILLS} kills, 0 mismatching bits, 0 faults" in result.stdout
