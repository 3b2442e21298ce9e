"""``jaxinf inspect``: a store on the terminal, or as a JSON document.

Invariant: a store is only read, and the snapshot that pins its step is removed at the
end; the document's keys are stable: new ones may come, none changes its meaning.

``store``, ``store_id``, ``created_by`` (versions), ``pinned`` (whether all is certain
to be of one step), ``warnings``, ``step``, ``committed_at``, ``skipped_steps``,
``num_params``, ``leaves``: ``name``, ``shape``, ``dtype`` (of the params on the JAX
device), ``num_elements``, ``num_chunks`` (of each state), ``chunk_shape``,
``num_bytes`` (of all states), ``states``: ``name``, ``dtype``, ``codec``,
``num_bytes``, ``array`` (a directory that zarr and tensorstore open); ``state_bytes``
(of each state, in one slot), ``disk_bytes`` (of both slots), ``checkpoints``: ``name``,
``step``, ``committed_at``; ``drives``:
``root``, ``num_chunks`` and ``chunk_bytes`` (of one slot), ``free_bytes``,
``total_bytes`` (of its file system); ``writer``: null, or ``pid``, ``host``,
``command`` of the process of this machine that has the store open; ``member``: null,
or ``number``, ``count`` and ``num_held_params`` of a member of a run, whose other sizes
of leaves and states are the run's.
"""

import contextlib
import json
import math
import os
import shlex
import shutil
import socket
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from jaxinf.cli.arguments import StorePath, Switch
from jaxinf.cli.committed import for_each_member, open_committed
from jaxinf.cli.display import facts_table, heading, make_table
from jaxinf.errors import printable
from jaxinf.store import (
    SLOTS,
    CommittedStep,
    Holder,
    LeafRecord,
    Manifest,
    StoreDirectory,
    list_checkpoints,
    read_holder,
    required_bytes,
)
from jaxinf.terminal import format_bytes, make_console


@dataclass(frozen=True)
class Inspect:
    """Show a store's committed step, leaves, bytes, drives and checkpoints.

    This works during a run. The committed step is pinned with hard links while it is
    read, so the output is of a single step; no data is copied. Of a run in several
    processes each member is shown.
    """

    store: StorePath
    # Print one JSON document instead.
    json: Switch = False

    def run(self) -> int:
        return for_each_member(self.store, self._inspect, as_json=self.json)

    def _inspect(self, path: Path) -> bool:
        with open_committed(path) as (directory, step):
            document = _document(directory, step)
        if self.json:
            print(json.dumps(document, indent=1, allow_nan=False))
        else:
            _print_store(make_console(), document)
        return True


def _document(directory: StoreDirectory, step: CommittedStep) -> dict[str, Any]:
    leaves = [_leaf(directory, leaf) for leaf in step.manifest.leaves]
    state_bytes: Counter[str] = Counter()
    for leaf in leaves:
        for state in leaf["states"]:
            state_bytes[state["name"]] += state["num_bytes"]
    writer = _find_writer(directory.path)
    return {
        "store": str(directory.path),
        "store_id": step.manifest.store_id,
        "created_by": dict(step.manifest.created_by),
        "pinned": not step.warning,
        "warnings": [step.warning] if step.warning else [],
        "step": step.commit.step,
        "committed_at": step.commit.committed_at,
        "skipped_steps": step.commit.skipped_steps,
        "num_params": step.manifest.num_params,
        "leaves": leaves,
        "state_bytes": state_bytes,
        "disk_bytes": _disk_bytes(directory),
        "checkpoints": [asdict(info) for info in list_checkpoints(directory)],
        "drives": [*_drives(directory)],
        "writer": writer and msgspec.to_builtins(writer),
        "member": _member(step.manifest),
    }


def _member(manifest: Manifest) -> dict[str, int] | None:
    if (member := manifest.member) is None:
        return None
    held = {"num_held_params": manifest.num_held_params}
    return {"number": member.number, "count": member.count} | held


def _leaf(directory: StoreDirectory, leaf: LeafRecord) -> dict[str, Any]:
    num_elements = math.prod(leaf.shape)
    states = [
        {
            "name": state.name,
            "dtype": state.dtype,
            "codec": state.codec,
            "num_bytes": state.num_elements(num_elements) * state.itemsize,
            "array": str(directory.path / "current" / leaf.array_name(state.name)),
        }
        for state in leaf.states
    ]
    return {
        "name": leaf.name,
        "shape": leaf.shape,
        "dtype": leaf.dtype,
        "num_elements": num_elements,
        "num_chunks": len(leaf.csds),
        "chunk_shape": leaf.chunk_shape,
        "num_bytes": sum(state["num_bytes"] for state in states),
        "states": states,
    }


