"""The newest version of every chunk: its slot, its checksum, and how it is moved.

      stored ──end_step──► working slot ──end_commit──► committed slot

Invariant: readers load the version of the last finished step, and every chunk that
differs from its checksum is detected: no result of it is stored or returned.
"""

import operator
import threading
from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

import numpy as np

from jaxinf.csd import Csd, Transfer
from jaxinf.engine.subgroup_table import SubgroupLayout
from jaxinf.store import Slot, StoreDirectory, corrupt_chunk, other_slot
from jaxinf.transfer import (
    Compute,
    Load,
    Loads,
    Resident,
    Unit,
    Write,
    crc32c,
    crc32c_combine,
    span,
)
from jaxinf.typing import Array

_Parts: TypeAlias = dict[int, tuple[int, int]]
"""Parts of a chunk: offset in elements to checksum and length in bytes."""


class ChunkTable:
    """The chunk files of a store, an entry each, as in `Manifest.held`. Thread-safe.

    Args:
      checksums: checksums of the committed step, by array name, one a chunk; empty for
        a new store.

    Attributes:
      target: the slot that steps write to until the next commit.
    """

    def __init__(
        self, directory: StoreDirectory, target: Slot, checksums: Mapping[str, Array]
    ) -> None:
        self._directory = directory
        self.target: Slot = target
        # Plain arrays, since NumPy's take several times as long to index, and every
        # step indexes them for thousands of leaves.
        held = directory.manifest.held()
        self._lengths = array("q", (one.num_bytes for one in held))  # without padding
        self._sums = array("I")
        self._names: list[tuple[str, int]] = []  # name and number of chunks, by array
        for name, leaf, _ in directory.manifest.arrays():
            self._names.append((name, len(leaf.held)))
            self._sums.extend(checksums.get(name, [0] * len(leaf.held)))
        self._is_working = bytearray(len(self._sums))
        self._is_shared = bytearray(len(self._sums))
        self._is_in_memory = bytearray(len(self._sums))
        self._lock = threading.Lock()
        self._parts: dict[int, _Parts] = {}  # of newest versions, where they are known
        self._loaded: dict[int, _Parts] = {}  # of other newest versions, as read
        self._given: dict[int, _Parts] = {}
        self._stored: dict[int, _Parts] = {}  # of the step under way
        self._deferred: set[int] = set()
        self._prepare_lock = threading.Lock()
        self._prepared: set[int] = set()

    @property
    def committed(self) -> Slot:
        """The slot of the last committed step; empty in a new store."""
        return other_slot(self.target)

    def slot(self, entry: int) -> Slot:
        """Returns the slot with the newest version of a chunk."""
        return self.target if self._is_working[entry] else self.committed

    def sources(self, layout: SubgroupLayout, states: Sequence[int]) -> Loads:
        """Returns numbers and slots of a subgroup's states."""
        return tuple([(n, self.slot(layout.entries[n])) for n in states])

    @property
    def has_working(self) -> bool:
        """Whether steps have finished since the last commit."""
        return any(self._is_working)

    def is_in_memory(self, layout: SubgroupLayout, state: int) -> bool:
        """Whether the newest version of a chunk's state is not on the drive."""
        return bool(self._is_in_memory[layout.entries[state]])

    def checksums(self) -> dict[str, Array]:
        """Checksums of the newest version of every chunk, by array name."""
        result, first = {}, 0
        for name, num_chunks in self._names:
            last = first + num_chunks
            result[name] = np.array(self._sums[first:last], np.uint32)
            first = last
        return result

    # --- what is read and written ----------------------------------------------------

    def loaded(
        self, layout: SubgroupLayout, state: int, slot: Slot, checksum: int
    ) -> None:
        """Verifies a part that was read, or its chunk when all parts of it are.

        Parts that this process has written are verified one by one, as those that stay
        in memory are not read. Others that are read again before the step ends are
        compared with the first read, so that parts of two reads never count as one
        chunk.

        Raises:
          StoreCorruptError: the chunk is damaged.
        """
        entry, offset = layout.entries[state], layout.subgroup.offset_elements
        found, expected, when = checksum, self._sums[entry], "as written"
        if layout.sizes[state] < self._lengths[entry]:
            with self._lock:
                if known := self._parts.get(entry):
                    expected, _ = known[offset]
                elif first := self._loaded.get(entry, {}).get(offset):
                    expected, _ = first
                    when = f"when elements from {offset} on were read before"
                else:
                    parts = self._add(self._loaded, layout, state, checksum)
                    found = self._whole(entry, parts)
        if found not in (None, expected):
            one = layout.file(state)
            file = self._directory.chunk_file(slot, one)
            raise corrupt_chunk(file, one, expected, found, when)

    def matches(self, layout: SubgroupLayout, state: int, checksum: int) -> bool:
        """Whether a copy equals the newest version, when the whole chunk is known."""
        entry = layout.entries[state]
        with self._lock:
            parts = self._add(self._given, layout, state, checksum)
            found = self._whole(entry, parts)
            if found is not None:
                del self._given[entry]
        return found in (None, self._sums[entry])

    def stored(
        self,
        layout: SubgroupLayout,
        state: int,
        checksum: int,
        *,
        is_in_memory: bool = False,
    ) -> None:
        """Notes a part that is being written to the target slot, or will be."""
        entry = layout.entries[state]
        with self._lock:
            self._is_shared[entry] = False
            if is_in_memory:
                self._deferred.add(entry)
            self._add(self._stored, layout, state, checksum)

    def prepare_write(self, layout: SubgroupLayout, state: int) -> Path:
        """Returns the file of the target slot for a part of a chunk.

        If the file has been linked elsewhere since, a new file takes its place. It gets
        the parts that this step has written or still has to read from there.
        """
        entry = layout.entries[state]
        with self._prepare_lock:
            file = self._directory.prepare_write(
                self.target,
                layout.file(state),
                keeps=entry in self._prepared or bool(self._is_working[entry]),
            )
            self._prepared.add(entry)
        return file

    # --- steps and commits -----------------------------------------------------------

    def end_step(self) -> None:
        """Makes the stored parts the newest version."""
        with self._lock:
            for entry, parts in self._stored.items():
                whole = self._whole(entry, parts)
                assert whole is not None, "a step writes all of a chunk"
                self._sums[entry] = whole
                self._is_working[entry] = True
                self._is_in_memory[entry] = entry in self._deferred
                if len(parts) > 1:
                    self._parts[entry] = parts
            self._loaded.clear()
        self.forget_step()

    def end_flush(self) -> None:
        """Notes that every newest version is on the drive."""
        self._is_in_memory = bytearray(len(self._sums))
        self.forget_step()

    def forget_step(self) -> None:
        """Forgets the writes of a step that has not ended; its reads stay."""
        with self._lock:
            self._stored.clear()
            self._deferred.clear()
            self._given.clear()
        with self._prepare_lock:
            self._prepared.clear()

    def share_unwritten(self) -> None:
        """Links every chunk that no step has written into the target slot."""
        if all(map(operator.or_, self._is_working, self._is_shared)):
            return
        for entry, one in enumerate(self._directory.manifest.held()):
            if not self._is_working[entry] and not self._is_shared[entry]:
                self._directory.link_chunk(self.committed, self.target, one)
                self._is_shared[entry] = True

    def end_commit(self) -> None:
        """Notes that the target slot is published."""
        self.target = self.committed
        self._is_working = bytearray(len(self._sums))

    def _add(
        self,
        known: dict[int, _Parts],
        layout: SubgroupLayout,
        state: int,
        checksum: int,
    ) -> _Parts:
        """Adds a part to those of its chunk, and returns these."""
        parts = known.setdefault(layout.entries[state], {})
        parts[layout.subgroup.offset_elements] = (checksum, layout.sizes[state])
        return parts

    def _whole(self, entry: int, parts: _Parts) -> int | None:
        """Returns the checksum of a chunk if all its parts are there."""
        if sum([length for _, length in parts.values()]) < self._lengths[entry]:
            return None
        if len(parts) == 1:
            return next(iter(parts.values()))[0]
        return crc32c_combine(parts[offset] for offset in sorted(parts))


