"""State of any size passes through the budget, and needs no more memory."""

import re
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("memory_cap.py")
NUM_PARAMS = 16_000_000  # 183 MiB of state, and as much in the other slot
MIB = 1 << 20


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_DATA is Linux's")
def test_steps_stay_in_the_budget(tmp_path, run_python):
    done = run_python(PROGRAM, tmp_path / "within", NUM_PARAMS, 16 * MIB)
    assert done.stdout == "3\n"
    # The cap holds a greater budget back: the test above can fail.
    done = run_python(PROGRAM, tmp_path / "beyond", NUM_PARAMS, 160 * MIB, check=False)
    assert done.returncode != 0
    assert re.search("MemoryError|allocate|std::bad_alloc|out of memory", done.stderr)
    assert not done.stdout
