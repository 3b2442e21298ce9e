"""The owner of the chunks on a CSD: a note beside them names the store.

Invariant: if a store was copied without its CSDs, only one of the two writes to them. A
manifest's claim to a CSD is accepted if a note of this user there agrees, or if the
caller has named the root.
"""

import os
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from jaxinf.documents import MOST_BYTES, DocumentError, decode, encode
from jaxinf.errors import StoreFormatError, StoreIOError
from jaxinf.store.directory import SLOTS, StoreDirectory
from jaxinf.transfer import open_beneath, read_beneath, write_bytes_atomically
from jaxinf.transfer.failures import translated

_NOTE = "store.json"
_NOTE_BYTES = 1 << 16
_MOST_STEPS = 4096


class _Owner(msgspec.Struct):
    """``store.json``."""

    store: str


class _Identity(msgspec.Struct):
    """What is read of a manifest of any version."""

    store_id: str


class _Note(NamedTuple):
    """The note in a CSD's directory: the store that it names, and why not to accept it.

    A directory that `is_unmade` has neither a note nor a store's files.
    """

    owner: str | None
    problem: str = ""
    is_unmade: bool = False


def check_owners(
    directory: StoreDirectory, named: Sequence[Path] = (), *, unmade: bool = False
) -> None:
    """Refuses CSDs unless they are known to be this store's.

    If a note names a path that has no such store any more, the store was moved, and the
    note is accepted.

    Args:
      named: CSD roots that the user has named, which are accepted without a note.
      unmade: whether a directory may be missing or empty, because the store's creation
        was interrupted or the CSD is being removed.

    Raises:
      StoreFormatError: a CSD is missing; or its owner is not known; or it belongs to an
        existing store, of which this one is a copy without CSDs.
    """
    check_places(directory)
    for csd in range(len(directory.manifest.csds)):
        _check(directory, csd, named, unmade=unmade)


def claim_csds(directory: StoreDirectory, named: Sequence[Path] = ()) -> None:
    """Writes this store's note on every CSD; the caller holds the store's lock.

    Raises:
      StoreFormatError: as for `check_owners`; nothing is written.
    """
    check_places(directory)
    num_csds = len(directory.manifest.csds)
    notes = [_check(directory, csd, named) for csd in range(num_csds)]
    for csd, note in enumerate(notes):
        _claim(directory, csd, note)


def make_csds(directory: StoreDirectory) -> None:
    """Makes the store's directory on every CSD that has none, with its note first.

    So the owner is known even if the process is killed at any instant.
    """
    named = [Path(root) for root in directory.manifest.csds]
    check_owners(directory, named, unmade=True)
    for csd in range(len(named)):
        folder = directory.csd_directory(csd)
        with translated("creation", folder):
            folder.mkdir(exist_ok=True)
        _claim(directory, csd, _check(directory, csd, named))


def check_places(directory: StoreDirectory) -> None:
    """Refuses CSD roots that no store may have, even if the user has named them."""
    for csd, root in enumerate(directory.manifest.csds):
        why = ""
        if not os.path.isabs(root) or "\0" in root:
            why = "which is no absolute path"
        elif any(_is_below(step, "/proc") for step in _steps_to(root)):
            why = "below /proc"
        elif _is_below(os.path.realpath(root), os.path.realpath(directory.path)):
            why = "inside the store"
        if why:
            raise StoreFormatError(
                f"{directory.path}: expected CSD {csd} on a drive of its own, found it "
                f"at {root}, {why}; give another root"
            )


def check_present(directory: StoreDirectory) -> None:
    """Refuses a store with a missing CSD, whose drive may not be mounted."""
    for csd in range(len(directory.manifest.csds)):
        _check_present(directory, csd)


def _check_present(directory: StoreDirectory, csd: int) -> None:
    root, folder = directory.manifest.csds[csd], directory.csd_directory(csd)
    if folder.is_symlink() or not folder.is_dir():
        raise StoreFormatError(
            f"{directory.path}: CSD {csd} of the store should be at {root} "
            f"(directory {folder.name}), which is not there; mount the drive, or "
            "restore the directory"
        )


