"""Executes units of work: loads states, computes tasks, writes states, with checksums.

Invariant: transfers are timed, and no result of state with a wrong checksum is stored
or returned.
"""

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal

from jaxinf.csd import Csd, CsdBuffer, Transfer
from jaxinf.engine.chunks import ChunkTable
from jaxinf.store import Slot, StoreDirectory
from jaxinf.transfer import (
    Compute,
    DriveMonitor,
    Failure,
    Limits,
    Load,
    Loads,
    Mover,
    Queues,
    Resident,
    Task,
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
    monitor = DriveMonitor(directory.manifest.csds or [str(directory.path)])
    executor = Executor(directory, chunks, csds, monitor)
    return Mover(directory.path, queues, executor.perform, failure, monitor)


class Executor:
    """Executes units of work, and blocks meanwhile. Thread-safe.

    Args:
      chunks: the slots to write, and the checksums.
    """

    def __init__(
        self,
        directory: StoreDirectory,
        chunks: ChunkTable,
        csds: Sequence[Csd],
        monitor: DriveMonitor,
    ) -> None:
        self._directory = directory
        self._chunks = chunks
        self._csds = csds
        self._monitor = monitor
        self._drives = [str(directory.csd_directory(n)) for n in range(len(csds))]

    def perform(self, unit: Unit) -> Sequence[Loads]:
        """Executes a unit; for a load, returns the result of `load`.

        Raises:
          BaseException: as `load`, `compute` and `write`.
        """
        match unit:
            case Load():
                return self.load(unit)
            case Compute():
                self.compute(unit)
            case Write():
                self.write(unit)
        return ()

    # --- load ----------------------------------------------------------------------

    def load(self, load: Load) -> list[Loads]:
        """Reads states; returns, by subgroup, those that only the update can verify.

        Raises:
          StoreError: the drive failed, or a chunk is damaged.
        """
        transfers = [
            self._source(resident, state, slot)
            for resident, states in load.items
            for state, slot in states
        ]
        found = [resident for resident, _ in load.items]
        with self._request(load.drive, "read", transfers, found):
            self._csds[load.drive].read(transfers)
        return [self._check_loaded(*item) for item in load.items]

    def _source(self, resident: Resident, state: int, slot: Slot) -> Transfer:
        layout = resident.task.piece
        file = self._directory.chunk_file(slot, *layout.place(state))
        for_host = not resident.task.runs_kernel
        return Transfer(resident.buffer, layout.extents[state], file, for_host)

    def _check_loaded(self, resident: Resident, states: Loads) -> Loads:
        layout, csd = resident.task.piece, self._csds[resident.task.piece.drive]
        unchecked: list[tuple[int, Slot]] = []
        for state, slot in states:
            with span("checksum"):
                checksum = csd.checksum(resident.buffer, layout.extents[state])
            if checksum is None:
                unchecked.append((state, slot))
            else:
                self._chunks.loaded(layout, state, slot, checksum)
        return tuple(unchecked)

    # --- compute -------------------------------------------------------------------

    def compute(self, compute: Compute) -> None:
        """Runs the task's `compute`, and verifies the remaining states.

        Raises:
          BaseException: any exception of `compute`.
          StoreCorruptError: a state is damaged.
        """
        resident = compute.resident
        task, unchecked = resident.task, resident.unchecked
        csd = self._csds[task.piece.drive]
        if not task.runs_kernel:
            self._check_on_host(csd, task, resident.buffer, unchecked)
            unchecked = ()
        what = self._leaves_of([resident])
        with self._monitor.request(task.piece.drive, "update"), span("update", what):
            wanted = [state for state, _ in unchecked]
            checksums = task.compute(csd, resident.buffer, wanted) or {}
        self._check_told(task, unchecked, checksums)
        for state in resident.deferred:
            checksum = self._checksum(resident, state)
            self._chunks.stored(task.piece, state, checksum, is_in_memory=True)

    def _check_on_host(
        self, csd: Csd, task: Task, buffer: CsdBuffer, states: Loads
    ) -> None:
        """Verifies states that the host is about to read itself."""
        for state, slot in states:
            with span("checksum"):
                checksum = crc32c(csd.view(buffer, task.piece.extents[state]))
            self._chunks.loaded(task.piece, state, slot, checksum)

    def _check_told(
        self, task: Task, states: Loads, checksums: Mapping[int, int]
    ) -> None:
        """Verifies the checksums from a kernel, before its results are used."""
        for state, slot in states:
            if state in checksums:
                self._chunks.loaded(task.piece, state, slot, checksums[state])
            else:  # prefetched, but not used by the update
                assert (state, slot) not in task.loads

    # --- write ---------------------------------------------------------------------

    def write(self, write: Write) -> None:
        """Writes states to the slot that the step builds.

        Raises:
          StoreError: the drive failed.
        """
        transfers = [
            self._target(resident, state)
            for resident, states in write.items
            for state in states
        ]
        found = [resident for resident, _ in write.items]
        with self._request(write.drive, "write", transfers, found):
            self._csds[write.drive].write(transfers)

    def _target(self, resident: Resident, state: int) -> Transfer:
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

    @contextlib.contextmanager
    def _request(
        self,
        csd: int,
        kind: Literal["read", "write"],
        transfers: Sequence[Transfer],
        residents: Iterable[Resident],
    ) -> Iterator[None]:
        lengths = [transfer.extent.num_bytes for transfer in transfers]
        place = {"drive": self._drives[csd], "num_bytes": sum(lengths)}
        what = self._leaves_of(residents)
        with self._monitor.request(csd, kind, lengths), span(kind, what, **place):
            yield

    def _leaves_of(self, residents: Iterable[Resident]) -> str:
        """Names the leaves of subgroups while spans are recorded."""
        if not timeline.is_recording:
            return ""
        leaves = self._directory.manifest.leaves
        numbers = dict.fromkeys(one.task.piece.subgroup.leaf for one in residents)
        return ", ".join(leaves[number].name for number in numbers)
