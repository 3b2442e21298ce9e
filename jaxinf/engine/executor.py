"""Executes units of work: reads states, computes tasks, writes states, with checksums.

Invariant: transfers are timed, and no result of state with a wrong checksum is stored
or returned.
"""

import contextlib
from collections.abc import Iterable, Sequence
from typing import Literal

from jaxinf.csd import Csd, Transfer
from jaxinf.engine.chunks import ChunkTable
from jaxinf.store import Slot, StoreDirectory
from jaxinf.transfer import (
    Compute,
    Failure,
    Limits,
    Load,
    Loads,
    Mover,
    Queues,
    Resident,
    Unit,
    Write,
    crc32c,
    span,
    timeline,
)


def make_mover(
    directory: StoreDirectory,
    chunks: ChunkTable,
    csds: Sequence[Csd],
    *,
    num_workers: int,
    num_kernels: int,
    failure: Failure,
) -> Mover:
    """Makes the mover of a store.

    Args:
      directory: the store's files.
      chunks: the slots to read and write, and the checksums.
      csds: the store's CSDs, by number.
      num_workers: number of requests that move bytes at once.
      num_kernels: number of tasks that compute at once; CSDs may allow fewer.
      failure: receives a task's error; once it is set, no more work is done.

    Raises:
      StoreError: the process can have no more threads.
    """
    queues = Queues(
        [(id(csd.memory), csd.is_host) for csd in csds],
        lambda task: csds[task.piece.drive].acquire(task.piece.num_bytes),
        Limits(num_workers, num_kernels),
    )
    roots = directory.manifest.csds or [str(directory.path)]
    executor = Executor(directory, chunks, csds)
    return Mover(directory.path, queues, executor.perform, failure, roots)


class Executor:
    """Executes units of work, and blocks meanwhile. Thread-safe."""

    def __init__(
        self,
        directory: StoreDirectory,
        chunks: ChunkTable,
        csds: Sequence[Csd],
    ) -> None:
        self._directory = directory
        self._chunks = chunks
        self._csds = csds
        self._drives = [str(directory.csd_directory(n)) for n in range(len(csds))]

    def perform(self, unit: Unit) -> Sequence[Loads]:
        """Executes a unit; of a load, returns what only the update can verify.

        Raises:
          StoreError: the drive failed, or a chunk is damaged.
          BaseException: any exception of a task's `compute`.
        """
        match unit:
            case Load(drive, items):
                reads = [
                    self._read(resident, state, slot)
                    for resident, states in items
                    for state, slot in states
                ]
                with self._span(drive, "read", reads, [r for r, _ in items]):
                    self._csds[drive].read(reads)
                return [self._check_read(*item) for item in items]
            case Compute(resident):
                self._compute(resident)
            case Write(drive, items):
                writes = [
                    self._write(resident, state)
                    for resident, states in items
                    for state in states
                ]
                with self._span(drive, "write", writes, [r for r, _ in items]):
                    self._csds[drive].write(writes)
        return ()

    def _read(self, resident: Resident, state: int, slot: Slot) -> Transfer:
        layout = resident.task.piece
        file = self._directory.chunk_file(slot, *layout.place(state))
        for_host = not resident.task.runs_kernel
        return Transfer(resident.buffer, layout.extents[state], file, for_host)

    def _check_read(self, resident: Resident, states: Loads) -> Loads:
        """Verifies states; returns those whose checksum the update tells."""
        layout = resident.task.piece
        csd, unchecked = self._csds[layout.drive], []
        for state, slot in states:
            with span("checksum"):
                checksum = csd.checksum(resident.buffer, layout.extents[state])
            if checksum is None:
                unchecked.append((state, slot))
            else:
                self._chunks.loaded(layout, state, slot, checksum)
        return tuple(unchecked)

    def _compute(self, resident: Resident) -> None:
        """Runs the task's `compute`, and verifies the remaining states."""
        task, unchecked = resident.task, resident.unchecked
        layout, csd = task.piece, self._csds[task.piece.drive]
        if not task.runs_kernel:  # the host is about to read them itself
            for state, slot in unchecked:
                with span("checksum"):
                    checksum = crc32c(csd.view(resident.buffer, layout.extents[state]))
                self._chunks.loaded(layout, state, slot, checksum)
            unchecked = ()
        what = self._leaves_of([resident])
        with span("update", what):
            wanted = [state for state, _ in unchecked]
            told = task.compute(csd, resident.buffer, wanted) or {}
        for state, slot in unchecked:
            if state in told:
                self._chunks.loaded(layout, state, slot, told[state])
            else:  # prefetched, but not used by the update
                assert (state, slot) not in task.loads
        for state in resident.deferred:
            checksum = self._checksum(resident, state)
            self._chunks.stored(layout, state, checksum, is_in_memory=True)

    def _write(self, resident: Resident, state: int) -> Transfer:
        layout = resident.task.piece
        if not resident.is_flushed:  # else that was noted when it was computed
            self._chunks.stored(layout, state, self._checksum(resident, state))
        file = self._chunks.prepare_write(layout, state)
        return Transfer(resident.buffer, layout.extents[state], file)

    def _checksum(self, resident: Resident, state: int) -> int:
        layout = resident.task.piece
        csd, extent = self._csds[layout.drive], layout.extents[state]
        with span("checksum"):
            checksum = csd.checksum(resident.buffer, extent)
            if checksum is None:  # no kernel has computed it
                checksum = crc32c(csd.view(resident.buffer, extent))
        return checksum

    def _span(
        self,
        csd: int,
        kind: Literal["read", "write"],
        transfers: Sequence[Transfer],
        residents: Iterable[Resident],
    ) -> contextlib.AbstractContextManager[None]:
        num_bytes = sum([transfer.extent.num_bytes for transfer in transfers])
        what = self._leaves_of(residents)
        return span(kind, what, drive=self._drives[csd], num_bytes=num_bytes)

    def _leaves_of(self, residents: Iterable[Resident]) -> str:
        """Names the leaves of subgroups while spans are recorded."""
        if not timeline.is_recording:
            return ""
        leaves = self._directory.manifest.leaves
        numbers = dict.fromkeys(one.task.piece.subgroup.leaf for one in residents)
        return ", ".join(leaves[number].name for number in numbers)
