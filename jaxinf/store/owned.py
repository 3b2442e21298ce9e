"""Opens a store for writing; every command uses this module.

      lock ──► manifest ──► owners of CSDs ──► the layout's own names
               read under the lock

Invariant: the content of a `StoreDirectory` from here was read under the lock that
protects it, its CSDs are its own, and the directories of its layout are no links.
"""

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from jaxinf.errors import StoreFormatError
from jaxinf.store.creation import complete_spare
from jaxinf.store.directory import StoreDirectory, check_there
from jaxinf.store.lock import StoreLock, lock_exclusively
from jaxinf.store.owners import check_owners, check_present, claim_csds


def look_at_store(path: Path) -> StoreDirectory:
    """Opens a store for reading; checks its layout and the presence of CSDs; blocks.

    Raises:
      StoreFormatError: the path is not a store, a directory of it is a link, or a CSD
        is missing.
      StoreIOError: a file or directory cannot be read.
    """
    _check_is_store(path)
    directory = StoreDirectory.open(path)
    check_present(directory)
    directory.check_layout()
    return directory


def read_owned(
    path: Path, named: Sequence[Path] = (), *, unmade: bool = False
) -> StoreDirectory:
    """Opens a store for writing, in its present state; blocks.

    The caller holds a lock under which the manifest does not change: that of the
    writer, of the checkpoints, or of flips.

    Args:
      path: the store.
      named, unmade: as for `check_owners`.

    Raises:
      StoreFormatError: as `look_at_store`; or nothing shows that a CSD is this store's.
      StoreIOError: a file or directory cannot be read.
    """
    _check_is_store(path)
    directory = StoreDirectory.open(path)
    check_owners(directory, named, unmade=unmade)
    directory.check_layout()
    return directory


def current_store(directory: StoreDirectory) -> StoreDirectory:
    """Returns the store in its present state; reads nothing if this is its writer.

    The caller holds a lock as for `read_owned`.
    """
    return read_owned(directory.path) if directory.lock is None else directory


def _check_is_store(path: Path) -> None:
    check_there(path)
    if os.path.lexists(path / "commit.json"):
        raise StoreFormatError(
            f"{path}: expected a store, found a checkpoint or an export of one; open "
            "the store and restore the checkpoint (jaxinf checkpoint restore STORE), "
            "or make a store of the export (jaxinf store copy EXPORT NEW)"
        )


@contextlib.contextmanager
def hold_store(
    path: Path, named: Sequence[Path] = (), *, is_member: bool = False
) -> Iterator[StoreDirectory]:
    """Makes this process the store's only writer while the context lasts.

    Args:
      path: the store.
      named: CSD roots that the user has named.
      is_member: whether it is one of a run's members, all of which the caller holds.

    Yields:
      The store, read under its locks; notes on its CSDs name it as the owner.

    Raises:
      StoreLockedError: another process has it open.
      StoreError: as `read_owned`.
    """
    _check_is_store(path)
    lock = StoreLock(path)
    try:
        with lock_exclusively(path / "checkpoints.lock"):
            directory = read_owned(path, named)
            directory.lock = lock
            member = directory.manifest.member
            if member is not None and not is_member:
                raise StoreFormatError(
                    f"{directory.path}: expected the store of one process, found "
                    f"member {member.number} of a run of {member.count}, and its step "
                    "and its places change with the others' alone; open the run's path "
                    "in all its processes"
                )
            claim_csds(directory, named)
            # A member's other slot may hold the step that all of a run have.
            if not is_member:
                complete_spare(directory)
            yield directory
    finally:
        lock.release()
