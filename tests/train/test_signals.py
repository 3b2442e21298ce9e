"""Runs that a signal ends: their committed step, and how they continue."""

import re
import shlex
import signal
import subprocess
import sys
import time
from typing import Any

import pytest

import jaxinf

# The trainer on the tiny model, its steps made longer by the first argument.
SLOWED = """
import sys, time
from jaxinf_models import PRESETS, GPT2Config
PRESETS["nano"] = GPT2Config(256, 16, num_layers=1, num_heads=2, num_features=16)
from jaxinf.train.__main__ import main
from jaxinf.train.data.loader import Batches
pause_s = float(sys.argv.pop(1))
quickly = Batches.starting_at
def slowly(self, position):
    for batch in quickly(self, position):
        yield batch
        time.sleep(pause_s)
Batches.starting_at = slowly
sys.exit(main())
"""


@pytest.fixture
def start(text, tmp_path):
    """Starts the trainer in a process of its own."""
    processes = []

    def call(*, pause_s):
        words = ["--data", text, "--batch-size", 2, "--seq-len", 8, "--steps", 9999]
        words += ["--store", tmp_path / "store"]
        process = subprocess.Popen(
            [sys.executable, "-c", SLOWED, str(pause_s), *map(str, words)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        processes.append(process)
        return process

    yield call
    for process in processes:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.long)]
)
def test_signal_commits_and_resumes(
    start, run, losses, uninterrupted, tmp_path, number, wait_for_steps
):
    process = start(pause_s=0.1)
    wait_for_steps(tmp_path / "store-log", 5)
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (128 + number, "")
    assert f"{number.name}: finishing this step" in out
    step = int(re.search(r"stopped after step (\d+) of 9999", out)[1])
    command = shlex.split(out.strip().splitlines()[-1])
    assert command[:3] == ["python", "-m", "jaxinf.train"]
    assert command[command.index("--store") + 1] == str(tmp_path / "store")

    with jaxinf.open_store(tmp_path / "store") as store:
        payload: Any = store.payload
        assert store.step == payload["step"] == step
    assert run("--store", tmp_path / "store", "--steps", step + 3) == 0
    assert losses(tmp_path / "store-log") == uninterrupted[: step + 3]


@pytest.mark.long
def test_killed_run_has_each_line_once(
    start, run, losses, uninterrupted, tmp_path, wait_for_steps
):
    process = start(pause_s=0.1)
    wait_for_steps(tmp_path / "store-log", 5)
    process.kill()
    process.communicate(timeout=60)
    with jaxinf.open_store(tmp_path / "store") as store:
        step = store.step
    assert run("--store", tmp_path / "store", "--steps", step + 2) == 0
    assert losses(tmp_path / "store-log") == uninterrupted[: step + 2]


def test_second_signal_ends_at_once(start):
    process = start(pause_s=10)
    assert process.stdout is not None
    read_until(process.stdout, "step 1/")
    time.sleep(0.5)  # now it is inside the pause
    process.send_signal(signal.SIGTERM)
    read_until(process.stdout, "once more ends at once")
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=3) == 143


def read_until(stream, words):
    for line in stream:
        if words in line:
            return
    raise AssertionError(f"the output ended without {words!r}")
