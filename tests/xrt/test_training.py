"""Training on cards driven by the real runtime: the host's losses, also after kills."""

import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest

NUM_STEPS = 50

PROGRAM = ("-m", "jaxinf.train")
OVER_PYXRT = (
    "-c",
    "import runpy; from jaxinf.csd.cards import library; library.LIBRARY = 'none.so'; "
    "runpy.run_module('jaxinf.train', run_name='__main__', alter_sys=True)",
)

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("training")


@pytest.fixture
def train(place, sandbox):
    """Trains `nano` on two CSDs, in a program of its own."""

    def run(name, *words, during=None, program=PROGRAM):
        roots = [place / name / f"csd{number}" for number in range(2)]
        command = [*program, "--preset", "nano", "--batch-size", "2"]
        command += ["--seq-len", "64", "--steps", str(NUM_STEPS)]
        command += ["--store", place / name / "store", "--log-dir", place / name]
        for root in roots:
            root.mkdir(parents=True, exist_ok=True)
            command += ["--csd-root", root]
        return sandbox.run(
            [sys.executable, *command, *words],
            limit_s=240,
            during=during,
            JAX_PLATFORMS="cpu",
        )

    return run


def losses(directory):
    """Returns losses by step; a step lost in a crash counts when it is repeated."""
    lines = (directory / "metrics.jsonl").read_text().splitlines()
    return {line["step"]: line["loss"] for line in map(json.loads, lines)}


def wait_for_step(directory, step, process):
    """Until the log has a line of this step."""
    deadline = time.monotonic() + 200
    file = directory / "metrics.jsonl"
    while not file.exists() or f'{{"step": {step},' not in file.read_text():
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.005)


def committed_step(store):
    """Verifies a store, and returns its step."""
    command = [sys.executable, "-m", "jaxinf", "verify", store]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    return int(re.search(r"step (\d+)", result.stdout)[1])


def end(process):
    """Waits for a program whose device has died, like its user, then kills it.

    XRT allocates memory and calls exit() in the handler of the signal, wherever the
    program was interrupted. Mostly this ends it; sometimes it waits for ever.
    """
    try:
        process.wait(30)
    except subprocess.TimeoutExpired:
        process.kill()


@pytest.mark.parametrize(
    ("deaths", "program"),
    [((), PROGRAM), (("device", "host"), PROGRAM), ((), OVER_PYXRT)],
    ids=["whole", "deaths", "pyxrt"],
)
def test_losses_are_the_hosts(train, place, sandbox, runtime, request, deaths, program):
    if not (place / "host").exists():
        finished = train("host", "--csd", "host")
        assert finished.status == 0, finished.output
    wanted = losses(place / "host")
    assert list(wanted) == list(range(1, NUM_STEPS + 1))
    name = request.node.callspec.id
    directory = place / name
    for number, death in enumerate(deaths):
        step = 10 * (number + 1)

        def kill(process, step=step, death=death):
            wait_for_step(directory, step, process)
            victim = process.pid
            if death == "device":
                victim = next(
                    one
                    for one in sandbox.processes()
                    if os.readlink(f"/proc/{one}/exe") == str(runtime.model)
                )
            os.kill(victim, signal.SIGKILL)
            if death == "device":
                end(process)

        finished = train(name, "--csd", "smartssd", during=kill)
        assert finished.status != 0
        assert not finished.timed_out
        assert step - 1 <= committed_step(directory / "store") < NUM_STEPS
    finished = train(name, "--csd", "smartssd", program=program)
    assert finished.status == 0, finished.output
    assert losses(directory) == wanted
    assert sandbox.close() == []
