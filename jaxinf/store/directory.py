"""A store's directory tree: the paths of its files, and the publication of a slot.

A step's *place* is a slot's name, ``a`` or ``b``, ``checkpoints/NAME`` or
``snapshots/ID``: the same in the store and on each CSD.

Invariant: nothing here writes to a chunk file of the committed slot, nor to a file with
more than one link; `current` changes by rename alone. A path of a chunk is given out
only if no directory on it is a link.
"""

import contextlib
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, TypeAlias

from jaxinf.errors import StoreFormatError, StoreIOError
from jaxinf.store.commit_record import CommitRecord
from jaxinf.store.lock import StoreLock, lock_exclusively
from jaxinf.store.manifest import ChunkFile, Manifest
from jaxinf.transfer import (
    allocate_file,
    check_length,
    check_regular,
    fsync_directory,
    open_beneath,
    sync_filesystem,
    translated,
)

Slot: TypeAlias = Literal["a", "b"]
SLOTS: tuple[Slot, Slot] = ("a", "b")

_FOLDERS = ("slots", "slots/a", "slots/b", "checkpoints", "snapshots", "stream")
_FILES = ("lock", "publish.lock", "checkpoints.lock")
_ON_CSD = ("a", "b", "checkpoints", "snapshots")
_REPLACEMENT = "replacement.new"


def other_slot(slot: Slot | None) -> Slot:
    """Returns the other slot; for the committed slot, that of the next commit."""
    return "b" if slot == "a" else "a"


def check_store_exists(path: Path, *, is_step: bool = False) -> None:
    """Refuses a path without a store; with `is_step` it may be a step copied out."""
    if not path.is_dir():
        found = "a file" if path.exists() else "nothing"
        raise StoreFormatError(
            f"{path}: expected the directory of a jaxinf store, found {found}; check "
            "the path, or mount the drive it is on"
        )
    if not os.path.lexists(path / "jaxinf.json"):
        raise StoreFormatError(
            f"{path}: expected a jaxinf store, found no jaxinf.json in it; give "
            "the directory that a run was told to store its state in"
        )
    if not is_step and os.path.lexists(path / "commit.json"):
        raise StoreFormatError(
            f"{path}: expected a store, found a checkpoint or an export of one; make a "
            f'store of it (jaxinf store copy "{path}" NEW), or open the checkpoint\'s '
            "store with restore=NAME, which gives up nothing before the next step"
        )


def check_no_link(root: Path, path: Path, flags: int = os.O_RDONLY) -> None:
    """Refuses a link on the way from a directory to a path below it."""
    with translated("look", path), contextlib.suppress(FileNotFoundError):
        os.close(open_beneath(root, path.relative_to(root), flags))


def is_folder(path: Path) -> bool:
    """Whether a path is a directory, and no link to one."""
    return path.is_dir() and not path.is_symlink()


