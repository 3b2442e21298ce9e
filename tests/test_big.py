"""`make big`, `bigger`, `policy`: limits of memory and disk, runs of small models."""

import resource
import shutil
import subprocess
import sys
from pathlib import Path

import big
import bigger
import pytest
import two_tower
from big_rig import UNTOUCHED_BYTES, Watcher, check_disk
from jaxinf_models import MODELS, PRESETS, num_params

SCRIPTS = Path(__file__).parents[1] / "scripts"
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
    needed = big.BYTES_A_PARAM * num_params(PRESETS["xl"])
    assert 43e9 < needed < 44e9
    usage = shutil.disk_usage(tmp_path)
    for free in (needed - 1, needed):
        monkeypatch.setattr(
            shutil, "disk_usage", lambda _, free=free: usage._replace(free=free)
        )
        if free < needed:
            with pytest.raises(SystemExit, match=r"expected 43.6 GB free, found 43.6"):
                check_disk(tmp_path, needed)
        else:
            check_disk(tmp_path, needed)


def test_the_bigger_model_has_6_7_billion_params():
    count = num_params(MODELS["llama"].presets[bigger.Options(Path()).preset])
    assert round(count / 1e9, 1) == 6.7
    assert 54e9 < bigger.BYTES_A_PARAM * count < 54.5e9


def test_the_policy_has_3_2_billion_params():
    count = two_tower.num_params(two_tower.Options().sizes)
    assert round(count / 1e9, 1) == 3.2
    assert 39e9 < two_tower.BYTES_A_PARAM * count < 39.1e9


def run(script, place, *words):
    command = [sys.executable, str(SCRIPTS / script), "--store", str(place), *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert not [*place.iterdir()]
    return done.stdout


@pytest.mark.long
def test_a_small_model_is_killed_and_trains_on(place):
    words = ["--preset", "nano", "--steps", "40", "--kill-after", "2"]
    said = run("big.py", place, *words, "--kill-delay-s", "0")
    assert "resuming at step" in said
    assert "nano and one jit: losses of 5 steps differ by at most" in said
    assert "limit 1.50 GiB" in said


@pytest.mark.long
def test_a_small_model_of_few_bits_is_trained_and_exported(place):
    said = run("bigger.py", place, "--preset", "nano", "--small", "nano")
    assert "nano and params in memory: losses of 5 steps differ by at most" in said
    assert "of 128 tokens in" in said
    assert "trimmed " in said
    assert "\nexport   " in said
    assert "limit 6.00 GiB" in said


@pytest.mark.long
def test_a_small_policy_is_killed_and_its_average_exported(place):
    words = ["--config", "small", "--memory", "20MiB", "--chunk-elements", "65536"]
    said = run("two_tower.py", place, *words, "--kill-delay-s", "0.1")
    assert "table in 32 blocks of 512 rows" in said
    assert "committed: " in said
    assert ", clean" in said
    assert " of average" in said
    assert "limit 2.00 GiB" in said
