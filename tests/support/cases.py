"""Functions of a program of `tests/programs`, run in one process of their own.

JAX's number of devices is fixed when it starts, and a process that starts JAX takes a
second of CPU time. So the tests of a module share one process.
"""

import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

__all__ = ["Cases", "serve"]

PROGRAMS = Path(__file__).parents[1] / "programs"


class Cases:
    """A process that runs functions of a program one after the other.

    Invariant: a process that ended, or whose answer nobody waited for, is replaced.
    """

    def __init__(self, program: str, **environment: str):
        self._command = [sys.executable, str(PROGRAMS / program)]
        self._environment = {**os.environ, "JAX_PLATFORMS": "cpu", **environment}
        self._process: subprocess.Popen[str] | None = None

    def run(self, function: str, *arguments: Any) -> None:
        """Runs a function; what it raises fails the test."""
        process = self._process or self._start()
        words = [function, *map(str, arguments)]
        try:
            print(json.dumps(words), file=process.stdin, flush=True)
            answer = process.stdout.readline()
        except BaseException:
            self.close()
            raise
        if not answer:
            self.close()
            pytest.fail(f"{words}: the process ended, see what it wrote to stderr")
        if error := json.loads(answer):
            pytest.fail(error, pytrace=False)

    def close(self) -> None:
        """Ends the process."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def _start(self) -> subprocess.Popen[str]:
        self._process = subprocess.Popen(
            self._command,
            env=self._environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        return self._process


def serve(*functions: Callable[..., None]) -> None:
    """Runs in the process: answers each request with a traceback or None."""
    named = {function.__name__: function for function in functions}
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)  # what functions print is no answer
        for request in sys.stdin:
            name, *arguments = json.loads(request)
            try:
                named[name](*arguments)
                error = None
            except Exception:
                error = traceback.format_exc()
            print(json.dumps(error), file=answers, flush=True)
