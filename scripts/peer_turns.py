"""What a contender of scripts/bench_peers.py and its parent say to each other.

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
from typing import Any, Protocol

NUM_WARM_UP = 2
"""Steps before the first turn: they compile, and write both slots of a store."""


class Contender(Protocol):
    """A program in training.

    Attributes:
      about: what it is: `params`, and versions.
    """

    about: dict[str, Any]

    def step(self) -> float:
        """Runs a step; returns the seconds that count."""
        ...

    def rest(self) -> None:
        """Blocks until what the last step has left to do is done."""
        ...


def serve(make: Callable[[dict[str, Any]], Contender]) -> None:
    """Runs steps as they are asked for on stdin.

    The first step of a turn does not count in seconds: it pays for what others left
    over. In bytes all count, as each turn reads what the one before it has left.

    Args:
      make: makes the contender, from the program's argument.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(found: dict[str, Any]) -> None:
        answers.write(json.dumps(found) + "\n")
        answers.flush()

    contender = make(json.loads(sys.argv[1]))
    for _ in range(NUM_WARM_UP):
        contender.step()
    contender.rest()
    answer(contender.about)
    for line in sys.stdin:
        before = moved_bytes()
        seconds = [contender.step() for _ in range(int(line) + 1)]
        contender.rest()
        after, began = moved_bytes(), time.perf_counter()
        os.sync()  # nobody pays for what another has left in the drive's cache
        flush_s = time.perf_counter() - began
        read, written = (b - a for a, b in zip(before, after, strict=True))
        answer(
            {
                "step_s": sum(seconds[1:]) / int(line),
                "flush_s": flush_s,
                "read_bytes": read / len(seconds),
                "written_bytes": written / len(seconds),
                "peak_bytes": peak_bytes(),
            }
        )
    answers.close()
    os._exit(0)  # libraries of peers leave threads and processes to wait for


def moved_bytes() -> tuple[int, int]:
    """Returns bytes that this process has had read from drives, and written."""
    lines = Path("/proc/self/io").read_text().splitlines()
    counts = dict(line.split(": ") for line in lines)
    return int(counts["read_bytes"]), int(counts["write_bytes"])


def peak_bytes() -> int:
    """Returns the most memory that this process has had, from its beginning."""
    lines = Path("/proc/self/status").read_text().splitlines()
    [line] = [line for line in lines if line.startswith("VmHWM:")]
    return int(line.split()[1]) * 1024
