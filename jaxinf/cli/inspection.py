"""``jaxinf inspect``: a store on the terminal.

Invariant: a store is only read; the snapshot that pins its step is removed at the end.
"""

import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from jaxinf.cli.committed import CommittedStep, open_committed
from jaxinf.cli.equations import formulas
from jaxinf.cli.histogram import print_statistics
from jaxinf.cli.statistics import Statistics, measure_array
from jaxinf.cli.store_report import describe_leaf_statistics, describe_store
from jaxinf.cli.terminal import facts_table, heading, make_table
from jaxinf.errors import StoreCorruptError
from jaxinf.store import (
    MASTER_PARAMS,
    LeafRecord,
    StateRecord,
    StepReader,
    find_leaf,
)
from jaxinf.terminal import format_bytes, make_console, printable

__all__ = ["run"]

_MAX_EQUATIONS = 12
_MAX_PAYLOAD = 400
_MAX_NAMES = 8


def run(
    store: str, *, leaf: str | None, state: str | None, as_json: bool, is_live: bool
) -> None:
    """Prints the contents of a store, or the statistics of one leaf.

    Args:
      store: the store's directory.
      leaf: the leaf to read; None for a description of the whole store.
      state: the only state to read; None for all.
      as_json: print the document of `jaxinf.cli.store_report`.
      is_live: do not pin the committed step.

    Raises:
      JaxinfError: there is no store, it is damaged, or a drive failed.
      ValueError: the store has no such leaf or state.
    """
    path = Path(store).expanduser().absolute()
    errors = make_console(sys.stderr)
    with open_committed(path, is_live=is_live) as step:
        for warning in step.warnings:
            errors.print(f"warning: {path}: {warning}")
        if leaf is None:
            document = describe_store(step)
        else:
            record = find_leaf(step.manifest, state or MASTER_PARAMS, leaf)
            chosen = [s for s in record.states if state in (None, s.name)]
            found = _measured(step, record, chosen)
            document = describe_leaf_statistics(step, record, found)
    if as_json:
        print(json.dumps(document, indent=1, allow_nan=False))
    elif leaf is None:
        _print_store(make_console(), document)
    else:
        print_statistics(make_console(), document)


def _measured(
    step: CommittedStep, record: LeafRecord, states: Sequence[StateRecord]
) -> dict[str, Statistics]:
    """Measures the statistics of a leaf's states, by name.

    A writer may replace the chunks of an unpinned step while they are read. So a chunk
    that differs from its checksum is damaged only if the step is still the committed
    one.
    """
    try:
        with StepReader(step.path, step.commit, directory=step.directory) as reader:
            return {s.name: measure_array(reader, record, s) for s in states}
    except StoreCorruptError:
        if step.is_pinned or step.directory.read_commit() == step.commit:
            raise
        with StepReader(
            step.path, step.commit, directory=step.directory, verify=False
        ) as reader:
            return {s.name: measure_array(reader, record, s) for s in states}


def _print_store(console: Console, document: Mapping[str, Any]) -> None:
    console.print(Text(printable(document["store"]), style="bold"))
    console.print(facts_table(_facts(document)))
    _print_leaves(console, document["leaves"])
    _print_states(console, document)
    _print_csds(console, document["csds"])
    _print_kernels(console, document)
    if document["scalar_state"]:
        _print_scalar_state(console, document["scalar_state"])
    if document["payload"] is not None:
        console.print(heading("payload"))
        text = json.dumps(document["payload"])
        more = " … (all of it: --json)" if len(text) > _MAX_PAYLOAD else ""
        console.print(text[:_MAX_PAYLOAD] + more)
    _print_readers(console, document)


def _facts(document: Mapping[str, Any]) -> list[tuple[str, str | Text]]:
    slot, disk = document["logical_bytes"], document["disk_bytes"]
    num_leaves = len(document["leaves"])
    rows: list[tuple[str, str | Text]] = [
        ("step", f"{document['step']:,}{_when(document['committed_at'])}"),
        ("skipped steps", f"{document['skipped_steps']:,}"),
        ("params", f"{document['num_params']:,} in {num_leaves:,} leaves"),
        (
            "state",
            f"{format_bytes(slot)}; on disk {format_bytes(disk)} in two slots",
        ),
        ("checkpoints", _checkpoints_text(document["checkpoints"])),
        ("writer", _writer_text(document["writer"])),
        ("made by", _made_by(document["created_by"])),
        ("store id", document["store_id"]),
    ]
    return [(name, value) for name, value in rows if value]


def _checkpoints_text(checkpoints: Sequence[Mapping[str, Any]]) -> str:
    names = [printable(info["name"]) for info in checkpoints]
    more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    return ", ".join(names[-_MAX_NAMES:]) + more if names else "none"


def _made_by(versions: Mapping[str, str]) -> str:
    return printable(", ".join(f"{name} {v}" for name, v in versions.items()))


