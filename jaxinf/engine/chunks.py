"""The newest version of every chunk: its slot, its checksum, and how it is moved.

      stored ──promote_stored──► working slot ──end_commit──► committed slot

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
    """The chunk files of a store, by number in `Manifest.held_chunks`. Thread-safe.

    The states of an entry, which is a chunk:

      _is_working    the newest version is in `target`, of a step without a commit
      _is_in_memory  the newest version is not on the drive
      _is_linked     both slots have the same file
      _deferred      the step under way stores it in memory only
      _prepared      `target` may have parts of it that the step under way wrote

    Args:
      target: The slot that steps write to until the next commit.
      checksums: Of the committed step's chunks, by array name; empty for a new store.
    """

    def __init__(
        self, directory: StoreDirectory, target: Slot, checksums: Mapping[str, Array]
    ) -> None:
        self._directory = directory
        self.target: Slot = target
        # Plain arrays, since NumPy's take several times as long to index, and every
        # step indexes them for thousands of leaves.
        held = directory.manifest.held_chunks()
        self._lengths = array("q", (file.num_bytes for file in held))  # no padding
        self._sums = array("I")
        self._names: list[tuple[str, int]] = []  # of arrays, with their chunks' number
        for name, leaf, _ in directory.manifest.arrays():
            self._names.append((name, len(leaf.held_numbers)))
            self._sums.extend(checksums.get(name, [0] * len(leaf.held_numbers)))
        self._is_working = bytearray(len(self._sums))
        self._is_linked = bytearray(len(self._sums))
        self._is_in_memory = bytearray(len(self._sums))
        self._lock = threading.Lock()
        self._newest_parts: dict[int, _Parts] = {}  # those that this process wrote
        # Parts read in this step, of chunks that this process did not write.
        self._first_reads: dict[int, _Parts] = {}
        self._callers_copies: dict[int, _Parts] = {}  # params to compare with these
        self._step_writes: dict[int, _Parts] = {}  # what the step under way stores
        self._deferred: set[int] = set()
        self._prepare_lock = threading.Lock()
        self._prepared: set[int] = set()

    @property
    def committed(self) -> Slot:
        """The slot of the last committed step; in a new store it has no files."""
        return other_slot(self.target)

    def newest_slot(self, entry: int) -> Slot:
        return self.target if self._is_working[entry] else self.committed

    def sources(self, layout: SubgroupLayout, states: Sequence[int]) -> Loads:
        """Returns states of a subgroup with the slots to read them from."""
        return tuple([(n, self.newest_slot(layout.entries[n])) for n in states])

    @property
    def has_working(self) -> bool:
        """Whether the target slot has newest versions, of steps without a commit."""
        return any(self._is_working)

    def is_in_memory(self, layout: SubgroupLayout, state: int) -> bool:
        """Whether the newest version of a chunk's state is not on the drive."""
        return bool(self._is_in_memory[layout.entries[state]])

    def checksums(self) -> dict[str, Array]:
        result, first = {}, 0
        for name, num_chunks in self._names:
            last = first + num_chunks
            result[name] = np.array(self._sums[first:last], np.uint32)
            first = last
        return result

    # --- what is read and written ----------------------------------------------------

    def verify_read(
        self, layout: SubgroupLayout, state: int, slot: Slot, checksum: int
    ) -> None:
        """Verifies a part that was read, or its chunk once all parts of it are.

        Parts that this process has written are verified one by one, since cached parts
        are not read. A part that is read again before the step ends is compared with
        its first read, so that parts of two reads never count as one chunk.

        Raises:
          StoreCorruptError: The chunk is damaged.
        """
        entry, offset = layout.entries[state], layout.subgroup.offset_elements
        actual, expected, when = checksum, self._sums[entry], "as written"
        if layout.sizes[state] < self._lengths[entry]:
            with self._lock:
                if known := self._newest_parts.get(entry):
                    expected, _ = known[offset]
                elif first := self._first_reads.get(entry, {}).get(offset):
                    expected, _ = first
                    when = f"when elements from {offset} on were read before"
                else:
                    parts = self._add(self._first_reads, layout, state, checksum)
                    actual = self._combine(entry, parts)
        if actual not in (None, expected):
            file = layout.file(state)
            path = self._directory.chunk_path(slot, file)
            raise corrupt_chunk(path, file, expected, actual, when)

    def matches(self, layout: SubgroupLayout, state: int, checksum: int) -> bool:
        """Adds a part of a caller's copy; whether it may equal the newest version.

        The answer is certain when all parts of the chunk were added.
        """
        entry = layout.entries[state]
        with self._lock:
            parts = self._add(self._callers_copies, layout, state, checksum)
            actual = self._combine(entry, parts)
            if actual is not None:
                del self._callers_copies[entry]
        return actual in (None, self._sums[entry])

    def note_stored(
        self,
        layout: SubgroupLayout,
        state: int,
        checksum: int,
        *,
        is_in_memory: bool = False,
    ) -> None:
        """Notes a part that is, or will be, written to the target slot."""
        entry = layout.entries[state]
        with self._lock:
            self._is_linked[entry] = False
            if is_in_memory:
                self._deferred.add(entry)
            self._add(self._step_writes, layout, state, checksum)

    def prepare_write(self, layout: SubgroupLayout, state: int) -> Path:
        """Returns the file of the target slot to write a part of a chunk to.

        If the file was linked to meanwhile, a new file takes its place, with the parts
        that this step has written or still has to read from there.
        """
        entry = layout.entries[state]
        with self._prepare_lock:
            file = self._directory.prepare_write(
                self.target,
                layout.file(state),
                keeps_content=entry in self._prepared or bool(self._is_working[entry]),
            )
            self._prepared.add(entry)
        return file

    # --- steps and commits -----------------------------------------------------------

    def promote_stored(self) -> None:
        """Makes what the step has stored the newest version."""
        with self._lock:
            for entry, parts in self._step_writes.items():
                whole = self._combine(entry, parts)
                assert whole is not None, "a step writes all of a chunk"
                self._sums[entry] = whole
                self._is_working[entry] = True
                self._is_in_memory[entry] = entry in self._deferred
                if len(parts) > 1:
                    self._newest_parts[entry] = parts
            self._first_reads.clear()
        self.forget_step()

    def end_flush(self) -> None:
        """Notes that every newest version is on the drive."""
        self._is_in_memory = bytearray(len(self._sums))
        self.forget_step()

    def forget_step(self) -> None:
        """Forgets the writes of a step that has not ended, and keeps its reads."""
        with self._lock:
            self._step_writes.clear()
            self._deferred.clear()
            self._callers_copies.clear()
        with self._prepare_lock:
            self._prepared.clear()

    def link_unwritten(self) -> None:
        """Links every chunk that no step has written into the target slot."""
        if all(map(operator.or_, self._is_working, self._is_linked)):
            return
        for entry, file in enumerate(self._directory.manifest.held_chunks()):
            if not self._is_working[entry] and not self._is_linked[entry]:
                self._directory.link_chunk(self.committed, self.target, file)
                self._is_linked[entry] = True

    def end_commit(self) -> None:
        self.target = self.committed
        self._is_working = bytearray(len(self._sums))

    def _add(
        self,
        parts_by_entry: dict[int, _Parts],
        layout: SubgroupLayout,
        state: int,
        checksum: int,
    ) -> _Parts:
        parts = parts_by_entry.setdefault(layout.entries[state], {})
        parts[layout.subgroup.offset_elements] = (checksum, layout.sizes[state])
        return parts

    def _combine(self, entry: int, parts: _Parts) -> int | None:
        """Returns the checksum of a chunk; None until all its parts are there."""
        if sum([length for _, length in parts.values()]) < self._lengths[entry]:
            return None
        if len(parts) == 1:
            return next(iter(parts.values()))[0]
        return crc32c_combine(parts[offset] for offset in sorted(parts))


