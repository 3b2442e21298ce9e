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
from jaxinf.cli.looking import open_committed, over_members
from jaxinf.cli.terminal import show_progress
from jaxinf.errors import printable
from jaxinf.store import (
    SLOTS,
    CommittedStep,
    Damage,
    StoreDirectory,
    check_exists,
    checkpoint_names,
    left_by_copy,
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
        """Prints to standard output; returns the exit status."""
        if left := left_by_copy(self.store):
            make_console(sys.stderr).print(
                f"warning: {left}: what a copy has made or replaced that was "
                "interrupted, or goes on; give its command again, which completes it"
            )
        return over_members(self.store, self._verify, as_json=self.json)

    def _verify(self, path: Path) -> bool:
        """Verifies a store, and prints; returns whether there is no damage."""
        damages: dict[str, list[Damage]] = {}
        with open_committed(path) as (directory, step):
            seen: dict[tuple[int, int], int] = {}
            for title, place in _steps(directory, step, self.checkpoint):
                with show_progress(title) as progress:
                    found = verify_step(directory, place, progress, seen=seen)
                if place.exists():  # a run may have removed a checkpoint meanwhile
                    named = [replace(one, file=_in_slot(one.file)) for one in found]
                    damages[title] = named
                elif self.checkpoint is not None:
                    check_exists(directory, self.checkpoint)
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
        check_exists(directory, name)
    for one in names:
        yield f"checkpoint {one}", directory.path / "checkpoints" / one


def _in_slot(file: Path) -> Path:
    """Returns the file of a slot that one of a snapshot, which goes, is a link to."""
    for place in (*SLOTS, *(f"slots/{slot}" for slot in SLOTS)):  # on a CSD, or not
        other = Path(re.sub(r"/snapshots/[0-9a-f]{32}/", f"/{place}/", str(file)))
        if other.exists() and file.exists() and other.samefile(file):
            return other
    return file


def _print(path: Path, found: dict[str, list[Damage]], num_bytes: int) -> None:
    console = make_console()
    for title, damages in found.items():
        verdict = f"{len(damages)} damaged" if damages else "clean"
        console.print(f"{title}: {format_bytes(num_bytes)}, {verdict}")
        for damage in damages:
            console.print(printable(f"  {damage.what}: {damage.problem}"))
            console.print(printable(f"    {damage.file}"))
    if any(found.values()):
        clean = [title for title, damages in found.items() if not damages]
        remedy = f"go back to a clean checkpoint: jaxinf checkpoint restore {path} NAME"
        if not any(title.startswith("checkpoint ") for title in clean):
            remedy = "a copy or an export from before helps, as no checkpoint is clean"
        console.print(
            "A run never uses damaged chunks. Check the drives (dmesg, smartctl). A "
            f"copy has all links and documents anew: jaxinf store copy {path} NEW. If "
            f"chunks of the committed step are damaged, {remedy}"
        )
