"""``jaxinf checkpoint``: keeps, lists, removes and restores committed steps.

Invariant: no command disturbs a running writer; to restore, the store must be closed.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import tyro

from jaxinf.cli.exchange import Export
from jaxinf.cli.options import StorePath, option
from jaxinf.cli.terminal import make_table
from jaxinf.command_line import UsageError
from jaxinf.errors import StoreFormatError, StoreMismatchError
from jaxinf.store import (
    StoreDirectory,
    find_checkpoint,
    hold_members,
    list_checkpoints,
    list_whole,
    remove_whole,
    restore_whole,
    save_whole,
)
from jaxinf.terminal import format_bytes, make_console, printable


@dataclass(frozen=True)
class Save:
    """Keep the committed step by hard links, without copying data; print its path."""

    store: StorePath
    name: Annotated[
        tyro.conf.Positional[str | None],
        option("The checkpoint's name; by default the step's number.", "[NAME]"),
    ] = None

    def run(self) -> None:
        print(save_whole(self.store, self.name))


@dataclass(frozen=True)
class List:
    """Show the checkpoints: step, time, and the bytes that removing each would free."""

    store: StorePath
    json: Annotated[bool, option("Print one JSON document instead.")] = False

    def run(self) -> None:
        found = list_whole(self.store)
        if self.json:
            print(json.dumps([asdict(info) for info in found], indent=1))
            return
        console = make_console()
        if not found:
            console.print(
                f"no checkpoints; make one: jaxinf checkpoint save {self.store}"
            )
            return
        rows = [
            (
                printable(info.name),
                str(info.step),
                printable(info.committed_at),
                format_bytes(info.own_bytes),
            )
            for info in found
        ]
        columns = ("name", "step", "committed", "own bytes")
        console.print(make_table(columns, rows, ("step",)))


@dataclass(frozen=True)
class Remove:
    """Remove checkpoints and free their space."""

    store: StorePath
    names: Annotated[
        tyro.conf.Positional[tuple[str, ...]], option("Their names.", "NAME [NAME ...]")
    ]

    def run(self) -> None:
        if not self.names:
            raise UsageError("remove: name the checkpoints to remove")
        remove_whole(self.store, self.names)
        for name in self.names:
            print(f"removed {printable(name)}", file=sys.stderr)


@dataclass(frozen=True)
class Restore:
    """Make the next run continue from a checkpoint, which stays as it is."""

    store: StorePath
    name: Annotated[tyro.conf.Positional[str], option("Its name.", "NAME")]
    discard_current: Annotated[
        bool, option("Discard the committed step, even if no checkpoint keeps it.")
    ] = False

    def run(self) -> None:
        with hold_members(self.store) as members:
            if not self.discard_current:
                _check_kept(members, self.name, self.store)
            record = restore_whole(members, self.name)
        again = f"at step {record.step} again; the next run goes on from there"
        print(f"{self.store}: {again}")


def _check_kept(parts: Sequence[StoreDirectory], name: str, store: Path) -> None:
    """Refuses to give up a committed step that no checkpoint of a part keeps."""
    give_up = f"jaxinf checkpoint restore {store} {name} --discard-current"
    for directory in parts:
        find_checkpoint(directory, name)
        try:
            current = directory.read_commit()
        except StoreFormatError as error:
            raise StoreMismatchError(
                f"{error}. So it is not known whether a checkpoint keeps the committed "
                f"step; give it up with: {give_up}"
            ) from error
        if current is None:
            continue
        kept = {
            find_checkpoint(directory, info.name).committed_at
            for info in list_checkpoints(directory)
        }
        if current.committed_at not in kept:
            raise StoreMismatchError(
                f"{directory.path}: step {current.step} is committed and in no "
                f"checkpoint; keep it first (jaxinf checkpoint save {store} NAME), or "
                f"give it up ({give_up})"
            )


@dataclass(frozen=True)
class Checkpoint:
    """Keep, list, remove and restore committed steps; export them."""

    action: Save | List | Remove | Restore | Export

    def run(self) -> int:
        """Prints to standard output; returns the exit status."""
        self.action.run()
        return 0