# --- the mover's work ----------------------------------------------------------------


class UnitRunner:
    """Runs the mover's units, and computes or compares checksums. Thread-safe."""

    def __init__(
        self, directory: StoreDirectory, chunks: ChunkTable, csds: Sequence[Csd]
    ) -> None:
        self._directory, self._chunks, self._csds = directory, chunks, csds
        self._drives = [str(folder) for folder in directory.csd_directories]

    def run(self, unit: Unit) -> Sequence[Loads]:
        """Runs a unit; returns the loaded states that only their update can verify."""
        match unit:
            case Load(drive, items):
                reads = [self._read(r, *load) for r, loads in items for load in loads]
                with span("read", drive=self._drives[drive]):
                    self._csds[drive].read(reads)
                return [self._verify_read(*item) for item in items]
            case Compute(resident):
                self._compute(resident)
            case Write(drive, items):
                writes = [
                    self._write(r, state) for r, states in items for state in states
                ]
                with span("write", drive=self._drives[drive]):
                    self._csds[drive].write(writes)
        return ()

    def _read(self, resident: Resident, state: int, slot: Slot) -> Transfer:
        layout = resident.task.layout
        file = self._directory.chunk_path(slot, layout.file(state))
        for_host = not resident.task.runs_kernel
        return Transfer(resident.buffer, layout.extents[state], file, for_host)

    def _verify_read(self, resident: Resident, states: Loads) -> Loads:
        """Verifies states; returns those whose checksums the update computes."""
        unchecked = []
        for state, slot in states:
            checksum = self._kernel_checksum(resident, state)
            if checksum is None:
                unchecked.append((state, slot))
            else:
                self._chunks.verify_read(resident.task.layout, state, slot, checksum)
        return tuple(unchecked)

    def _compute(self, resident: Resident) -> None:
        """Runs the task's `compute`, and verifies the states that are not yet."""
        task, unchecked = resident.task, resident.unchecked
        layout = task.layout
        if not task.runs_kernel:  # the host is about to read them itself
            for state, slot in unchecked:
                checksum = self._checksum(resident, state)
                self._chunks.verify_read(layout, state, slot, checksum)
            unchecked = ()
        with span("update"):
            wanted = [state for state, _ in unchecked]
            csd = self._csds[layout.drive]
            checksums = task.compute(csd, resident.buffer, wanted) or {}
        for state, slot in unchecked:
            if state in checksums:
                self._chunks.verify_read(layout, state, slot, checksums[state])
            else:  # prefetched, and not used by the update
                assert (state, slot) not in task.loads
        for state in resident.deferred:
            checksum = self._checksum(resident, state)
            self._chunks.note_stored(layout, state, checksum, is_in_memory=True)

    def _write(self, resident: Resident, state: int) -> Transfer:
        layout = resident.task.layout
        if not resident.is_flushed:  # else it was noted when it was computed
            self._chunks.note_stored(layout, state, self._checksum(resident, state))
        file = self._chunks.prepare_write(layout, state)
        return Transfer(resident.buffer, layout.extents[state], file)

    def _kernel_checksum(self, resident: Resident, state: int) -> int | None:
        """Returns the checksum that a kernel of the drive has computed, if any."""
        layout = resident.task.layout
        with span("checksum"):
            csd = self._csds[layout.drive]
            return csd.checksum(resident.buffer, layout.extents[state])

    def _checksum(self, resident: Resident, state: int) -> int:
        """Returns a state's checksum; the host computes it if no kernel has."""
        checksum, layout = self._kernel_checksum(resident, state), resident.task.layout
        if checksum is None:
            with span("checksum"):
                view = self._csds[layout.drive].view
                checksum = crc32c(view(resident.buffer, layout.extents[state]))
        return checksum
