"""``jaxinf verify``: reads a whole store and compares it with its checksums.

Invariant: the store is only read; all damage is listed, and the exit status tells
whether there is any.
"""

import json
import re
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated

from jaxinf.cli.arguments import StorePath, Switch, option
from jaxinf.cli.committed import for_each_member, open_committed
from jaxinf.cli.display import show_progress
from jaxinf.errors import printable
from jaxinf.store import (
    SLOTS,
    CommittedStep,
    Damage,
    StoreDirectory,
    check_checkpoint_exists,
    checkpoint_names,
    find_leftover_copy,
    step_bytes,
    verify_step,
)
from jaxinf.terminal import format_bytes, make_console


@dataclass(frozen=True)
class Verify:
    """Read the whole store and compare it with its checksums.

    Includes the committed step and every checkpoint, and works during a run. Names each
    damaged leaf, state, chunk, file and CSD. The exit status is 1 if there is damage,
    and 2 if a member of a run in several processes cannot be seen.
    """

    store: StorePath
    # Verify this checkpoint alone.
    checkpoint: Annotated[str | None, option("NAME")] = None
    # Print one JSON document instead.
    json: Switch = False

    def run(self) -> int:
        if left := find_leftover_copy(self.store):
            make_console(sys.stderr).print(
                f"warning: {left}: what a copy has made or replaced that was "
                "interrupted, or goes on; give its command again, which completes it"
            )
        return for_each_member(self.store, self._verify, as_json=self.json)

    def _verify(self, path: Path) -> bool:
        damages: dict[str, list[Damage]] = {}
        with open_committed(path) as (directory, step):
            seen: dict[tuple[int, int], int] = {}
            for title, place in _steps(directory, step, self.checkpoint):
                with show_progress(title) as progress:
                    found = verify_step(directory, place, progress, seen=seen)
                if place.exists():  # a run may have removed a checkpoint meanwhile
                    damages[title] = [replace(d, file=_in_slot(d.file)) for d in found]
                elif self.checkpoint is not None:
                    check_checkpoint_exists(directory, self.checkpoint)
            num_bytes = step_bytes(directory)
        if self.json:
            steps = [
                {"step": title, "damages": [*map(asdict, found)]}
                for title, found in damages.items()
            ]
            document = {"store": path, "step_bytes": num_bytes, "steps": steps}
            print(json.dumps(document, indent=1, default=str))
        else:
            _print(path, damages, num_bytes)
        return not any(damages.values())


def _steps(
    directory: StoreDirectory, step: CommittedStep, name: str | None
) -> Iterator[tuple[str, Path]]:
    names = [name] if name is not None else checkpoint_names(directory)
    if name is None:
        yield f"step {step.commit.step}, committed", step.path
    else:
        check_checkpoint_exists(directory, name)
    for checkpoint in names:
        yield f"checkpoint {checkpoint}", directory.path / "checkpoints" / checkpoint


def _in_slot(file: Path) -> Path:
    """Returns the slot's file that a file of the temporary snapshot is a link to."""
    for place in (*SLOTS, *(f"slots/{slot}" for slot in SLOTS)):  # on a CSD, or not
        linked = Path(re.sub(r"/snapshots/[0-9a-f]{32}/", f"/{place}/", str(file)))
        if linked.exists() and file.exists() and linked.samefile(file):
            return linked
    return file


def _print(path: Path, damages: dict[str, list[Damage]], num_bytes: int) -> None:
    console = make_console()
    for title, of_step in damages.items():
        verdict = f"{len(of_step)} damaged" if of_step else "clean"
        console.print(f"{title}: {format_bytes(num_bytes)}, {verdict}")
        for damage in of_step:
            console.print(printable(f"  {damage.what}: {damage.problem}"))
            console.print(printable(f"    {damage.file}"))
    if any(damages.values()):
        clean = [title for title, of_step in damages.items() if not of_step]
        remedy = f"go back to a clean checkpoint: jaxinf checkpoint restore {path} NAME"
        if not any(title.startswith("checkpoint ") for title in clean):
            remedy = "a copy or an export from before helps, as no checkpoint is clean"
        console.print(
            "A run never uses damaged chunks. Check the drives (dmesg, smartctl). A "
            f"copy has all links and documents anew: jaxinf store copy {path} NEW. If "
            f"chunks of the committed step are damaged, {remedy}"
        )
