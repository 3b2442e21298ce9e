"""The place of a copy: hidden beside its target until it is whole.

      target missing     .NEW.copying ──rename──► NEW
      in place           .OLD.copying ◄──exchange──► OLD, whose old stores then go

Invariant: a target appears whole, at one instant. A crash has nothing to undo: the next
copy to the target discards what one before has left, be it a copy that is not complete
or what was exchanged for one.
"""

import contextlib
import ctypes
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from jaxinf.errors import JaxinfError, StoreFormatError, StoreIOError
from jaxinf.store.directory import StoreDirectory
from jaxinf.store.files import remove_csds
from jaxinf.store.lock import StoreLock, lock_exclusively
from jaxinf.store.members import check_unread, find_members
from jaxinf.transfer import fsync_directory, translated

_RENAME_EXCHANGE = 2
_AT_CWD = -100

# Names of a store's and a run's own; others in a path belong to its user.
_OWN = re.compile(
    r"jaxinf\.json|current(\.tmp)?|slots|checkpoints|snapshots|stream|tokenizer"
    r"|((publish|checkpoints)\.)?lock|replacement\.new|process-\d{5,}|\.jaxinf.*"
)


def staging_path(target: Path) -> Path:
    """Returns the directory in which a copy to a target is made."""
    return target.with_name(f".{target.name}.copying")


def left_by_copy(path: Path) -> Path | None:
    """Returns the directory of a copy to a path that is not complete, if any."""
    staging = staging_path(Path(os.path.realpath(path)))
    return staging if os.path.lexists(staging) else None


@contextlib.contextmanager
def staged(target: Path, held: Sequence[StoreDirectory]) -> Iterator[None]:
    """Gives what the body makes at `staging_path` its place, if the body succeeds.

    Args:
      target: a real path: missing, an empty directory, or that of the stores `held`.
      held: in place, the stores, of which this process is the writer.

    Raises:
      StoreFormatError: something else is at the target.
      StoreLockedError: another process copies to it, or reads a step of `held`.
    """
    staging = staging_path(target)
    _check_target(target, staging, is_held=bool(held))
    with translated("copy", staging):
        staging.mkdir(parents=True, exist_ok=True)
    lock = StoreLock(staging)
    try:
        _discard(staging, target, keeps=True)  # what an interrupted call has left
        try:
            yield
            _publish(staging, target, held)
        except (JaxinfError, ValueError):
            _discard(staging, target)
            raise
        with translated("copy", target):
            fsync_directory(target.parent)  # before what was there goes
        _discard(staging, target)
    finally:
        lock.release()


def _check_target(target: Path, staging: Path, *, is_held: bool) -> None:
    """Refuses a target where a copy cannot appear."""
    found = ["a mount point"] if os.path.ismount(target) else []
    if not is_held and not found and os.path.lexists(target):
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


def _publish(staging: Path, target: Path, held: Sequence[StoreDirectory]) -> None:
    """Gives a complete copy its place, at one instant."""
    with translated("copy", target), contextlib.ExitStack() as locks:
        fsync_directory(staging)
        for one in held:
            locks.enter_context(lock_exclusively(one.publish_lock))
            check_unread(one)
            if one.lock is not None:
                one.lock.check()
        if not held:
            staging.rename(target)
            return
        call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
        names = os.fsencode(staging), os.fsencode(target)
        if call is None or call(_AT_CWD, names[0], _AT_CWD, names[1], _RENAME_EXCHANGE):
            reason = os.strerror(ctypes.get_errno())
            raise StoreIOError(
                f"{target}: expected a file system that exchanges two directories "
                f"(renameat2), found one that does not: {reason}; copy to another "
                "path, and rename that when it is complete"
            )


def _discard(staging: Path, target: Path, *, keeps: bool = False) -> None:
    """Removes a copy that is not completed, or what was exchanged for one.

    Files that are not a store's go to the target, which is in its place. With `keeps`
    the empty directory stays, with its lock.
    """
    if not staging.exists():
        return
    with translated("removal", staging):
        for place in (*find_members(staging), staging):
            if (place / "jaxinf.json").exists():
                remove_csds(StoreDirectory.open(place))
        for entry in staging.iterdir():
            moved = target / entry.name
            is_own = _OWN.fullmatch(entry.name)
            if not is_own and target.is_dir() and not os.path.lexists(moved):
                entry.rename(moved)
            elif entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            elif not (keeps and entry.name == "lock"):
                entry.unlink()
        if not keeps:
            staging.rmdir()
            fsync_directory(staging.parent)
