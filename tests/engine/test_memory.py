"""State of any size passes through the budget, and needs no more memory."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

NUM_PARAMS = 16_000_000  # 183 MiB of state, and as much in the other slot
MIB = 1 << 20


def run(place, budget_bytes):
    program = Path(__file__).with_name("memory_cap.py")
    command = [sys.executable, program, place, str(NUM_PARAMS), str(budget_bytes)]
    beside = {**os.environ, "PYTHONSAFEPATH": ""}
    return subprocess.run(
        command, env=beside, capture_output=True, text=True, check=False
    )


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_DATA is Linux's")
def test_steps_stay_in_the_budget(tmp_path):
    done = run(tmp_path / "within", 16 * MIB)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "3\n"
    # The cap holds a greater budget back: the test above can fail.
    done = run(tmp_path / "beyond", 160 * MIB)
    assert done.returncode != 0
    assert re.search("MemoryError|allocate|std::bad_alloc|out of memory", done.stderr)
    assert not done.stdout
