"""Statistics and histograms drawn in text.

Invariant: every element counts in exactly one line of a histogram, including elements
without a bin (zeros on a log scale, values out of range, NaN).
"""

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.text import Text

from jaxinf.cli.terminal import bar, facts_table, heading, make_table
from jaxinf.terminal import format_bytes, printable

__all__ = ["print_statistics"]

_BAR_WIDTH = 40


def print_statistics(console: Console, document: Mapping[str, Any]) -> None:
    """Prints the document of `store_report.describe_leaf_statistics`."""
    leaf = document["leaf"]
    shape = str(tuple(leaf["shape"]))
    console.print(Text(printable(leaf["name"]), style="bold"))
    console.print(
        facts_table(
            [
                ("store", printable(document["store"])),
                ("step", f"{document['step']:,}"),
                ("shape", f"{shape} ({leaf['num_elements']:,} elements)"),
                ("params on the JAX device", leaf["dtype"]),
                ("chunks", f"{leaf['num_chunks']:,} of each state"),
                ("all states", format_bytes(leaf["num_bytes"])),
            ]
        )
    )
    _print_moments(console, document)
    for name, found in document["statistics"].items():
        if found["histogram"] is not None:
            _print_histogram(console, name, found)


def _print_moments(console: Console, document: Mapping[str, Any]) -> None:
    right = ("mean", "std", "min", "max", "zeros", "non-finite")
    table = make_table("state", "dtype", *right, right=right)
    dtypes = {state["name"]: state["dtype"] for state in document["leaf"]["states"]}
    for name, found in document["statistics"].items():
        zeros = found["num_zeros"] / max(1, found["num_elements"])
        bad = f"{found['num_non_finite']:,}"
        table.add_row(
            printable(name),
            dtypes[name],
            *(_number(found[key]) for key in ("mean", "std", "min", "max")),
            f"{zeros:.4g}" if 0 < zeros < 0.0001 else f"{zeros:.2%}",
            Text(bad, style="bold red") if found["num_non_finite"] else bad,
        )
    console.print()
    console.print(table)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _print_histogram(console: Console, name: str, found: Mapping[str, Any]) -> None:
    histogram = found["histogram"]
    is_log = histogram["scale"] == "log10"
    console.print(heading(f"{printable(name)}{' (log scale)' if is_log else ''}"))
    rows = _rows(found)
    most = max(count for _, count in rows)
    is_unicode = console.encoding.startswith("utf")
    table = make_table("from", "elements", "", right=("from", "elements"))
    table.show_header = False
    table.box = None
    for label, count in rows:
        drawn = bar(count / max(1, most), _BAR_WIDTH, is_unicode=is_unicode)
        table.add_row(label, f"{count:,}", Text(drawn, style="cyan"))
    console.print(table)


def _rows(found: Mapping[str, Any]) -> list[tuple[str, int]]:
    histogram = found["histogram"]
    edges, counts = histogram["edges"], histogram["counts"]
    special = [("not finite", found["num_non_finite"])]
    if histogram["scale"] == "log10":
        special.append(("zero", found["num_zeros"]))
    special.append((f"below {edges[0]:.3g}", histogram["num_below"]))
    rows = [(label, count) for label, count in special if count]
    rows += [(f"{edge:.3g}", count) for edge, count in zip(edges, counts, strict=False)]
    if histogram["num_above"]:
        rows.append((f"above {edges[-1]:.3g}", histogram["num_above"]))
    return rows
