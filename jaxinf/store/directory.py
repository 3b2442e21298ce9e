"""A store's directory tree: where every file is, how a slot is published.

Invariant: nothing here writes to a chunk file of the committed slot, nor to a file with
more than one link; `current` changes by rename alone.
"""

import contextlib
import json
import os
import shutil
import stat
import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, TypeAlias

from jaxinf.errors import (
    StoreCorruptError,
    StoreFormatError,
    StoreIOError,
    StoreSpaceError,
)
from jaxinf.io import (
    allocate_file,
    fsync_directory,
    sync_filesystem,
    write_json_atomically,
)
from jaxinf.io.failures import translated
from jaxinf.layout import PAGE_BYTES, Chunk, scale_chunks
from jaxinf.store.commit import CommitRecord
from jaxinf.store.links import copy_file, link_or_copy
from jaxinf.store.lock import lock_exclusively
from jaxinf.store.manifest import LeafRecord, Manifest, StateRecord
from jaxinf.store.zarr_metadata import (
    COMMIT_SUCCESS_TEXT,
    array_metadata,
    group_metadata,
    orbax_checkpoint_metadata,
    orbax_tree_metadata,
)

__all__ = [
    "SLOTS",
    "Slot",
    "StoreDirectory",
    "check_free_space",
    "other_slot",
    "stored_bytes",
]

Slot: TypeAlias = Literal["a", "b"]
SLOTS: tuple[Slot, Slot] = ("a", "b")


def other_slot(slot: Slot) -> Slot:
    """The slot that is not this one."""
    return "b" if slot == "a" else "a"


