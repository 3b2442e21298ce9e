"""A device, a kernel or a host dies: a quick, clear end that leaves nothing."""

import os
import signal
import sys
import time
from pathlib import Path

import pytest

PRELUDE = """
import sys
from pathlib import Path
import numpy as np
from xrt_card import *
xclbin, ready = map(Path, sys.argv[1:])
def wait_in_a_kernel(card):
    counter = card.put(np.zeros(1024, np.int32))
    return counter, start(card.kernel("meet"), counter, 2)
"""

WAITS_IN_TWO_KERNELS = """
cards = [Card(index, xclbin) for index in range(2)]
runs = [wait_in_a_kernel(card) for card in cards]
ready.touch()
runs[0][1].wait()
"""


@pytest.fixture
def run(sandbox, xclbin, tmp_path):
    """Runs a program; `during` is called when it has made the file `ready`."""

    ready = tmp_path / "ready"

    def wait_until_ready(process):
        deadline = time.monotonic() + 30
        while not ready.exists() and process.poll() is None:
            assert time.monotonic() < deadline
            time.sleep(0.005)

    def run(program, during=lambda _: None, **environment):
        def when_ready(process):
            wait_until_ready(process)
            during(process)

        paths = [str(Path(__file__).parent), sandbox.environment["PYTHONPATH"]]
        return sandbox.run(
            [sys.executable, "-c", PRELUDE + program, xclbin, ready],
            limit_s=30,
            during=when_ready,
            **{"PYTHONPATH": os.pathsep.join(paths), **environment},
        )

    return run


@pytest.fixture
def models(sandbox, runtime):
    """The processes of the sandbox that are devices."""
    executable = str(runtime.model)
    return lambda: [
        process
        for process in sandbox.processes()
        if os.readlink(f"/proc/{process}/exe") == executable
    ]


def assert_ended_with_its_device(finished, sandbox):
    assert not finished.timed_out
    assert finished.status in (1, -signal.SIGTERM)
    message = "Software emulation of compute unit(s) exited unexpectedly"
    assert message in finished.output
    assert sandbox.close().processes == ()


def test_a_device_is_killed_while_its_kernel_runs(run, sandbox, models):
    def kill_one(_):
        first, second = models()
        os.kill(second, signal.SIGKILL)
        assert first != second

    finished = run(WAITS_IN_TWO_KERNELS, kill_one)
    assert_ended_with_its_device(finished, sandbox)


def test_a_kernel_crashes(run, sandbox):
    finished = run("""
card = Card(0, xclbin)
finish(start(card.kernel("crash"), card.buffer(4096)))
print("it went on")
""")
    assert "it went on" not in finished.output
    assert_ended_with_its_device(finished, sandbox)


def test_an_address_outside_of_all_buffers(run, sandbox):
    finished = run("""
card = Card(0, xclbin)
run = start(card.kernel("meet"), 0x5000000, 1)
run.wait()
""")
    message = "device model: access to 1 bytes at 0x5000000: not within a buffer"
    assert message in finished.output
    assert_ended_with_its_device(finished, sandbox)


def test_a_host_is_killed_while_kernels_run(run, sandbox, models):
    seen = []

    def kill(process):
        seen.extend(models())
        process.kill()

    finished = run(WAITS_IN_TWO_KERNELS, kill)
    assert (finished.status, len(seen)) == (-signal.SIGKILL, 2)
    left = sandbox.close()
    assert left.processes == ()
    assert [name[:8] for name in left.files] == ["device0_", "device1_"]


def test_an_interrupt_is_the_hosts_alone(run, sandbox):
    finished = run(
        """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in the background
card = Card(0, xclbin)
counter, run = wait_in_a_kernel(card)
try:
    ready.touch()
    while True:
        run.state()
except KeyboardInterrupt:
    put_back(counter, np.full(1024, 2, np.int32))
    finish(run)
    print("finished after the interrupt")
""",
        lambda process: os.killpg(process.pid, signal.SIGINT),
    )
    assert (finished.status, finished.timed_out) == (0, False)
    assert "finished after the interrupt" in finished.output
    left = sandbox.close()
    assert (left.processes, left.files) == ((), ())


def test_a_device_outlives_the_thread_that_opened_it(run):
    finished = run("""
import threading, time
cards = []
thread = threading.Thread(target=lambda: cards.append(Card(0, xclbin)))
thread.start()
thread.join()
time.sleep(0.1)
counter = cards[0].put(np.zeros(1024, np.int32))
finish(start(cards[0].kernel("meet"), counter, 1))
print(fetch(counter, np.int32)[0])
""")
    assert (finished.status, finished.output.split()[-1]) == (0, "1")
