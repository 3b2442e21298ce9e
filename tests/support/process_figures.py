"""Prints what a second process costs: seconds of commits.

    python tests/support/process_figures.py [--turns 3]

Each pair runs in turns. Commits need idle cores to mean anything; the load is printed.
"""

import argparse
import os
import re
import statistics
import tempfile
from pathlib import Path

from processes import run_alone, running


def figure(name, output):
    return float(re.search(rf"^{name} (\S+)", output, re.M).group(1))


def alone(place, name, *arguments):
    return figure(name, run_alone(place / "store", *arguments, num_devices=2))


def together(place, name, *arguments):
    with running(place, place / "store", *arguments) as processes:
        assert processes.wait() == [0, 0], processes
        return max(figure(name, output) for output in processes.outputs())


def compared(root, turns, name, *arguments):
    """Returns a figure of one process and of two with the same mesh, turn by turn."""
    pairs = []
    for turn in range(turns):
        pair = []
        for run in (alone, together):
            place = Path(tempfile.mkdtemp(dir=root, prefix=f"{turn}-"))
            pair.append(run(place, name, *arguments))
        pairs.append(pair)
    return pairs


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=3)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as root:
        pairs = compared(root, given.turns, "commit_s", "--steps", 20)
        added = [1e3 * (two - one) for one, two in pairs]
        print(f"commits, s: {pairs}; {statistics.median(added):+.1f} ms with two")
        print(f"load of the last minute: {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
