"""The owner of the chunks on a CSD, and how a store is opened with it.

      lock ──► manifest ──► owners of CSDs ──► the layout's own names
               read under the lock

Invariant: if a store was copied without its CSDs, only one of the two writes to them: a
manifest's claim to a CSD is accepted if a note of this user beside the chunks agrees.
The directories of an opened store's layout are no links.
"""

import os
import shlex
from pathlib import Path

import msgspec

from jaxinf.documents import MOST_BYTES, DocumentError, decode, encode
from jaxinf.errors import StoreError, StoreFormatError, StoreIOError
from jaxinf.store.directory import SLOTS, StoreDirectory, check_there
from jaxinf.transfer import (
    open_beneath,
    read_beneath,
    translated,
    write_bytes_atomically,
)

_NOTE = "store.json"
_NOTE_BYTES = 1 << 16


class _Owner(msgspec.Struct):
    """``store.json``: the path of the store."""

    store: str


class _Identity(msgspec.Struct):
    """What is read of a manifest of any version."""

    store_id: str


# --- opening a store -----------------------------------------------------------------


def look_at_store(path: Path) -> StoreDirectory:
    """Opens a store for reading; checks its layout and the presence of CSDs; blocks.

    Raises:
      StoreFormatError: the path is not a store, a directory of it is a link, or a CSD
        is missing.
      StoreIOError: a file or directory cannot be read.
    """
    check_is_store(path)
    directory = StoreDirectory.open(path)
    for csd in range(len(directory.manifest.csds)):
        _check_present(directory, csd)
    directory.check_layout()
    return directory


def read_owned(path: Path, *, unmade: bool = False) -> StoreDirectory:
    """Opens a store for writing, in its present state; blocks.

    The caller holds a lock under which the manifest does not change: that of the
    writer, of the checkpoints, or of flips.

    Args:
      path: the store.
      unmade: as for `check_owners`.

    Raises:
      StoreFormatError: as `look_at_store`; or nothing shows that a CSD is this store's.
      StoreIOError: a file or directory cannot be read.
    """
    check_is_store(path)
    directory = StoreDirectory.open(path)
    check_owners(directory, unmade=unmade)
    directory.check_layout()
    return directory


def current_store(directory: StoreDirectory) -> StoreDirectory:
    """Returns the store in its present state; reads nothing if this is its writer.

    The caller holds a lock as for `read_owned`.
    """
    return read_owned(directory.path) if directory.lock is None else directory


def check_is_store(path: Path) -> None:
    """Refuses a path that has no store, or a step of one."""
    check_there(path)
    if os.path.lexists(path / "commit.json"):
        raise StoreFormatError(
            f"{path}: expected a store, found a checkpoint or an export of one; open "
            "the store and restore the checkpoint (jaxinf checkpoint restore STORE), "
            "or make a store of the export (jaxinf store copy EXPORT NEW)"
        )


# --- owners --------------------------------------------------------------------------


def check_owners(
    directory: StoreDirectory, *, unmade: bool = False
) -> list[str | None]:
    """Refuses CSDs unless they are known to be this store's; returns their owners.

    If a note names a path that has no such store any more, the store was moved, and the
    note is accepted.

    Args:
      unmade: whether a directory may be missing or empty, because the store's creation
        was interrupted or the CSD is being removed.

    Raises:
      StoreFormatError: a CSD is missing; or its owner is not known; or it belongs to an
        existing store, of which this one is a copy without CSDs.
    """
    check_places(directory)
    csds = range(len(directory.manifest.csds))
    return [_owner(directory, csd, unmade=unmade) for csd in csds]


def claim_csds(directory: StoreDirectory, *, unmade: bool = False) -> None:
    """Renews this store's note on every CSD; the caller holds the store's lock.

    Raises:
      StoreFormatError: as for `check_owners`; nothing is written.
    """
    for csd, owner in enumerate(check_owners(directory, unmade=unmade)):
        if owner is None or not _is_here(directory, owner):
            file = directory.csd_directory(csd) / _NOTE
            write_bytes_atomically(file, encode(_Owner(str(directory.path.resolve()))))


