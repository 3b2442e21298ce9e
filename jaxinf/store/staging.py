"""The directory in which a copy is made, hidden beside its target until it is whole.

      target missing     .NEW.copying ──rename──► NEW
      in place           .OLD.copying ◄──exchange──► OLD, whose old stores then go

Invariant: a target appears whole, at one instant. A crash has nothing to undo: the next
copy to the target discards what the last one left, whether that is an incomplete copy
or the old stores.
"""

import contextlib
import ctypes
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from jaxinf.errors import JaxinfError, StoreFormatError, StoreIOError
from jaxinf.store.creation import remove_csds
from jaxinf.store.directory import StoreDirectory, is_folder
from jaxinf.store.lock import StoreLock, lock_exclusively
from jaxinf.store.members import find_members
from jaxinf.store.steps import check_unread
from jaxinf.transfer import fsync_directory, translated

_RENAME_EXCHANGE = 2
_AT_CWD = -100

# Names of a store's and a run's own files; others at a path belong to its user.
_OWN_NAMES = re.compile(
    r"jaxinf\.json|current(\.tmp)?|slots|checkpoints|snapshots|stream|tokenizer"
    r"|((publish|checkpoints)\.)?lock|replacement\.new|process-\d{5,}|\.jaxinf.*"
)


def staging_path(target: Path) -> Path:
    return target.with_name(f".{target.name}.copying")


def find_leftover_copy(path: Path) -> Path | None:
    """Returns the directory of an incomplete copy to a path, if there is one."""
    staging = staging_path(Path(os.path.realpath(path)))
    return staging if os.path.lexists(staging) else None


@contextlib.contextmanager
def staged(target: Path, held_stores: Sequence[StoreDirectory]) -> Iterator[None]:
    """Publishes at `target` what the body makes at `staging_path`, if it succeeds.

    The target is a real path: missing, an empty directory, or that of the held stores,
    of which this process is the writer, and which a copy in place replaces. Anything
    else is refused, and so are another copy to it and a reader of a held store.
    """
    staging = staging_path(target)
    _check_target(target, staging, is_in_place=bool(held_stores))
    with translated("copy", staging):
        staging.mkdir(parents=True, exist_ok=True)
    lock = StoreLock(staging)
    try:
        _discard(staging, target, keeps_lock=True)  # what an interrupted call left
        try:
            yield
            _move_to_target(staging, target, held_stores)
        except (JaxinfError, ValueError):
            _discard(staging, target)
            raise
        with translated("copy", target):
            fsync_directory(target.parent)  # before what was there goes
        _discard(staging, target)
    finally:
        lock.release()


def _check_target(target: Path, staging: Path, *, is_in_place: bool) -> None:
    found = ["a mount point"] if os.path.ismount(target) else []
    if not is_in_place and not found and os.path.lexists(target):
        found = sorted(os.listdir(target))[:3] if target.is_dir() else ["a file"]
    if found:
        raise StoreFormatError(
            f"{target}: expected nothing there, or an empty directory, or OLD itself, "
            f"and no mount point, found {', '.join(found)}; give another path"
        )
    if staging.is_symlink():  # what is there would be removed
        raise StoreFormatError(
            f"{staging}: expected nothing, or what an interrupted copy has left, found "
            "a symlink; jaxinf made no such thing: find out who did, and remove it"
        )


def _move_to_target(
    staging: Path, target: Path, held_stores: Sequence[StoreDirectory]
) -> None:
    """Renames a complete copy to its target, or exchanges it for the old stores."""
    with translated("copy", target), contextlib.ExitStack() as locks:
        fsync_directory(staging)
        for directory in held_stores:
            locks.enter_context(lock_exclusively(directory.flip_lock))
            check_unread(directory)
            if directory.lock is not None:
                directory.lock.check()
        if not held_stores:
            staging.rename(target)
            return
        call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
        old, new = os.fsencode(staging), os.fsencode(target)
        if call is None or call(_AT_CWD, old, _AT_CWD, new, _RENAME_EXCHANGE):
            reason = os.strerror(ctypes.get_errno())
            raise StoreIOError(
                f"{target}: expected a file system that exchanges two directories "
                f"(renameat2), found one that does not: {reason}; copy to another "
                "path, and rename that when it is complete"
            )


def _discard(staging: Path, target: Path, *, keeps_lock: bool = False) -> None:
    """Removes an incomplete copy, or the old stores that a copy was exchanged for.

    A user's files among them move to the target. With `keeps_lock` the directory stays,
    with nothing but its lock.
    """
    if not staging.exists():
        return
    with translated("removal", staging):
        for folder in (*find_members(staging), staging):
            if (folder / "jaxinf.json").exists():
                remove_csds(StoreDirectory.open(folder))
        for entry in staging.iterdir():
            moved = target / entry.name
            is_own = _OWN_NAMES.fullmatch(entry.name)
            if not is_own and target.is_dir() and not os.path.lexists(moved):
                entry.rename(moved)
            elif is_folder(entry):
                shutil.rmtree(entry)
            elif not (keeps_lock and entry.name == "lock"):
                entry.unlink()
        if not keeps_lock:
            staging.rmdir()
            fsync_directory(staging.parent)
