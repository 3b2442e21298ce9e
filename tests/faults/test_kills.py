"""The kill campaign of `scripts/kill_campaign.py`, a bounded number of kills."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from families import LONG

SCRIPT = Path(__file__).parents[2] / "scripts" / "kill_campaign.py"
NUM_KILLS = 720 if LONG else 36


@pytest.mark.faults
@pytest.mark.timeout(1800)
def test_killed_runs_go_on_with_the_same_bits(place):
    options = ["--directory", place, "--kills", NUM_KILLS, "--num-steps", 12]
    result = subprocess.run(
        [sys.executable, str(SCRIPT), *map(str, options)],
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )
    print(result.stdout)
    assert result.returncode == 0, result.stdout + result.stderr
    assert f"{NUM_KILLS} kills, 0 mismatching bits, 0 faults" in result.stdout
