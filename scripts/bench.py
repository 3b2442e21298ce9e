"""Parts of the scripts that measure: a command line, turns, medians, a document.

    def measure(arguments, place): ...         # a dictionary of figures
    run(__doc__, measure, reps=5, memory=SIZE | {"default": 1 << 30})

Invariant: what is compared runs in turns, in one minute and on one drive, and ratios
are of pairs.
"""

import argparse
import json
import math
import os
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxinf.terminal import parse_bytes

SIZE: dict[str, Any] = {"type": parse_bytes}
FLAG: dict[str, Any] = {"action": "store_true"}


def run(
    doc: str | None,
    measure: Callable[[argparse.Namespace, Path], Any],
    show: Callable[[Any], None] | None = None,
    needs_store: bool = True,
    **options: Any,
) -> None:
    """Reads the command line, measures, and prints JSON; with --json in one line.

    Args:
      doc: what --help says.
      measure: is given the arguments and an empty folder on the drive of --store.
      show: prints figures for people, without --json.
      needs_store: whether --store has to be given.
      options: by name, a default, or keyword arguments of argparse.
    """
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--store", type=Path, required=needs_store, metavar="DIR")
    parser.add_argument("--json", **FLAG)
    for name, given in options.items():
        if not isinstance(given, dict):
            given = {"type": type(given), "default": given}
        parser.add_argument(f"--{name.replace('_', '-')}", **given)
    arguments = parser.parse_args()
    if arguments.store is None:
        found = measure(arguments, Path(os.devnull))
    else:
        arguments.store.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=arguments.store, prefix="bench-") as place:
            found = measure(arguments, Path(place))
    if show is None or arguments.json:
        print(json.dumps(found, indent=None if arguments.json else 1))
    else:
        show(found)


def rounded(figures: Mapping[str, Any]) -> dict[str, Any]:
    """Returns figures, those that are not whole to five digits."""
    return {k: float(f"{v:.5g}") if type(v) is float else v for k, v in figures.items()}


def print_table(
    rows: Sequence[Mapping[str, Any]], width: int = 12, digits: str = ".3g"
) -> None:
    """Prints records in columns, below their names, and an empty line."""
    for row in [dict.fromkeys(rows[0]), *rows] if rows else ():
        cells = (k if v is None else v for k, v in row.items())
        texts = (f"{v:{digits}}" if isinstance(v, float) else str(v) for v in cells)
        print("  ".join(f"{text:>{width}}" for text in texts))
    print()


def load_average() -> float:
    """Returns how many programs run, this one among them."""
    return round(os.getloadavg()[0], 2)


def ratios(
    name: str, some: Sequence[float], others: Sequence[float]
) -> dict[str, float | list[float]]:
    """Returns the median of the ratios of pairs, and an interval that has it."""
    found = [a / b for a, b in zip(some, others, strict=True)]
    return {
        name: round(statistics.median(found), 4),
        f"{name}_interval": [round(one, 4) for one in interval(found)],
    }


def interval(values: Sequence[float], confidence: float = 0.95) -> tuple[float, float]:
    """Two of the values, between which the median lies with that confidence or more.

    All values where they are too few for it.
    """
    ordered, count = sorted(values), len(values)
    skipped, tail = 0, 0.0
    while skipped < count // 2:
        tail += 2 * math.comb(count, skipped) / 2**count
        if tail > 1 - confidence:
            break
        skipped += 1
    outermost = max(0, skipped - 1)
    return ordered[outermost], ordered[-1 - outermost]


def reset_peak() -> None:
    """Begins the process's peak of resident memory anew."""
    Path("/proc/self/clear_refs").write_text("5")


def resident_bytes(name: str = "VmRSS", process: str = "self") -> int:
    """Returns the resident memory of a process, or its peak (VmHWM)."""
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    [line] = [line for line in lines if line.startswith(f"{name}:")]
    return int(line.split()[1]) << 10