class StoreDirectory:
    """The files of one store. Thread-safe; `StoreLock` locks out other processes.

    Attributes:
      lock: The writer's lock, if this process is the writer. While it is held, no other
        process changes the manifest or the store's files.
      restored: The slot of a restored step, which its first step commits: until then
        the step before it is not given up.
      flip_lock: Path of the file that is locked by a flip and by a snapshot.
      csd_directories: The store's directory on each CSD; without CSDs the store.
    """

    def __init__(
        self, path: Path, manifest: Manifest, lock: StoreLock | None = None
    ) -> None:
        self.path, self.manifest, self.lock = path, manifest, lock
        self.restored: Slot | None = None
        self.flip_lock = path / "publish.lock"
        name = f"jaxinf-{manifest.store_id}"
        self.csd_directories = [Path(root) / name for root in manifest.csds] or [path]
        self._replace_lock = threading.Lock()
        self._files: dict[tuple[str, int, int, str], Path] = {}

    @classmethod
    def open(cls, path: Path) -> "StoreDirectory":
        """Reads an existing store's manifest; raises StoreFormatError if it has none.

        Nothing else is checked: see `open_for_reading` and `open_for_writing`.
        """
        check_store_exists(path)
        return cls(path, Manifest.read(path / "jaxinf.json"))

    # --- places -----------------------------------------------------------------

    def step_path(self, place: str) -> Path:
        """Returns a step's directory in the store."""
        return self.path / "slots" / place if place in SLOTS else self.path / place

    def place_of(self, step: Path) -> str:
        """Reverses `step_path`; the step may be the symlink to the committed slot."""
        place = str(step.relative_to(self.path))
        if place == "current":
            return self.committed_slot() or SLOTS[0]
        return place.removeprefix("slots/")

    def chunk_roots(self, place: str) -> list[Path]:
        """Returns the directories of a step's chunk files, one for each CSD."""
        if not self.manifest.csds:
            return [self.step_path(place)]
        return [folder / place for folder in self.csd_directories]

    def step_roots(self, place: str) -> list[Path]:
        """Returns all directories of a step: in the store, and on each CSD."""
        return [*dict.fromkeys([self.step_path(place), *self.chunk_roots(place)])]

    def check_layout(self) -> None:
        """Refuses links, pipes and devices that have names of the store's own."""
        for name in _FOLDERS:
            check_no_link(self.path, self.path / name, os.O_DIRECTORY)
        for name in _FILES:
            with contextlib.suppress(FileNotFoundError):
                check_regular(self.path / name, os.lstat(self.path / name))
        for root in self.csd_directories[: len(self.manifest.csds)]:
            for name in _ON_CSD:
                check_no_link(root, root / name, os.O_DIRECTORY)
        self.committed_slot()

    # --- chunk files -------------------------------------------------------------

    def chunk_path(self, place: str, chunk: ChunkFile) -> Path:
        """Returns the path of a chunk's file on its CSD; refuses a link on the way."""
        key = place, chunk.leaf_number, chunk.number, chunk.state.name
        if file := self._files.get(key):  # every step asks for those of slots
            return file
        root = self.csd_directories[chunk.csd]
        file = self.chunk_roots(place)[chunk.csd] / chunk.name
        check_no_link(root, file)
        if place in SLOTS:  # others come and go, each under a name of its own
            self._files[key] = file
        return file

    # --- slots -------------------------------------------------------------------

    def committed_slot(self) -> Slot | None:
        """Returns the slot that `current` names, or the restored one, if any."""
        if restored := self.restored:
            return restored
        current = self.path / "current"
        try:
            target = os.readlink(current)
        except FileNotFoundError:
            return None
        except OSError:
            target = "a file"
        for slot in SLOTS:
            if target == f"slots/{slot}":
                return slot
        raise StoreFormatError(
            f"{current}: expected a symlink to slots/a or slots/b, found {target!r}; "
            "was the store copied without its symlinks? Copy it with cp -a, or restore "
            "the symlink to the slot whose commit.json has the higher step"
        )

    def require_committed_slot(self) -> Slot:
        """Returns the slot of the committed step; refuses a store without one."""
        if slot := self.committed_slot():
            return slot
        raise StoreFormatError(
            f"{self.path}: expected a committed step, found a store that is just "
            "being created, or whose creation was interrupted; try again later, or "
            "start the run again"
        )

    def read_commit(self) -> CommitRecord | None:
        """Returns the committed step's record; None before the first commit."""
        slot = self.committed_slot()
        return self.read_record(slot) if slot else None

    def read_record(self, place: str) -> CommitRecord:
        """Returns a step's record; refuses a record of other arrays."""
        path = self.step_path(place) / "commit.json"
        record = CommitRecord.read(path)
        record.check_fits(path, self.manifest)
        return record

    # Each of the following refuses to go on if another process may hold the store's
    # lock, too.

    def remove_record(self, slot: Slot) -> None:
        """Removes the record of a slot that is about to be rewritten."""
        self._check_lock()
        assert slot != self.committed_slot()
        if self.restored:
            self.flip(self.restored)
        record = self.step_path(slot) / "commit.json"
        with translated("removal", record):
            record.unlink(missing_ok=True)

    def sync(self) -> None:
        """Makes everything written so far durable on every CSD and on the store."""
        folders = [*self.csd_directories, self.path]
        for folder in {folder.stat().st_dev: folder for folder in folders}.values():
            sync_filesystem(folder)

    def write_record(self, slot: Slot, record: CommitRecord) -> None:
        """Writes the record of a slot whose chunks are durable."""
        self._check_lock()
        record.write(self.step_path(slot) / "commit.json")

    def flip(self, slot: Slot) -> None:
        """Makes a slot with a record the committed one."""
        temporary, current = self.path / "current.tmp", self.path / "current"
        with translated("commit", current), lock_exclusively(self.flip_lock):
            self._check_lock()
            temporary.unlink(missing_ok=True)
            temporary.symlink_to(f"slots/{slot}")
            temporary.rename(current)
            fsync_directory(self.path)
        self.restored = None

    def _check_lock(self) -> None:
        if self.lock is not None:
            self.lock.check()

    # --- chunk files under a running step ------------------------------------------

    def prepare_write(
        self, place: str, chunk: ChunkFile, *, keeps_content: bool = False
    ) -> Path:
        """Returns the file of a chunk to write, in a step without a record.

        If a snapshot, a checkpoint or the other slot has a link to the file, a new file
        replaces it. With `keeps_content` the new file has the old content; otherwise
        the caller must write the whole chunk. A file that is too short gets its length
        back.
        """
        file = self.chunk_path(place, chunk)
        with self._replace_lock:
            status = _chunk_status(file)
            if status.st_nlink > 1:
                with self._replacement(chunk.csd, file) as temporary:
                    if keeps_content:
                        shutil.copyfile(file, temporary, follow_symlinks=False)
                    else:
                        allocate_file(temporary, chunk.file_bytes, chunk.num_bytes)
            elif status.st_size != chunk.file_bytes:
                with translated("allocation", file):
                    os.truncate(file, chunk.file_bytes)
        return file

    def link_chunk(self, source: str, target: Slot, chunk: ChunkFile) -> None:
        """Hard-links a chunk of another step into a slot without a record."""
        old, new = self.chunk_path(source, chunk), self.chunk_path(target, chunk)
        with self._replace_lock:
            # A file with a single link is not in the other slot.
            if _chunk_status(old).st_nlink > 1 and new.exists() and old.samefile(new):
                return
            with self._replacement(chunk.csd, new) as temporary:
                link_file(old, temporary)

    @contextlib.contextmanager
    def _replacement(self, csd: int, file: Path) -> Iterator[Path]:
        """Yields a temporary path; the file that the body makes there replaces `file`.

        The caller holds the lock, so that each CSD needs one path.
        """
        temporary = self.csd_directories[csd] / _REPLACEMENT
        with translated("replacement", file):
            temporary.unlink(missing_ok=True)
            yield temporary
            temporary.rename(file)

    def prune_temporaries(self) -> None:
        """Removes temporary files of chunks and documents that a crash has left."""
        replacements = [folder / _REPLACEMENT for folder in self.csd_directories]
        for temporary in [*replacements, *self.path.glob("slots/[ab]/.*.tmp")]:
            with translated("removal", temporary):
                temporary.unlink(missing_ok=True)


def _chunk_status(file: Path) -> os.stat_result:
    try:
        status = os.lstat(file)
    except FileNotFoundError as error:
        raise StoreIOError(
            f"{file}: expected a chunk of the store, found no file; something other "
            "than jaxinf removed it. Make a new store of the committed step: jaxinf "
            "store copy OLD NEW"
        ) from error
    check_regular(file, status)
    return status


def link_file(source: Path, target: Path) -> None:
    """Gives a file a second name, on the same file system; follows no link."""
    with translated("hard link", source):
        check_regular(source, os.lstat(source))
    what = f"hard link of {source}, which checkpoints need, on ext4, xfs or btrfs,"
    with translated(what, target):
        os.link(source, target, follow_symlinks=False)


def link_beneath(root: Path, name: str, target: Path) -> None:
    """Gives a file below a directory a second name, if no link leads there."""
    check_length(root, name, 0)
    link_file(root / name, target)
