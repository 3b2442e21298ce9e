"""A store's claim to the chunks on its CSDs, and how it is opened with that checked.

      lock ──► manifest ──► claims to CSDs ──► the layout's own names
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
from jaxinf.store.directory import SLOTS, StoreDirectory, is_folder
from jaxinf.store.manifest import Manifest
from jaxinf.transfer import open_beneath, translated, write_bytes_atomically
from jaxinf.typing import PathLikeStr

_NOTE = "store.json"
_NOTE_BYTES = 1 << 16


class _Note(msgspec.Struct):
    """``store.json`` beside the chunks on a CSD."""

    store: str  # path of the store that claims them


def open_for_reading(path: Path) -> StoreDirectory:
    """Opens a store, which may be another user's; refuses it if a CSD is missing."""
    directory = StoreDirectory.open(path)
    for csd in range(len(directory.manifest.csds)):
        _check_present(directory, csd)
    directory.check_layout()
    return directory


def open_for_writing(path: Path, *, unmade: bool = False) -> StoreDirectory:
    """Opens a store to write to it; `unmade` and errors are those of `check_claims`.

    The caller holds a lock under which the manifest does not change: that of the
    writer, of the checkpoints, or of flips.
    """
    directory = StoreDirectory.open(path)
    check_claims(directory, unmade=unmade)
    directory.check_layout()
    return directory


def check_roots(roots: Sequence[PathLikeStr]) -> None:
    """Raises ValueError for CSD roots that are given twice or are no directories."""
    for root in roots:
        if not os.path.isdir(root):
            raise ValueError(
                f"CSD root {root}: expected a directory on a mounted drive, found "
                f"{'a file' if os.path.exists(root) else 'nothing'}; create or mount it"
            )
    if len({*roots}) != len(roots):
        listed = ", ".join(map(str, roots))
        raise ValueError(f"CSD roots {listed}: the same root is given twice")


def check_roots_outside_store(directory: StoreDirectory) -> None:
    """Refuses CSD roots inside the store, or below /proc."""
    store = directory.path.resolve()
    for csd, root in enumerate(directory.manifest.csds):
        parents = [Path(root), *Path(root).parents]
        parents += [Path(os.path.realpath(path)) for path in parents]  # of a loop, too
        for folder in (store, Path("/proc")):
            if any(path.is_relative_to(folder) for path in parents):
                raise StoreFormatError(
                    f"{directory.path}: expected CSD {csd} on a drive of its own, "
                    f"found it at {root}, which is below {folder}; give another root"
                )


def check_claims(directory: StoreDirectory, *, unmade: bool = False) -> list[int]:
    """Refuses CSDs whose chunks are not known to be this store's.

    If a note names a path that has no such store any more, the store was moved, and the
    note is accepted. Returns the CSDs whose note does not name the store's present
    path. If CSDs may be `unmade`, a directory may be missing or empty: the store's
    creation was interrupted, or the CSD is being removed.
    """
    check_roots_outside_store(directory)
    csds = range(len(directory.manifest.csds))
    return [csd for csd in csds if not _is_noted(directory, csd, unmade=unmade)]


def claim_csds(directory: StoreDirectory, *, unmade: bool = False) -> None:
    """Writes this store's note on every CSD whose note does not name its path.

    Raises as `check_claims`, and writes nothing then; the caller holds the lock.
    """
    for csd in check_claims(directory, unmade=unmade):
        folder = directory.csd_directories[csd]
        with translated("creation", folder):
            folder.mkdir(exist_ok=True)
        write_bytes_atomically(folder / _NOTE, _make_note(directory))


def _make_note(directory: StoreDirectory) -> bytes:
    return encode(_Note(str(directory.path.resolve())))


def _check_present(directory: StoreDirectory, csd: int) -> None:
    folder = directory.csd_directories[csd]
    if not is_folder(folder):
        raise StoreFormatError(
            f"{directory.path}: CSD {csd} of the store should be at "
            f"{directory.manifest.csds[csd]} (directory {folder.name}), which is not "
            "there; mount the drive, or restore the directory"
        )


def _is_noted(directory: StoreDirectory, csd: int, *, unmade: bool) -> bool:
    """Whether a CSD's note names this store's path; refuses other stores' chunks."""
    folder = directory.csd_directories[csd]
    if unmade and not os.path.lexists(folder):
        return False
    _check_present(directory, csd)
    try:
        with open(open_beneath(folder, _NOTE), "rb") as file:
            if (user := os.fstat(file.fileno()).st_uid) != os.geteuid():
                raise StoreIOError(f"it belongs to the user of id {user}")
            noted = decode(file.read(_NOTE_BYTES), _Note).store
    except (OSError, StoreError, DocumentError) as error:
        if unmade and isinstance(error, FileNotFoundError):
            with translated("look", folder):
                if {*SLOTS, "checkpoints"}.isdisjoint(os.listdir(folder)):
                    return False
        text = _make_note(directory).decode()
        note = shlex.quote(str(folder / _NOTE))
        raise StoreFormatError(
            f"{directory.path}: expected the chunks of this store on its CSD {csd}, "
            f"{folder}, found no note of this user's ({_NOTE}) that says so ({error}). "
            f"If they are this store's, write the note: rm -f {note}; "
            f"echo {shlex.quote(' '.join(text.split()))} > {note}"
        ) from error
    with contextlib.suppress(OSError, ValueError):
        if os.path.samefile(noted, directory.path):  # under any name
            return True
    if _may_be_at(directory, noted):
        raise StoreFormatError(
            f"{directory.path}: expected a store of its own, found a copy of {noted}, "
            f"whose chunks on a CSD ({folder}) it would overwrite; open that one, or "
            'make a store that shares nothing with it ("jaxinf store copy STORE NEW")'
        )
    return False


def _may_be_at(directory: StoreDirectory, path: str) -> bool:
    """Whether a path has a store of the same id, or one that cannot be read."""
    try:
        manifest = Manifest.read(Path(path) / "jaxinf.json")
        return manifest.store_id == directory.manifest.store_id
    except StoreFormatError as error:
        return not isinstance(error.__cause__, FileNotFoundError | NotADirectoryError)
