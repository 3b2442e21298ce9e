"""Two processes of one JAX program: what is on devices of both is refused by name."""

import os
import socket
import subprocess
import sys
from pathlib import Path

PROGRAM = Path(__file__).parents[1] / "support" / "shared_devices.py"


def test_devices_of_another_process_are_refused(place):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    running = [
        subprocess.Popen(
            [sys.executable, PROGRAM, place, str(port), str(number)],
            env={**os.environ, "JAX_PLATFORMS": "cpu"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for number in range(2)
    ]
    try:
        told = [process.communicate(timeout=240)[0] for process in running]
    finally:
        for process in running:
            process.kill()
    for process, text in zip(running, told, strict=True):
        assert process.returncode == 0, text
        assert text.endswith("refused\n")
