"""Functions of a program, run in one process of their own.

JAX's number of devices is fixed when it starts, and a process that starts JAX takes a
second of CPU time. So the tests of a module share one process.
"""

import json
import os
import subprocess
import sys
import traceback
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]


class Cases:
    """A process that runs functions of a program one after the other.

    Invariant: a process that ended, or whose answer nobody waited for, is replaced.
    """

    def __init__(self, program, **environment):
        self._command = [sys.executable, str(TESTS / program)]
        self._environment = {**os.environ, "JAX_PLATFORMS": "cpu", **environment}
        self._process: subprocess.Popen[str] | None = None

    def run(self, function, *arguments):
        process = self._process or self._start()
        words = [function, *arguments]
        try:
            print(json.dumps(words, default=str), file=process.stdin, flush=True)
            answer = process.stdout.readline()
        except BaseException:
            self.close()
            raise
        if not answer:
            self.close()
            pytest.fail(f"{words}: the process ended, see what it wrote to stderr")
        result, error = json.loads(answer)
        if error:
            pytest.fail(error, pytrace=False)
        return result

    def close(self):
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def _start(self):
        self._process = subprocess.Popen(
            self._command,
            env=self._environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        return self._process


def serve(*functions):
    """Runs in the process: answers each request with a result and a traceback."""
    named = {function.__name__: function for function in functions}
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)  # what functions print is no answer
        for request in sys.stdin:
            name, *arguments = json.loads(request)
            result = error = None
            try:
                result = named[name](*arguments)
            except Exception:
                error = traceback.format_exc()
            print(json.dumps([result, error]), file=answers, flush=True)
