"""The words between a contender of scripts/bench_peers.py and its parent.

A contender is a process of its own. It prints a line of JSON about itself when it is
ready. Then each line that it reads is a number of steps, and it answers with a line of
figures when it has run them and is at rest. What libraries print goes to stderr.

Invariant: only the standard library, so that it runs in every environment; all figures
but the seconds are the kernel's, so they mean the same for every contender.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

NUM_WARM_UP = 2
"""Steps before the first turn: they compile, and write both slots of a store."""


class Contender(NamedTuple):
    """A program in training.

    Attributes:
      about: what it is: `params`, and versions.
      step: runs a step; returns the seconds that count.
      rest: blocks until what the last step has left to do is done.
    """

    about: dict[str, Any]
    step: Callable[[], float]
    rest: Callable[[], object] = lambda: None


def serve(make: Callable[[dict[str, Any]], Contender]) -> None:
    """Runs steps of what `make` makes of the program's argument, as stdin asks.

    The first step of a turn does not count in seconds: it pays for what others left
    over. In bytes all count, as each turn reads what the one before it has left.
    """
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    contender = make(json.loads(sys.argv[1]))
    for _ in range(NUM_WARM_UP):
        contender.step()
    contender.rest()
    answers.write(json.dumps(contender.about) + "\n")
    for line in sys.stdin:
        before = moved_bytes()
        seconds = [contender.step() for _ in range(int(line) + 1)]
        contender.rest()
        after, began = moved_bytes(), time.perf_counter()
        os.sync()  # nobody pays for what another has left in the drive's cache
        found = {
            "step_s": sum(seconds[1:]) / int(line),
            "flush_s": time.perf_counter() - began,
            "read_bytes": (after[0] - before[0]) / len(seconds),
            "written_bytes": (after[1] - before[1]) / len(seconds),
            "peak_bytes": _kernel_says("status", "VmHWM") << 10,
        }
        answers.write(json.dumps(found) + "\n")
    answers.close()
    os._exit(0)  # libraries of peers leave threads and processes to wait for


def moved_bytes() -> tuple[int, int]:
    """Returns bytes that this process has had read from drives, and written."""
    return _kernel_says("io", "read_bytes"), _kernel_says("io", "write_bytes")


def _kernel_says(file: str, name: str) -> int:
    lines = Path("/proc/self", file).read_text().splitlines()
    return next(int(x.split()[1]) for x in lines if x.startswith(f"{name}:"))