def stored_bytes(chunk: Chunk, state: StateRecord) -> int:
    """Bytes that one slot's file of a leaf's chunk takes on the drive: whole pages."""
    if not chunk.num_elements:
        return 0
    num_elements = state.num_elements(chunk.num_elements)
    pages = -(-num_elements * state.itemsize // PAGE_BYTES)
    return pages * PAGE_BYTES


class StoreDirectory:
    """The files of one store. Thread-safe; locking between processes is `StoreLock`'s.

    Attributes:
      path: the store, absolute.
      manifest: what it holds.
    """

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self.path = path
        self.manifest = manifest
        self._replace_lock = threading.Lock()

    @classmethod
    def open(cls, path: Path) -> "StoreDirectory":
        """Opens an existing store.

        Raises:
          StoreFormatError: `path` is no store, or its manifest cannot be read.
        """
        manifest_path = path / "jaxinf.json"
        if not manifest_path.is_file():
            raise StoreFormatError(
                f"{path}: expected a jaxinf store, found no jaxinf.json in it; give "
                "the directory that a run was told to store its state in"
            )
        return cls(path, Manifest.read(manifest_path))

    # --- where things are -------------------------------------------------------

    @property
    def publish_lock(self) -> Path:
        """The file that a flip of `current` and a snapshot hold a lock on."""
        return self.path / "publish.lock"

    def step_path(self, place: str) -> Path:
        """The directory in the store of a step.

        Args:
          place: a slot, or ``checkpoints/NAME``, or ``snapshots/ID``.
        """
        return self.path / "slots" / place if place in SLOTS else self.path / place

    def csd_directory(self, csd: int) -> Path:
        """What belongs to this store below a CSD root; the store itself without any."""
        if not self.manifest.csds:
            return self.path
        return Path(self.manifest.csds[csd]) / f"jaxinf-{self.manifest.store_id}"

    def data_path(self, place: str, csd: int) -> Path:
        """The directory that holds a step's chunk files on one CSD."""
        if not self.manifest.csds:
            return self.step_path(place)
        return self.csd_directory(csd) / place

    @cached_property
    def chunks(self) -> tuple[tuple[Chunk, ...], ...]:
        """The chunks of every leaf, in grid order."""
        return tuple(tuple(leaf.grid.chunks()) for leaf in self.manifest.leaves)

    def state_chunk(self, leaf: int, chunk: int, state: StateRecord) -> Chunk:
        """The chunk of a state's own array that belongs to a chunk of the leaf."""
        if state.codec != "scale":
            return self.chunks[leaf][chunk]
        return self._scale_chunks[leaf][chunk]

    @cached_property
    def _scale_chunks(self) -> tuple[tuple[Chunk, ...], ...]:
        return tuple(
            scale_chunks(leaf.grid, chunks)
            for leaf, chunks in zip(self.manifest.leaves, self.chunks, strict=True)
        )

    def state_bytes(self, leaf: int, chunk: int, state: StateRecord) -> int:
        """Bytes of a state's elements in a chunk, padding left out."""
        return self.state_chunk(leaf, chunk, state).num_elements * state.itemsize

    def chunk_file(self, place: str, leaf: int, chunk: int, state: str) -> Path:
        """A chunk's real file, on its CSD."""
        record = self.manifest.leaves[leaf]
        root = self.data_path(place, record.csds[chunk])
        key = self.state_chunk(leaf, chunk, record.state(state)).key
        return root / record.array_name(state) / key

    @property
    def num_csds(self) -> int:
        """CSDs the chunks are spread over, at least 1."""
        return max(1, len(self.manifest.csds))

    def corrupt_error(
        self,
        step_path: Path,
        place: tuple[int, int, str],
        expected: int,
        found: int,
        when: str = "as written",
    ) -> StoreCorruptError:
        """What is raised for a chunk whose checksum is not the committed one.

        Args:
          step_path: the slot or checkpoint that holds it.
          place: leaf, chunk and state.
          expected, found: CRC-32C.
          when: where the expected one is from.
        """
        leaf, chunk, state = place
        record = self.manifest.leaves[leaf]
        key = self.state_chunk(leaf, chunk, record.state(state)).key
        file = step_path / record.array_name(state) / key
        csd = record.csds[chunk]
        return StoreCorruptError(
            f"{os.path.realpath(file)}: leaf {record.name}, {state}, chunk {chunk} of "
            f"{len(record.csds)}, on CSD {csd} ({self.csd_directory(csd)}): expected "
            f"CRC-32C {expected:08x} {when}, found {found:08x}; nothing was "
            'trained on it. Check the drive (dmesg, smartctl), see "jaxinf verify '
            f'{self.path}" for all that is damaged, and restore a checkpoint or a '
            "backup"
        )

    # --- creation ----------------------------------------------------------------

    def required_bytes(self) -> dict[Path, int]:
        """Bytes that creating the store takes on each CSD, both slots."""
        totals: dict[Path, int] = defaultdict(int)
        for leaf, record, chunks in self._leaves():
            del leaf
            for position, chunk in enumerate(chunks):
                need = sum(stored_bytes(chunk, state) for state in record.states)
                totals[self.csd_directory(record.csds[position])] += 2 * need
        return dict(totals)

    def check_space(self) -> None:
        """Refuses a store that its file systems have no room for.

        Raises:
          StoreSpaceError: naming the file system, what is needed and what is free.
        """
        check_free_space(
            self.required_bytes(),
            f"the store's two slots of {self.manifest.num_params:,} params need",
            "free some, or choose another directory or more CSD roots",
        )

    def create(self) -> None:
        """Makes every directory and file of a new store, preallocated, no step yet.

        Raises:
          StoreSpaceError: before anything is written.
          StoreIOError: the operating system refused something.
        """
        self.check_space()
        with translated("creation", self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            write_json_atomically(self.path / "jaxinf.json", self.manifest.to_json())
            timestamp_ns = time.time_ns()
            for slot in SLOTS:
                self._create_metadata(slot, timestamp_ns)
                for leaf, record, _ in self._leaves():
                    for state in record.states:
                        self._create_chunks(slot, leaf, record, state)
            for csd in range(len(self.manifest.csds)):
                self.csd_directory(csd).mkdir(parents=True, exist_ok=True)
            self.claim_csds()
        self.sync()
        fsync_directory(self.path)

    def claim_csds(self) -> None:
        """Notes on every CSD whose chunks these are.

        Raises:
          StoreFormatError: they are those of another store that is still there, of
            which this one is a copy without its CSDs.
        """
        own = str(self.path.resolve())
        for csd in range(len(self.manifest.csds)):
            note = self.csd_directory(csd) / "store.json"
            owner = _read_owner(note)
            if owner == own:
                continue
            self._check_owner(owner, note)
            write_json_atomically(note, {"store": own})

    def _check_owner(self, owner: str | None, note: Path) -> None:
        """Refuses a CSD's directory that belongs to another store that is there."""
        if owner is None or owner == str(self.path.resolve()):
            return
        if _store_id_at(Path(owner)) == self.manifest.store_id:
            raise StoreFormatError(
                f"{self.path}: expected a store of its own, found a copy of {owner}, "
                f"whose chunks on a CSD ({note.parent}) it would overwrite; open that "
                "one, or make a store that shares nothing with it "
                '("jaxinf checkpoint STORE export", then "import")'
            )

    def _create_metadata(self, slot: Slot, timestamp_ns: int) -> None:
        root = self.step_path(slot)
        root.mkdir(parents=True, exist_ok=True)
        keys = []
        for _, record, _ in self._leaves():
            for state in record.states:
                keys.append((state.name, *record.path))
                array = root / record.array_name(state.name)
                array.mkdir()
                _write_json(
                    array / "zarr.json",
                    array_metadata(*record.array_grid(state), state.dtype),
                )
        _write_json(root / "zarr.json", group_metadata())
        _write_json(root / "_METADATA", orbax_tree_metadata(keys))
        _write_json(
            root / "_CHECKPOINT_METADATA", orbax_checkpoint_metadata(timestamp_ns)
        )
        (root / "commit_success.txt").write_text(COMMIT_SUCCESS_TEXT)

    def _create_chunks(
        self, slot: Slot, leaf: int, record: LeafRecord, state: StateRecord
    ) -> None:
        made: set[Path] = set()
        for position in range(len(record.csds)):
            chunk = self.state_chunk(leaf, position, state)
            file = self.chunk_file(slot, leaf, position, state.name)
            link = self.step_path(slot) / record.array_name(state.name) / chunk.key
            for directory in {file.parent, link.parent} - made:
                directory.mkdir(parents=True, exist_ok=True)
                made.add(directory)
            self._allocate(file, chunk, state)
            if file != link:
                link.symlink_to(file)

    def _allocate(self, file: Path, chunk: Chunk, state: StateRecord) -> None:
        logical_bytes = chunk.stored_elements * state.itemsize
        pages = -(-chunk.num_elements * state.itemsize // PAGE_BYTES)
        allocate_file(file, logical_bytes, min(pages * PAGE_BYTES, logical_bytes))

    def check_never_committed(self) -> None:
        """Tells a store whose creation was interrupted from one that lost `current`.

        Raises:
          StoreFormatError: it has committed a step.
        """
        if self.committed_slot() is not None:
            raise StoreFormatError(
                f"{self.path}: expected no committed step, found one"
            )
        for slot in SLOTS:
            record = self.step_path(slot) / "commit.json"
            if record.exists() and (step := CommitRecord.read(record).step) > 0:
                raise StoreFormatError(
                    f"{self.path}: expected the symlink `current` to name the "
                    f"committed slot, found none, but step {step} in slots/{slot}; was "
                    "the store copied without its symlinks? Copy it with cp -a, or "
                    f"restore the symlink (ln -s slots/{slot} current), to the slot of "
                    "the higher step if both have a commit.json"
                )

    def discard(self) -> None:
        """Removes a store that never committed a step: its creation was interrupted.

        Raises:
          StoreFormatError: it has committed one, or its chunks are another store's;
            nothing is removed.
        """
        self.check_never_committed()
        for csd in range(len(self.manifest.csds)):
            note = self.csd_directory(csd) / "store.json"
            self._check_owner(_read_owner(note), note)
        for csd, root in enumerate(self.manifest.csds):
            shutil.rmtree(self.csd_directory(csd), ignore_errors=True)
            if os.path.isdir(root):
                fsync_directory(root)
        shutil.rmtree(self.path / "slots", ignore_errors=True)
        fsync_directory(self.path)  # without the manifest nobody knows what it was
        with translated("removal", self.path):
            (self.path / "jaxinf.json").unlink(missing_ok=True)
        fsync_directory(self.path)

    # --- slots -------------------------------------------------------------------

    def committed_slot(self) -> Slot | None:
        """The slot that `current` names; None before the first commit.

        Raises:
          StoreFormatError: `current` is something else.
        """
        current = self.path / "current"
        try:
            target = os.readlink(current)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise StoreFormatError(
                f"{current}: expected a symlink to slots/a or slots/b, found a file; "
                "was the store copied without its symlinks? Copy it with cp -a"
            ) from error
        for slot in SLOTS:
            if target == f"slots/{slot}":
                return slot
        raise StoreFormatError(
            f"{current}: expected a symlink to slots/a or slots/b, found {target!r}; "
            "restore the symlink to the slot whose commit.json has the higher step"
        )

    def read_commit(self) -> CommitRecord | None:
        """The committed step's record; None before the first commit."""
        slot = self.committed_slot()
        return CommitRecord.read(self.step_path(slot) / "commit.json") if slot else None

    def unpublish(self, slot: Slot) -> None:
        """Takes the record from a slot that is about to be rewritten."""
        assert slot != self.committed_slot()
        record = self.step_path(slot) / "commit.json"
        with translated("removal", record):
            record.unlink(missing_ok=True)

    def sync(self) -> None:
        """Makes everything written so far durable on every CSD and on the store."""
        places = [self.csd_directory(csd) for csd in range(self.num_csds)]
        for place in {p.stat().st_dev: p for p in [*places, self.path]}.values():
            sync_filesystem(place)

    def publish(self, slot: Slot, record: CommitRecord) -> None:
        """Commits a slot whose chunks are durable; see docs/format.md."""
        write_json_atomically(self.step_path(slot) / "commit.json", record.to_json())
        temporary = self.path / "current.tmp"
        with (
            translated("commit", self.path / "current"),
            lock_exclusively(self.publish_lock),
        ):
            temporary.unlink(missing_ok=True)
            temporary.symlink_to(f"slots/{slot}")
            temporary.rename(self.path / "current")
            fsync_directory(self.path)

    # --- chunk files under a running step ------------------------------------------

    def prepare_write(
        self, slot: Slot, leaf: int, chunk: int, state: str, *, keeps: bool = False
    ) -> Path:
        """The file to write a chunk of an unpublished slot to.

        A file that a snapshot, a checkpoint or the other slot links to is left to them
        and a new one takes its place. One that something has cut short gets its length
        back.

        Args:
          slot, leaf, chunk, state: which.
          keeps: whether the new file holds what the old one does; else the caller must
            write all of the chunk.
        """
        file = self.chunk_file(slot, leaf, chunk, state)
        record = self.manifest.leaves[leaf].state(state)
        layout = self.state_chunk(leaf, chunk, record)
        num_bytes = layout.stored_elements * record.itemsize
        with self._replace_lock:
            status = _status(file)
            if status.st_nlink > 1:
                with _replacement(file) as temporary:
                    if keeps:
                        copy_file(file, temporary)
                    else:
                        self._allocate(temporary, layout, record)
            elif stat.S_ISREG(status.st_mode) and status.st_size != num_bytes:
                with translated("allocation", file):
                    os.truncate(file, num_bytes)
        return file

    def link_chunk(
        self, source: str, target: Slot, leaf: int, chunk: int, state: str
    ) -> None:
        """Gives an unpublished slot the chunk of another step, by a hard link."""
        old = self.chunk_file(source, leaf, chunk, state)
        new = self.chunk_file(target, leaf, chunk, state)
        with self._replace_lock:
            # Of a file with one link the other slot has none.
            if _status(old).st_nlink > 1 and new.exists() and old.samefile(new):
                return
            with _replacement(new) as temporary:
                link_or_copy(old, temporary)

    def prune_replacements(self) -> None:
        """Removes what a crash left of files that were to take a chunk's place."""
        for leaf, record, chunks in self._leaves():
            for state in record.states:
                for chunk in range(len(chunks)):
                    for slot in SLOTS:
                        file = self.chunk_file(slot, leaf, chunk, state.name)
                        with translated("removal", file):
                            _temporary(file).unlink(missing_ok=True)

    def _leaves(self) -> Iterable[tuple[int, LeafRecord, tuple[Chunk, ...]]]:
        for leaf, record in enumerate(self.manifest.leaves):
            yield leaf, record, self.chunks[leaf]


@contextlib.contextmanager
def _replacement(file: Path) -> Iterator[Path]:
    """A name beside a file: what the body makes there takes the file's place."""
    temporary = _temporary(file)
    with translated("replacement", file):
        temporary.unlink(missing_ok=True)
        yield temporary
        temporary.rename(file)


def _temporary(file: Path) -> Path:
    return file.with_name(file.name + ".new")


def _status(file: Path) -> os.stat_result:
    try:
        return file.stat()
    except FileNotFoundError as error:
        raise StoreIOError(
            f"{file}: expected a chunk of the store, found no file; something other "
            "than jaxinf removed it. Restore it from a checkpoint or a backup"
        ) from error


def _read_owner(note: Path) -> str | None:
    """The store that a CSD's directory belongs to; None where that is not noted."""
    try:
        return str(json.loads(note.read_text())["store"])
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None


def _store_id_at(path: Path) -> str | None:
    try:
        return str(json.loads((path / "jaxinf.json").read_text())["store_id"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def check_free_space(needs: Mapping[Path, int], what: str, remedy: str) -> None:
    """Refuses what file systems have no room for.

    Args:
      needs: bytes below each directory, which need not exist.
      what, remedy: parts of the message.

    Raises:
      StoreSpaceError: naming the file system, what is needed and what is free.
    """
    per_device: dict[int, list[tuple[Path, int]]] = defaultdict(list)
    for directory, need in needs.items():
        existing = _existing_parent(directory)
        per_device[existing.stat().st_dev].append((existing, need))
    for entries in per_device.values():
        need = sum(n for _, n in entries)
        status = os.statvfs(entries[0][0])
        free = status.f_bavail * status.f_frsize
        if need > free:
            raise StoreSpaceError(
                f"{entries[0][0]}: {what} {need:,} bytes ({need / 2**30:.1f} GiB) "
                f"there, the file system has {free:,} free ({free / 2**30:.1f} GiB); "
                f"{remedy}"
            )


def _existing_parent(path: Path) -> Path:
    while not path.exists():
        path = path.parent
    return path


def _write_json(path: Path, document: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(document, indent=1) + "\n")
