"""Programs of several processes: started, waited for, killed; none is left behind."""

import contextlib
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
from families import LONG

PROGRAM = Path(__file__).with_name("distributed_program.py")
_TIMEOUT_S = 600 if LONG else 150


def free_port():
    """Returns a port that no connection gets before the program listens there.

    The system gives connections, such as those of other programs, higher ones.
    """
    while True:
        port = random.SystemRandom().randrange(10_000, 32_000)
        with socket.socket() as one, contextlib.suppress(OSError):
            one.bind(("localhost", port))
            return port


def environment(num_devices):
    return {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "PJRT_NPROC": str(max(8, 2 * num_devices)),
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} "
        f"--xla_force_host_platform_device_count={num_devices}",
    }


class Processes:
    """The processes of one program, each with the same arguments and some of its own.

    Their output is in files in `place`.
    """

    def __init__(
        self,
        place,
        arguments,
        *,
        count=2,
        num_devices=1,
        own=None,
        program=(PROGRAM,),
        variables=None,
    ):
        address = f"localhost:{free_port()}"
        self.files = [place / f"output-{number}" for number in range(count)]
        self.all = []
        for number, file in enumerate(self.files):
            line = [*map(str, [*program, *arguments])]
            line += ["--distributed", f"{address},{count},{number}"]
            with file.open("w") as out:
                self.all.append(
                    subprocess.Popen(
                        [sys.executable, *line, *(own or {}).get(number, [])],
                        env=environment(num_devices) | (variables or {}),
                        stdout=out,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,
                    )
                )

    def wait(self, timeout_s=_TIMEOUT_S):
        """Returns the exit statuses; fails if the processes do not end in time."""
        until_s = time.monotonic() + timeout_s
        for one in self.all:
            try:
                one.wait(max(0.1, until_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                self.kill()
                raise AssertionError(f"no end in {timeout_s} s:\n{self}") from None
        return [one.returncode for one in self.all]

    def wait_for(self, text, number=0, timeout_s=120):
        until_s = time.monotonic() + timeout_s
        while text not in self.output(number):
            if self.all[number].poll() is not None or time.monotonic() > until_s:
                self.kill()
                raise AssertionError(f"{text!r} was not printed:\n{self}")
            time.sleep(0.02)

    def output(self, number):
        return self.files[number].read_text()

    def outputs(self):
        return [self.output(number) for number in range(len(self.all))]

    def kill(self):
        for one in self.all:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(one.pid, signal.SIGKILL)
            one.wait()

    def __str__(self):
        return "\n".join(f"-- {n}\n{text}" for n, text in enumerate(self.outputs()))


@contextlib.contextmanager
def running(place, *arguments, **options):
    """Starts processes; at the end none of them, nor a child of theirs, is left."""
    found = Processes(place, arguments, **options)
    try:
        yield found
    finally:
        found.kill()


def ran(place, *arguments, **options):
    with running(place, *arguments, **options) as found:
        assert found.wait() == [0] * len(found.all), found
    return found


def run_alone(*arguments, num_devices):
    """Runs the program in one process with all devices; returns its output."""
    result = subprocess.run(
        [sys.executable, str(PROGRAM), *map(str, arguments)],
        env=environment(num_devices),
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def losses(output):
    return {
        int(step): bits for step, bits in re.findall(r"^loss (\d+) (\w+)", output, re.M)
    }


def line(output, name):
    found = re.search(rf"^{name} (.*)", output, re.M)
    assert found, output
    return found[1]


def assert_nearly(found, expected):
    """Compares losses of sums in another order."""
    assert found.keys() == expected.keys()
    values = [
        np.array([int(bits, 16) for _, bits in sorted(one.items())], "u4").view("f4")
        for one in (found, expected)
    ]
    np.testing.assert_allclose(*values, rtol=1e-6)