def _when(committed_at: str) -> str:
    """Formats a time in UTC, with its age."""
    try:
        moment = datetime.fromisoformat(committed_at).astimezone(UTC)
    except (ValueError, OverflowError):
        return ", committed " + printable(committed_at)
    age = _duration((datetime.now(UTC) - moment).total_seconds())
    return f", committed {moment:%Y-%m-%d %H:%M:%S} UTC ({age} ago)"


def _duration(seconds: float) -> str:
    """Formats a duration in the largest unit of which there are at least two."""
    for length, unit in ((86400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 2 * length:
            return f"{seconds // length:.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"


def _writer_text(writer: Mapping[str, Any] | None) -> str:
    if writer is None:
        return "none on this machine"
    command = printable(shlex.join(writer["command"]))
    if len(command) > 120:
        command = command[:119] + "…"
    return f"process {writer['pid']} on {printable(writer['host'])}: {command}"


def _print_leaves(console: Console, leaves: Sequence[Mapping[str, Any]]) -> None:
    console.print(heading("leaves"))
    table = make_table("leaf", "shape", "dtype", "states", "size", right=("size",))
    # Users copy names, so the other columns are shortened first.
    longest = max((len(printable(leaf["name"])) for leaf in leaves), default=0)
    table.columns[0].min_width = min(longest, max(20, console.width - 50))
    for leaf in leaves:
        table.add_row(
            printable(leaf["name"]),
            str(tuple(leaf["shape"])),
            leaf["dtype"],
            _states_text(leaf["states"]),
            format_bytes(leaf["num_bytes"]),
        )
    console.print(table)


def _states_text(states: Sequence[Mapping[str, Any]]) -> str:
    """Groups names by dtype: ``params mu nu float32``."""
    words: list[str] = []
    for position, state in enumerate(states):
        words.append(state["name"])
        last = position + 1 == len(states)
        if last or states[position + 1]["dtype"] != state["dtype"]:
            words.append(state["dtype"] + ("" if last else ","))
    return printable(" ".join(words))


def _print_states(console: Console, document: Mapping[str, Any]) -> None:
    console.print(heading("states"))
    table = make_table(
        "state", "size", "bytes a param", right=("size", "bytes a param")
    )
    num_params = max(1, document["num_params"])
    total = [("all, one slot", document["logical_bytes"])]
    pairs = [(state["name"], state["num_bytes"]) for state in document["states"]]
    for name, num_bytes in pairs + total:
        share = f"{num_bytes / num_params:.4g}"
        table.add_row(printable(name), format_bytes(num_bytes), share)
    console.print(table)


def _print_csds(console: Console, csds: Sequence[Mapping[str, Any]]) -> None:
    console.print(heading("CSDs"))
    right = ("chunks", "one slot", "free", "of")
    table = make_table("root", "chunks", "one slot", "free", "of", right=right)
    for csd in csds:
        table.add_row(
            printable(csd["root"]),
            f"{csd['num_chunks']:,}",
            *(
                format_bytes(csd[k])
                for k in ("chunk_bytes", "free_bytes", "total_bytes")
            ),
        )
    console.print(table)


def _print_kernels(console: Console, document: Mapping[str, Any]) -> None:
    for kernel, lines in document["kernels"].items():
        users = [leaf for leaf in document["leaves"] if leaf["kernel"] == kernel]
        states = users[0]["states"] if users else []
        _, *slots = dict.fromkeys(["params", *(state["slot"] for state in states)])
        num_leaves = "1 leaf" if len(users) == 1 else f"{len(users):,} leaves"
        console.print(heading(f"update of {num_leaves} (# is a literal)"))
        written = formulas(lines, slots)
        shown = written[:_MAX_EQUATIONS]
        for line in shown:
            console.print(Padding(printable(line), (0, 0, 0, 2), expand=False))
        if len(shown) < len(written):
            console.print(
                f"  … {len(written) - len(shown)} more lines (--json has all)"
            )


def _print_scalar_state(console: Console, scalars: Sequence[Mapping[str, Any]]) -> None:
    console.print(heading("scalar state"))
    table = make_table("in the optax state", "dtype", "value")
    for scalar in scalars:
        value = str(scalar["value"])
        shown = value if len(value) <= 60 else value[:59] + "…"
        table.add_row(printable(scalar["path"]), scalar["dtype"], shown)
    console.print(table)


def _print_readers(console: Console, document: Mapping[str, Any]) -> None:
    arrays = [state["array"] for leaf in document["leaves"] for state in leaf["states"]]
    if not arrays:
        return
    console.print(heading("arrays, for zarr and tensorstore"))
    for array in arrays[: len(document["leaves"][0]["states"])]:
        console.print("  " + printable(array), soft_wrap=True)
    console.print(f"  zarr.open_array({arrays[0]!r}, mode='r')", soft_wrap=True)
    if document["writer"] is not None:
        console.print(
            "  A run is writing: for one consistent step read below store.snapshot()."
        )