# --- the mover's work ----------------------------------------------------------------


class ChunkMoves:
    """Reads states, computes tasks and writes states, with checksums. Thread-safe.

    `perform` is what the mover performs its units with.
    """

    def __init__(
        self, directory: StoreDirectory, chunks: ChunkTable, csds: Sequence[Csd]
    ) -> None:
        self._directory, self._chunks, self._csds = directory, chunks, csds
        self._drives = [str(folder) for folder in directory.csd_directories]

    def perform(self, unit: Unit) -> Sequence[Loads]:
        """Executes a unit; returns what is loaded and only the update can verify."""
        match unit:
            case Load(drive, items):
                reads = [self._read(one, *at) for one, states in items for at in states]
                with span("read", drive=self._drives[drive]):
                    self._csds[drive].read(reads)
                return [self._check_read(*item) for item in items]
            case Compute(resident):
                self._compute(resident)
            case Write(drive, items):
                writes = [self._write(one, n) for one, states in items for n in states]
                with span("write", drive=self._drives[drive]):
                    self._csds[drive].write(writes)
        return ()

    def _read(self, resident: Resident, state: int, slot: Slot) -> Transfer:
        layout = resident.task.piece
        file = self._directory.chunk_file(slot, layout.file(state))
        for_host = not resident.task.runs_kernel
        return Transfer(resident.buffer, layout.extents[state], file, for_host)

    def _check_read(self, resident: Resident, states: Loads) -> Loads:
        """Verifies states; returns those whose checksum the update tells."""
        unchecked = []
        for state, slot in states:
            checksum = self._known_sum(resident, state)
            if checksum is None:
                unchecked.append((state, slot))
            else:
                self._chunks.loaded(resident.task.piece, state, slot, checksum)
        return tuple(unchecked)

    def _compute(self, resident: Resident) -> None:
        """Runs the task's `compute`, and verifies the remaining states."""
        task, unchecked = resident.task, resident.unchecked
        layout = task.piece
        if not task.runs_kernel:  # the host is about to read them itself
            for state, slot in unchecked:
                self._chunks.loaded(layout, state, slot, self._sum(resident, state))
            unchecked = ()
        with span("update"):
            wanted = [state for state, _ in unchecked]
            csd = self._csds[layout.drive]
            told = task.compute(csd, resident.buffer, wanted) or {}
        for state, slot in unchecked:
            if state in told:
                self._chunks.loaded(layout, state, slot, told[state])
            else:  # prefetched, but not used by the update
                assert (state, slot) not in task.loads
        for state in resident.deferred:
            checksum = self._sum(resident, state)
            self._chunks.stored(layout, state, checksum, is_in_memory=True)

    def _write(self, resident: Resident, state: int) -> Transfer:
        layout = resident.task.piece
        if not resident.is_flushed:  # else that was noted when it was computed
            self._chunks.stored(layout, state, self._sum(resident, state))
        file = self._chunks.prepare_write(layout, state)
        return Transfer(resident.buffer, layout.extents[state], file)

    def _known_sum(self, resident: Resident, state: int) -> int | None:
        """Returns a checksum that the drive's kernel has computed, if one has."""
        layout = resident.task.piece
        with span("checksum"):
            csd = self._csds[layout.drive]
            return csd.checksum(resident.buffer, layout.extents[state])

    def _sum(self, resident: Resident, state: int) -> int:
        """Returns a state's checksum, which the host computes if no kernel has."""
        checksum, layout = self._known_sum(resident, state), resident.task.piece
        if checksum is None:
            with span("checksum"):
                view = self._csds[layout.drive].view
                checksum = crc32c(view(resident.buffer, layout.extents[state]))
        return checksum