def make_csds(directory: StoreDirectory) -> None:
    """Makes the store's directory on every CSD that has none, with its note first.

    So the owner is known even if the process is killed at any instant.
    """
    check_owners(directory, unmade=True)
    for csd in range(len(directory.manifest.csds)):
        with translated("creation", directory.csd_directory(csd)):
            directory.csd_directory(csd).mkdir(exist_ok=True)
    claim_csds(directory, unmade=True)


def check_places(directory: StoreDirectory) -> None:
    """Refuses CSD roots that no store may have."""
    own = directory.path.resolve()
    for csd, root in enumerate(directory.manifest.csds):
        way = [Path(root), *Path(root).parents]
        way += [Path(os.path.realpath(place)) for place in way]  # of a loop, too
        for folder in (own, Path("/proc")):
            if any(place.is_relative_to(folder) for place in way):
                raise StoreFormatError(
                    f"{directory.path}: expected CSD {csd} on a drive of its own, "
                    f"found it at {root}, which is below {folder}; give another root"
                )


def _check_present(directory: StoreDirectory, csd: int) -> None:
    root, folder = directory.manifest.csds[csd], directory.csd_directory(csd)
    if folder.is_symlink() or not folder.is_dir():
        raise StoreFormatError(
            f"{directory.path}: CSD {csd} of the store should be at {root} "
            f"(directory {folder.name}), which is not there; mount the drive, or "
            "restore the directory"
        )


def _owner(directory: StoreDirectory, csd: int, *, unmade: bool) -> str | None:
    """Returns the path that a CSD's note names; None if there is no note to be."""
    folder = directory.csd_directory(csd)
    if unmade and not os.path.lexists(folder):
        return None
    _check_present(directory, csd)
    try:
        owner = _read_note(folder)
    except (OSError, StoreError, DocumentError) as error:
        if unmade and isinstance(error, FileNotFoundError):
            with translated("look", folder):
                if {*SLOTS, "checkpoints"}.isdisjoint(os.listdir(folder)):
                    return None
        text = encode(_Owner(str(directory.path.resolve()))).decode()
        file = shlex.quote(str(folder / _NOTE))
        raise StoreFormatError(
            f"{directory.path}: expected the chunks of this store on its CSD {csd}, "
            f"{folder}, found no note of this user's ({_NOTE}) that says so ({error}). "
            f"If they are this store's, write the note: rm -f {file}; "
            f"echo {shlex.quote(' '.join(text.split()))} > {file}"
        ) from error
    if _is_elsewhere(directory, owner):
        raise StoreFormatError(
            f"{directory.path}: expected a store of its own, found a copy of {owner}, "
            f"whose chunks on a CSD ({folder}) it would overwrite; open that one, or "
            'make a store that shares nothing with it ("jaxinf store copy STORE NEW")'
        )
    return owner


def _read_note(folder: Path) -> str:
    """Returns the store that owns a CSD's directory, as this user has noted there."""
    with open(open_beneath(folder, _NOTE), "rb") as file:
        user = os.fstat(file.fileno()).st_uid
        if user != os.geteuid():
            raise StoreIOError(f"it belongs to the user of id {user}")
        return decode(file.read(_NOTE_BYTES), _Owner).store


def _is_here(directory: StoreDirectory, owner: str) -> bool:
    """Whether a path leads to the store, under any name."""
    try:
        return os.path.samefile(owner, directory.path)
    except (OSError, ValueError):
        return False


def _is_elsewhere(directory: StoreDirectory, owner: str) -> bool:
    """Whether the store that a note names still exists in another directory."""
    if _is_here(directory, owner):
        return False
    try:
        raw = read_beneath(owner, "jaxinf.json", MOST_BYTES)
        return decode(raw, _Identity).store_id == directory.manifest.store_id
    except StoreIOError as error:
        # One that cannot be read may exist.
        return not isinstance(error.__cause__, FileNotFoundError | NotADirectoryError)
    except DocumentError:
        return True
