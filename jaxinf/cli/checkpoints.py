"""``jaxinf checkpoint``: keeps, lists, removes and restores committed steps.

Invariant: no command disturbs a running writer; to restore, the store must be closed.
"""

import json
import sys
from dataclasses import asdict
from pathlib import Path

from jaxinf.cli.committed import open_directory
from jaxinf.cli.members import is_run
from jaxinf.cli.terminal import make_table
from jaxinf.errors import StoreFormatError, StoreMismatchError
from jaxinf.store import (
    StoreDirectory,
    check_checkpoint,
    find_checkpoint,
    hold_members,
    hold_store,
    list_checkpoints,
    list_whole,
    remove_checkpoint,
    remove_whole,
    restore_checkpoint,
    restore_whole,
    save_checkpoint,
    save_whole,
)
from jaxinf.terminal import format_bytes, make_console, printable


def save(store: Path, name: str | None) -> None:
    """Keeps the committed step and prints its path.

    Raises:
      JaxinfError, ValueError: as `jaxinf.store.save_checkpoint`.
    """
    if is_run(store):
        print(save_whole(store.expanduser().absolute(), name))
        return
    directory = open_directory(store)
    made = save_checkpoint(directory, name)
    print(directory.path / "checkpoints" / made)


def list_all(store: Path, *, as_json: bool) -> None:
    """Prints the checkpoints of a store, or those of all members of a run."""
    if is_run(store):
        found = list_whole(store)
    else:
        found = list_checkpoints(open_directory(store))
    if as_json:
        print(json.dumps([asdict(info) for info in found], indent=1))
        return
    console = make_console()
    if not found:
        console.print(f"no checkpoints; make one: jaxinf checkpoint save {store}")
        return
    table = make_table("name", "step", "committed", "own bytes", right=("step",))
    for info in found:
        own = format_bytes(info.own_bytes)
        at = printable(info.committed_at)
        table.add_row(printable(info.name), str(info.step), at, own)
    console.print(table)


def remove(store: Path, names: tuple[str, ...]) -> None:
    """Removes checkpoints, or none of them if one does not exist."""
    if is_run(store):
        remove_whole(store, names)
    else:
        directory = open_directory(store)
        for name in names:
            check_checkpoint(directory, name)
        for name in names:
            remove_checkpoint(directory, name)
    for name in names:
        print(f"removed {printable(name)}", file=sys.stderr)


def restore(store: Path, name: str, *, discard_current: bool) -> None:
    """Makes a checkpoint the store's committed step.

    Raises:
      StoreMismatchError: the committed step would be lost, without `discard_current`.
      StoreLockedError: a run has the store open.
    """
    if is_run(store):
        with hold_members(store) as members:
            for one in () if discard_current else members:
                find_checkpoint(one, name)
                _check_kept(one, name, store)
            record = restore_whole(members, name)
    else:
        with hold_store(store) as directory:
            find_checkpoint(directory, name)
            if not discard_current:
                _check_kept(directory, name, store)
            record = restore_checkpoint(directory, name)
    print(f"{store}: at step {record.step} again; the next run goes on from there")


def _check_kept(directory: StoreDirectory, name: str, store: Path) -> None:
    """Refuses to give up a committed step that no checkpoint keeps.

    Args:
      directory: the store, or a member of the run.
    """
    give_up = f"jaxinf checkpoint restore {store} {name} --discard-current"
    try:
        current = directory.read_commit()
    except StoreFormatError as error:
        raise StoreMismatchError(
            f"{error}. So it is not known whether a checkpoint keeps the committed "
            f"step; give it up with: {give_up}"
        ) from error
    if current is None:
        return
    kept = {
        find_checkpoint(directory, info.name).committed_at
        for info in list_checkpoints(directory)
    }
    if current.committed_at not in kept:
        raise StoreMismatchError(
            f"{directory.path}: step {current.step} is committed and in no checkpoint; "
            f"keep it first (jaxinf checkpoint save {store} NAME), or give it "
            f"up ({give_up})"
        )
