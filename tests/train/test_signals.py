"""Runs that a signal ends: their committed step, and how they continue."""

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import jaxinf

pytestmark = pytest.mark.long


@pytest.fixture
def start(text, tmp_path):
    """Starts the trainer in a process of its own; returns when it has paused."""
    processes, program = [], Path(__file__).parents[1] / "programs/paused_trainer.py"

    def call(num_steps):
        words = ["--data", text, "--batch-size", 2, "--seq-len", 8, "--steps", 9999]
        words += ["--store", tmp_path / "store"]
        words = [sys.executable, program, num_steps, tmp_path / "go", *words]
        process = subprocess.Popen(
            [str(word) for word in words],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        processes.append(process)
        read_until(process.stdout, "paused")
        return process

    yield call
    for process in processes:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_commits_and_resumes(
    start, run, losses, uninterrupted, tmp_path, number
):
    process = start(5)
    process.send_signal(number)
    read_until(process.stdout, f"{number.name}: finishing this step")
    (tmp_path / "go").touch()
    out, err = process.communicate()
    assert (process.returncode, err) == (128 + number, "")
    step = int(re.search(r"stopped after step (\d+) of 9999", out)[1])
    assert step == 6  # which was under way
    command = shlex.split(out.strip().splitlines()[-1])
    assert command[1:3] == ["-m", "jaxinf.train"]
    program = shutil.which(command[0])  # as a shell would find it
    assert program
    assert os.path.samefile(program, sys.executable)
    run_file = tmp_path / "store-log" / "config.toml"
    assert command[3:] == ["--config", str(run_file)]
    assert run_file.is_file()

    with jaxinf.open_store(tmp_path / "store") as store:
        payload: Any = store.payload
        assert store.step == payload["step"] == step
    assert run("--store", tmp_path / "store", "--steps", step + 3) == 0
    assert losses(tmp_path / "store-log") == uninterrupted[: step + 3]


def test_killed_run_has_each_line_once(start, run, losses, uninterrupted, tmp_path):
    process, metrics = start(5), tmp_path / "store-log/metrics.jsonl"
    # A thread writes the lines.
    while not metrics.exists() or metrics.read_text().count("\n") < 4:
        time.sleep(0.02)
    process.kill()
    process.communicate()
    with jaxinf.open_store(tmp_path / "store") as store:
        step = store.step
    assert run("--store", tmp_path / "store", "--steps", step + 2) == 0
    assert losses(tmp_path / "store-log") == uninterrupted[: step + 2]


def test_second_signal_ends_at_once(start):
    process = start(1)
    process.send_signal(signal.SIGTERM)
    read_until(process.stdout, "once more ends at once")
    process.send_signal(signal.SIGTERM)
    # It would pause for ever; a shell says 143.
    assert process.wait(timeout=60) == -signal.SIGTERM


def read_until(stream, words):
    for line in stream:
        if words in line:
            return
    raise AssertionError(f"the output ended without {words!r}")
