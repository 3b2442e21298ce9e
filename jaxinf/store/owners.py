"""The owner of the chunks on a CSD, and how a store is opened with it.

      lock ──► manifest ──► owners of CSDs ──► the layout's own names
               read under the lock

Invariant: if a store was copied without its CSDs, only one of the two writes to them: a
manifest's claim to a CSD is accepted if a note of this user beside the chunks agrees.
The directories of an opened store's layout are no links.
"""

import contextlib
import os
import shlex
from collections.abc import Sequence
from pathlib import Path

import msgspec

from jaxinf.documents import DocumentError, decode, encode
from jaxinf.errors import StoreError, StoreFormatError, StoreIOError
from jaxinf.store.directory import SLOTS, StoreDirectory
from jaxinf.store.manifest import Manifest
from jaxinf.transfer import open_beneath, translated, write_bytes_atomically
from jaxinf.typing import PathLikeStr

_NOTE = "store.json"
_NOTE_BYTES = 1 << 16


class _Owner(msgspec.Struct):
    """``store.json``: the path of the store."""

    store: str


def look_at_store(path: Path) -> StoreDirectory:
    """Opens a store, maybe another user's, to read it; a CSD may not be missing."""
    directory = StoreDirectory.open(path)
    for csd in range(len(directory.manifest.csds)):
        _check_present(directory, csd)
    directory.check_layout()
    return directory


def read_owned(path: Path, *, unmade: bool = False) -> StoreDirectory:
    """Opens a store to write, in its present state; raises as `check_owners`.

    The caller holds a lock under which the manifest does not change: that of the
    writer, of the checkpoints, or of flips. `unmade` is that of `check_owners`.
    """
    directory = StoreDirectory.open(path)
    check_owners(directory, unmade=unmade)
    directory.check_layout()
    return directory


def check_roots(roots: Sequence[PathLikeStr]) -> None:
    """Refuses CSD roots that are given twice or are no directories: ValueError."""
    for root in roots:
        if not os.path.isdir(root):
            raise ValueError(
                f"CSD root {root}: expected a directory on a mounted drive, found "
                f"{'a file' if os.path.exists(root) else 'nothing'}; create or mount it"
            )
    if len({*roots}) != len(roots):
        listed = ", ".join(map(str, roots))
        raise ValueError(f"CSD roots {listed}: the same root is given twice")


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


def check_owners(directory: StoreDirectory, *, unmade: bool = False) -> list[int]:
    """Refuses CSDs unless they are known to be this store's.

    If a note names a path that has no such store any more, the store was moved, and the
    note is accepted. Returns the CSDs whose note does not name the store's path. If
    they are perhaps `unmade`, a directory may be missing or empty: the store's creation
    was interrupted, or the CSD is being removed.

    Raises:
      StoreFormatError: a CSD is missing; or its owner is not known; or it belongs to an
        existing store, of which this one is a copy without CSDs.
    """
    check_places(directory)
    csds = range(len(directory.manifest.csds))
    return [csd for csd in csds if not _is_noted(directory, csd, unmade=unmade)]


def claim_csds(directory: StoreDirectory, *, unmade: bool = False) -> None:
    """Makes and renews this store's note on every CSD, by which its owner is known.

    It raises as `check_owners`, and writes nothing then; the caller holds the lock.
    """
    for csd in check_owners(directory, unmade=unmade):
        folder = directory.csd_directories[csd]
        with translated("creation", folder):
            folder.mkdir(exist_ok=True)
        write_bytes_atomically(folder / _NOTE, _note(directory))


def _note(directory: StoreDirectory) -> bytes:
    return encode(_Owner(str(directory.path.resolve())))


def _check_present(directory: StoreDirectory, csd: int) -> None:
    folder = directory.csd_directories[csd]
    if folder.is_symlink() or not folder.is_dir():
        raise StoreFormatError(
            f"{directory.path}: CSD {csd} of the store should be at "
            f"{directory.manifest.csds[csd]} (directory {folder.name}), which is not "
            "there; mount the drive, or restore the directory"
        )


def _is_noted(directory: StoreDirectory, csd: int, *, unmade: bool) -> bool:
    """Whether a CSD's note names this store's path; refuses another store's CSD."""
    folder = directory.csd_directories[csd]
    if unmade and not os.path.lexists(folder):
        return False
    _check_present(directory, csd)
    try:
        with open(open_beneath(folder, _NOTE), "rb") as file:
            if (user := os.fstat(file.fileno()).st_uid) != os.geteuid():
                raise StoreIOError(f"it belongs to the user of id {user}")
            owner = decode(file.read(_NOTE_BYTES), _Owner).store
    except (OSError, StoreError, DocumentError) as error:
        if unmade and isinstance(error, FileNotFoundError):
            with translated("look", folder):
                if {*SLOTS, "checkpoints"}.isdisjoint(os.listdir(folder)):
                    return False
        text, place = _note(directory).decode(), shlex.quote(str(folder / _NOTE))
        raise StoreFormatError(
            f"{directory.path}: expected the chunks of this store on its CSD {csd}, "
            f"{folder}, found no note of this user's ({_NOTE}) that says so ({error}). "
            f"If they are this store's, write the note: rm -f {place}; "
            f"echo {shlex.quote(' '.join(text.split()))} > {place}"
        ) from error
    with contextlib.suppress(OSError, ValueError):
        if os.path.samefile(owner, directory.path):  # under any name
            return True
    if _has_store(directory, owner):
        raise StoreFormatError(
            f"{directory.path}: expected a store of its own, found a copy of {owner}, "
            f"whose chunks on a CSD ({folder}) it would overwrite; open that one, or "
            'make a store that shares nothing with it ("jaxinf store copy STORE NEW")'
        )
    return False


def _has_store(directory: StoreDirectory, owner: str) -> bool:
    """Whether a path has this store, or another thing that cannot be read."""
    try:
        found = Manifest.read(Path(owner) / "jaxinf.json")
        return found.store_id == directory.manifest.store_id
    except StoreFormatError as error:
        return not isinstance(error.__cause__, FileNotFoundError | NotADirectoryError)
