"""`make big`: a limit of memory, and a run of a small model."""

import resource
import sys
from pathlib import Path

import big
import pytest
from big import UNTOUCHED_BYTES, Watcher

MIB = 1 << 20


def test_a_group_above_its_limit_is_killed():
    """The memory is a grandchild's, and no process has it alone."""
    hold = "import time; x = bytearray(40 << 20); time.sleep(60)"
    both = (
        f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {hold!r}]);"
    )
    watcher = Watcher([sys.executable, "-c", both + hold], 80 * MIB)
    with pytest.raises(SystemExit, match=r"resident, expected at most 80\.0 MiB"):
        watcher.wait()
    assert watcher.peak_bytes > 80 * MIB
    assert watcher.wait() is not None


def test_an_allocation_beyond_the_limit_fails():
    program = f"bytearray({UNTOUCHED_BYTES} + (70 << 20))"
    watcher = Watcher([sys.executable, "-c", program], 64 * MIB)
    assert watcher.wait() == 1
    assert resource.getrlimit(resource.RLIMIT_DATA)[0] == resource.RLIM_INFINITY


@pytest.mark.long
def test_a_small_model_is_killed_and_trains_on(place, run_python):
    words = ["--preset", "nano", "--steps", "40", "--kill-after", "2"]
    words += ["--kill-delay-s", "0"]
    done = run_python(Path(big.__file__), "--store", place, *words)
    assert not [*place.iterdir()]
    said = done.stdout
    assert "resuming at step" in said
    assert "limit 2.00 GiB" in said
