"""``jaxinf verify``: reads a whole store and compares it with its checksums.

Invariant: the store is only read; all damage is listed, and the exit status tells
whether there is any.
"""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

from jaxinf.cli.committed import open_committed
from jaxinf.cli.terminal import show_progress
from jaxinf.store import (
    SLOTS,
    Damage,
    StoreDirectory,
    WholeStep,
    checkpoint_names,
    find_checkpoint,
    link_damages,
    plan_damages,
    step_bytes,
    stray_checkpoints,
    verify_step,
)
from jaxinf.terminal import format_bytes, make_console, printable

_Reports: TypeAlias = list[tuple[str, list[Damage]]]


def run(path: Path, *, name: str | None, as_json: bool) -> bool:
    """Verifies the committed step and all checkpoints; blocks.

    Args:
      name: the only checkpoint to verify; None for the whole store.

    Returns:
      Whether there is no damage.

    Raises:
      JaxinfError: there is no store, or it cannot be read at all.
      ValueError: there is no such checkpoint.
    """
    reports: _Reports = []
    with open_committed(path) as (directory, step):
        seen: dict[tuple[int, int], int] = {}
        for title, place in _steps(directory, step, name):
            with show_progress(title) as progress:
                damages = verify_step(directory, place, progress, seen=seen)
            if place.exists():  # a run may have removed a checkpoint meanwhile
                reports.append((title, damages))
            elif name is not None:
                find_checkpoint(directory, name)
        if name is None:
            add = [
                *_slot_links(directory),
                *stray_checkpoints(directory),
                *plan_damages(directory.path),
            ]
            reports[0][1].extend(d for d in add if d not in reports[0][1])
        num_bytes = step_bytes(directory)
    if as_json:
        print(json.dumps(_document(path, reports, num_bytes), indent=1))
    else:
        _print(path, reports, num_bytes)
    return not any(damages for _, damages in reports)


def _steps(
    directory: StoreDirectory, step: WholeStep, name: str | None
) -> Sequence[tuple[str, Path]]:
    root = directory.path / "checkpoints"
    if name is not None:
        find_checkpoint(directory, name)
        return [(f"checkpoint {name}", root / name)]
    names = checkpoint_names(directory)
    kept = [(f"checkpoint {kept}", root / kept) for kept in names]
    return [(f"step {step.commit.step}, committed", step.path), *kept]


def _slot_links(directory: StoreDirectory) -> Sequence[Damage]:
    """Returns damaged links of the slots, since a snapshot has links of its own.

    What is gone of the spare slot is made again when the store is opened.
    """
    committed = directory.committed_slot()
    return [
        damage
        for slot in SLOTS
        for damage in link_damages(directory, slot)
        if slot == committed or os.path.lexists(damage.file)
    ]


def _document(path: Path, reports: _Reports, num_bytes: int) -> dict[str, Any]:
    return {
        "store": str(path),
        "step_bytes": num_bytes,
        "steps": [
            {
                "step": title,
                "damages": [
                    {"file": str(d.file), "what": d.what, "problem": d.problem}
                    for d in damages
                ],
            }
            for title, damages in reports
        ],
    }


def _print(path: Path, reports: _Reports, num_bytes: int) -> None:
    console = make_console()
    for title, damages in reports:
        verdict = f"{len(damages)} damaged" if damages else "clean"
        console.print(f"{title}: {format_bytes(num_bytes)}, {verdict}")
        for damage in damages:
            console.print(printable(f"  {damage.what}: {damage.problem}"))
            console.print(printable(f"    {damage.file}"))
    if any(damages for _, damages in reports):
        console.print(
            "A run never uses damaged chunks. Check the drives (dmesg, smartctl), then "
            f"go back to a clean checkpoint: jaxinf checkpoint restore {path} NAME"
        )