def _drives(directory: StoreDirectory) -> Iterator[dict[str, Any]]:
    num_chunks = Counter(chunk.csd for chunk in directory.manifest.held_chunks())
    roots = directory.manifest.csds or (str(directory.path),)
    chunk_bytes = required_bytes(directory, num_steps=1)
    for csd, folder in enumerate(directory.csd_directories):
        usage = shutil.disk_usage(folder)
        yield {
            "root": roots[csd],
            "num_chunks": num_chunks[csd],
            "chunk_bytes": chunk_bytes[folder],
            "free_bytes": usage.free,
            "total_bytes": usage.total,
        }


def _disk_bytes(directory: StoreDirectory) -> int:
    """Counts the blocks of both slots in bytes; a file in both counts once."""
    sizes: dict[tuple[int, int], int] = {}
    for slot in SLOTS:
        for root in directory.step_roots(slot):
            for folder, _, files in os.walk(root):
                for file in files:
                    # A writer may have renamed the file.
                    with contextlib.suppress(FileNotFoundError):
                        status = os.lstat(os.path.join(folder, file))
                        sizes[status.st_dev, status.st_ino] = status.st_blocks * 512
    return sum(sizes.values())


def _find_writer(store: Path) -> Holder | None:
    """Returns the process that a store's lock names, if it lives on this machine."""
    writer = read_holder(store)  # a taken lock would refuse a run that starts now
    if writer is None or writer.host != socket.gethostname():
        return None
    return writer if Path(f"/proc/{writer.pid}").exists() else None


def _print_store(console: Console, document: Mapping[str, Any]) -> None:
    console.print(Text(printable(document["store"]), style="bold"), soft_wrap=True)
    facts = _facts(document).items()
    console.print(facts_table((name, printable(fact)) for name, fact in facts))
    console.print(heading("drives"))
    console.print(_drives_table(document["drives"]))
    console.print(heading("leaves"))
    console.print(_leaves_table(document["leaves"], console.width))


def _facts(document: Mapping[str, Any]) -> dict[str, str]:
    leaves, state_bytes = document["leaves"], document["state_bytes"]
    states = ", ".join(f"{k} {format_bytes(num)}" for k, num in state_bytes.items())
    process = "none on this machine"
    if writer := document["writer"]:
        process = f"process {writer['pid']} on {writer['host']}: "
        process += shlex.join(writer["command"])[:120]
    array = leaves[0]["states"][0]["array"] if leaves else "nothing"
    held, of_run, export = "", "", dict[str, str]()
    if member := document["member"]:
        held = f"; this member, of {member['count']}, holds "
        held += f"{member['num_held_params']:,} of them"
        of_run, run = (
            " of the whole run",
            shlex.quote(os.path.dirname(document["store"])),
        )
        export = {"for all": f"jaxinf checkpoint export {run} DEST"}
        array += "; what other members hold reads as zeros there"
    return {
        "step": f"{document['step']:,}, committed {document['committed_at']}",
        "skipped": f"{document['skipped_steps']:,} steps with a non-finite gradient",
        "params": f"{document['num_params']:,} in {len(leaves):,} leaves{held}",
        "state": f"{format_bytes(sum(state_bytes.values()))}{of_run}: {states}",
        "on disk": f"{format_bytes(document['disk_bytes'])} in two slots",
        "checkpoints": ", ".join(c["name"] for c in document["checkpoints"]) or "none",
        "writer": process,
        "made by": ", ".join(f"{k} {v}" for k, v in document["created_by"].items()),
        **export,
        "for zarr": array,
    }


def _drives_table(drives: Sequence[Mapping[str, Any]]) -> Table:
    columns = ("chunks", "one slot", "free", "of")
    sizes = ("chunk_bytes", "free_bytes", "total_bytes")
    rows = [
        (
            printable(drive["root"]),
            f"{drive['num_chunks']:,}",
            *(format_bytes(drive[size]) for size in sizes),
        )
        for drive in drives
    ]
    return make_table(("root", *columns), rows, columns)


def _leaves_table(leaves: Sequence[Mapping[str, Any]], width: int) -> Table:
    rows = [
        (
            printable(leaf["name"]),
            str(tuple(leaf["shape"])),
            leaf["dtype"],
            printable(_states_by_dtype(leaf["states"])),
            format_bytes(leaf["num_bytes"]),
        )
        for leaf in leaves
    ]
    table = make_table(("leaf", "shape", "dtype", "states", "size"), rows, ("size",))
    # Users copy names, so the other columns are shortened first.
    longest = max((len(row[0]) for row in rows), default=0)
    table.columns[0].min_width = min(longest, max(20, width - 50))
    return table


def _states_by_dtype(states: Sequence[Mapping[str, Any]]) -> str:
    """Groups names by dtype: ``params mu nu float32``."""
    names: dict[str, str] = {}
    for state in states:
        names[state["dtype"]] = names.get(state["dtype"], "") + state["name"] + " "
    return ", ".join(f"{name}{dtype}" for dtype, name in names.items())