def check_unclaimed(path: Path, roots: Sequence[Path]) -> None:
    """Refuses to begin a run at a path of which CSDs hold a run's chunks already.

    Args:
      path: a path without a store; the drive that it was on may not be mounted.
      roots: CSD roots that the user has named.

    Raises:
      StoreFormatError: names the path and the chunks.
    """
    own = str(path.resolve())
    for root in roots:
        for folder in filter(Path.is_dir, sorted(root.glob("jaxinf-*"))):
            note = _read_note(folder)
            if note.owner == own and not note.problem:
                raise StoreFormatError(
                    f"{path}: expected the store whose chunks are in {folder}, found "
                    "none there; mount its drive, or restore the directory. If you "
                    "moved that store, open it once where it is now, which renews its "
                    "note; to begin anew, choose another path or another csd root"
                )


# --- inside --------------------------------------------------------------------------


def _check(
    directory: StoreDirectory,
    csd: int,
    named: Sequence[Path],
    *,
    unmade: bool = False,
) -> _Note:
    folder, root = directory.csd_directory(csd), directory.manifest.csds[csd]
    if unmade and not os.path.lexists(folder):
        return _Note(None)
    _check_present(directory, csd)
    note = _read_note(folder)
    if note.owner is not None and _is_elsewhere(directory, note.owner):
        raise StoreFormatError(
            f"{directory.path}: expected a store of its own, found a copy of "
            f"{note.owner}, whose chunks on a CSD ({folder}) it would overwrite; open "
            "that one, or make a store that shares nothing with it "
            '("jaxinf checkpoint export STORE", then "import")'
        )
    if note.problem and Path(root) not in named and not (unmade and note.is_unmade):
        roots = [x for one in directory.manifest.csds for x in ("--csd-root", one)]
        words = ["jaxinf", "store", "copy", *[str(directory.path)] * 2, *roots]
        raise StoreFormatError(
            f"{directory.path}: expected the chunks of this store on its CSD {csd}, "
            f"{folder}, found no note of this user's ({_NOTE}) that says so: "
            f"{note.problem}. If the roots are this store's, name them: "
            f"{shlex.join(words)}"
        )
    return note


def _is_below(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder.rstrip("/") + "/")


def _steps_to(path: str) -> Iterator[str]:
    """Yields every name on the way to a path, also those behind its links."""
    here, ahead = "/", [word for word in reversed(path.split("/")) if word]
    for _ in range(_MOST_STEPS):
        if not ahead:
            return
        here = os.path.normpath(os.path.join(here, ahead.pop()))
        yield here
        if os.path.islink(here):
            target = os.readlink(here)
            ahead += [word for word in reversed(target.split("/")) if word]
            here = "/" if target.startswith("/") else os.path.dirname(here)
    yield "/proc"  # more links than the operating system follows


def _read_note(folder: Path) -> _Note:
    try:
        file = open_beneath(folder, _NOTE)
    except FileNotFoundError:
        try:
            is_unmade = {*SLOTS, "checkpoints"}.isdisjoint(os.listdir(folder))
        except OSError as error:
            return _Note(None, f"its directory cannot be read ({error})")
        return _Note(None, "it is missing", is_unmade)
    except (OSError, StoreIOError) as error:
        return _Note(None, f"it cannot be opened ({error})")
    try:
        owner = decode(os.read(file, _NOTE_BYTES), _Owner).store
        user = os.fstat(file).st_uid
    except DocumentError:
        return _Note(None, "it is damaged")
    finally:
        os.close(file)
    is_own = user == os.geteuid()
    return _Note(owner, "" if is_own else f"it belongs to the user of id {user}")


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


def _claim(directory: StoreDirectory, csd: int, note: _Note) -> None:
    """Writes the note of a CSD, if its content changes."""
    if note.owner is None or note.problem or not _is_here(directory, note.owner):
        file = directory.csd_directory(csd) / _NOTE
        write_bytes_atomically(file, encode(_Owner(str(directory.path.resolve()))))
