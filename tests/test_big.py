"""`make big`: the limit of memory, the check of the drive, a run of a small model."""

import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from big import BYTES_A_PARAM, UNTOUCHED_BYTES, Options, Watcher, check_disk
from jaxinf_models import PRESETS, num_params

SCRIPT = Path(__file__).parents[1] / "scripts/big.py"
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


def test_a_small_drive_is_refused(tmp_path, monkeypatch):
    needed = BYTES_A_PARAM * num_params(PRESETS["xl"])
    assert 43e9 < needed < 44e9
    usage = shutil.disk_usage(tmp_path)
    for free in (needed - 1, needed):
        monkeypatch.setattr(
            shutil, "disk_usage", lambda _, free=free: usage._replace(free=free)
        )
        if free < needed:
            with pytest.raises(SystemExit, match=r"expected 43.6 GB free, found 43.6"):
                check_disk(Options(tmp_path))
        else:
            check_disk(Options(tmp_path))


@pytest.mark.long
def test_a_small_model_is_killed_and_trains_on(place):
    words = ["--preset", "nano", "--steps", "40", "--kill-after", "2"]
    command = [sys.executable, str(SCRIPT), "--store", str(place), *words]
    command += ["--kill-delay-s", "0"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "resuming at step" in done.stdout
    assert "losses differ from those of one jit by at most" in done.stdout
    assert "limit 2.00 GiB" in done.stdout
    assert not [*place.iterdir()]
