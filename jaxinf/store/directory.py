"""A store's directory tree: the places of its files, and the publication of a slot.

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
from jaxinf.store.commit import CommitRecord
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
    """Returns the other slot: of the committed one, that of the next commit."""
    return "b" if slot == "a" else "a"


def check_there(path: Path, *, is_step: bool = False) -> None:
    """Refuses a path without a store, or a step in its place unless it `is_step`."""
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
            f"{path}: expected a store, found a checkpoint or an export of one; open "
            "the store and restore the checkpoint (jaxinf checkpoint restore STORE), "
            "or make a store of the export (jaxinf store copy EXPORT NEW)"
        )


class StoreDirectory:
    """The files of one store. Thread-safe; locking between processes is `StoreLock`'s.

    Attributes:
      lock: the writer's lock, if this process is the writer. While it is held, no other
        process changes the manifest or the store's files.
      publish_lock: the file that is locked by a flip of `current` and by a snapshot.
      csd_directories: the store's directory below each CSD root; without any, itself.
    """

    def __init__(
        self, path: Path, manifest: Manifest, lock: StoreLock | None = None
    ) -> None:
        self.path, self.manifest, self.lock = path, manifest, lock
        self.publish_lock = path / "publish.lock"
        name = f"jaxinf-{manifest.store_id}"
        self.csd_directories = [Path(root) / name for root in manifest.csds] or [path]
        self._replace_lock = threading.Lock()
        self._files: dict[tuple[str, int, int, str], Path] = {}

    @classmethod
    def open(cls, path: Path) -> "StoreDirectory":
        """Opens an existing store; raises a StoreFormatError if it is none."""
        check_there(path)
        return cls(path, Manifest.read(path / "jaxinf.json"))

    # --- places -----------------------------------------------------------------

    def step_path(self, place: str) -> Path:
        """Returns a step's directory: of a slot, ``checkpoints/…``, ``snapshots/…``."""
        return self.path / "slots" / place if place in SLOTS else self.path / place

    def place_of(self, step: Path) -> str:
        """Reverses `step_path`; the step may be the symlink to the committed slot."""
        place = str(step.relative_to(self.path))
        if place == "current":
            return self.committed_slot() or SLOTS[0]
        return place.removeprefix("slots/")

    def data_paths(self, place: str) -> list[Path]:
        """Returns the directories of a step's chunk files, one for each CSD."""
        if not self.manifest.csds:
            return [self.step_path(place)]
        return [root / place for root in self.csd_directories]

    def folders(self, place: str) -> list[Path]:
        """Returns all directories of a step: that in the store, and those on CSDs."""
        return [*dict.fromkeys([self.step_path(place), *self.data_paths(place)])]

    def check_layout(self) -> None:
        """Refuses links, pipes and devices in the places of the store's own names."""
        for name in _FOLDERS:
            self.check_folder(self.path, self.path / name)
        for name in _FILES:
            with contextlib.suppress(FileNotFoundError):
                check_regular(self.path / name, os.lstat(self.path / name))
        for root in self.csd_directories[: len(self.manifest.csds)]:
            for name in _ON_CSD:
                self.check_folder(root, root / name)
        self.committed_slot()

    def check_folder(self, root: Path, folder: Path) -> None:
        """Refuses a link on the way to a directory."""
        with translated("look", folder), contextlib.suppress(FileNotFoundError):
            os.close(open_beneath(root, folder.relative_to(root), os.O_DIRECTORY))

    # --- chunk files -------------------------------------------------------------

    def chunk_file(self, place: str, one: ChunkFile) -> Path:
        """Returns a chunk's real file, on its CSD; refuses what is no file."""
        key = place, one.number, one.chunk, one.state.name
        if file := self._files.get(key):  # every step asks for those of slots
            return file
        root = self.csd_directories[one.csd]
        file = self.data_paths(place)[one.csd] / one.name
        with translated("look", file), contextlib.suppress(FileNotFoundError):
            os.close(open_beneath(root, file.relative_to(root)))
        if place in SLOTS:  # others come and go, each under a name of its own
            self._files[key] = file
        return file

    # --- slots -------------------------------------------------------------------

    def committed_slot(self) -> Slot | None:
        """Returns the slot that `current` names; None before the first commit."""
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

    def need_slot(self) -> Slot:
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
        """Returns a step's record; refuses one of other arrays than the store's."""
        path = self.step_path(place) / "commit.json"
        record = CommitRecord.read(path)
        record.check_fits(path, self.manifest)
        return record

    # Each of the following refuses to go on if another process may hold the store's
    # lock, too.

    def unpublish(self, slot: Slot) -> None:
        """Removes the record of a slot that is about to be rewritten."""
        self._check_lock()
        assert slot != self.committed_slot()
        record = self.step_path(slot) / "commit.json"
        with translated("removal", record):
            record.unlink(missing_ok=True)

    def sync(self) -> None:
        """Makes everything written so far durable on every CSD and on the store."""
        places = [*self.csd_directories, self.path]
        for place in {one.stat().st_dev: one for one in places}.values():
            sync_filesystem(place)

    def write_record(self, slot: Slot, record: CommitRecord) -> None:
        """Writes the record of a slot whose chunks are durable."""
        self._check_lock()
        record.write(self.step_path(slot) / "commit.json")

    def flip(self, slot: Slot) -> None:
        """Makes a slot with a record the committed one."""
        temporary, current = self.path / "current.tmp", self.path / "current"
        with translated("commit", current), lock_exclusively(self.publish_lock):
            self._check_lock()
            temporary.unlink(missing_ok=True)
            temporary.symlink_to(f"slots/{slot}")
            temporary.rename(current)
            fsync_directory(self.path)

    def _check_lock(self) -> None:
        if self.lock is not None:
            self.lock.check()

    # --- chunk files under a running step ------------------------------------------

    def prepare_write(self, place: str, one: ChunkFile, *, keeps: bool = False) -> Path:
        """Returns the file for writing a chunk of a slot or step without a record.

        If a snapshot, a checkpoint or the other slot has a link to the file, a new one
        takes its place, with the old one's content if it `keeps` that; otherwise the
        caller must write the whole chunk. A file that is too short gets its length
        back.
        """
        file = self.chunk_file(place, one)
        with self._replace_lock:
            status = _status(file)
            if status.st_nlink > 1:
                with self._replacement(one.csd, file) as temporary:
                    if keeps:
                        shutil.copyfile(file, temporary, follow_symlinks=False)
                    else:
                        allocate_file(temporary, one.file_bytes, one.num_bytes)
            elif status.st_size != one.file_bytes:
                with translated("allocation", file):
                    os.truncate(file, one.file_bytes)
        return file

    def link_chunk(self, source: str, target: Slot, one: ChunkFile) -> None:
        """Hard-links a chunk of another step into an unpublished slot."""
        old, new = self.chunk_file(source, one), self.chunk_file(target, one)
        with self._replace_lock:
            # A file with a single link is not in the other slot.
            if _status(old).st_nlink > 1 and new.exists() and old.samefile(new):
                return
            with self._replacement(one.csd, new) as temporary:
                link_file(old, temporary)

    @contextlib.contextmanager
    def _replacement(self, csd: int, file: Path) -> Iterator[Path]:
        """Yields a temporary name; the file that the body makes there replaces `file`.

        Of these names there is one a CSD, since one file is replaced at a time.
        """
        temporary = self.csd_directories[csd] / _REPLACEMENT
        with translated("replacement", file):
            temporary.unlink(missing_ok=True)
            yield temporary
            temporary.rename(file)

    def prune_temporaries(self) -> None:
        """Removes temporary files of chunks and documents that a crash has left."""
        found = [folder / _REPLACEMENT for folder in self.csd_directories]
        for temporary in [*found, *self.path.glob("slots/[ab]/.*.tmp")]:
            with translated("removal", temporary):
                temporary.unlink(missing_ok=True)


def _status(file: Path) -> os.stat_result:
    """Returns the status of a chunk's file; refuses a link."""
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
