"""The units of a task: load, compute, write, each with its checksums.

Invariant: what a unit moves is timed, and nothing is stored or returned of state whose
checksum is wrong.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from jaxinf.csd import Csd, CsdBuffer, Transfer
from jaxinf.engine.chunks import ChunkTable
from jaxinf.engine.pace import Pace
from jaxinf.engine.tasks import Task
from jaxinf.engine.timeline import Timeline
from jaxinf.io import crc32c
from jaxinf.store import Slot, StoreDirectory

__all__ = ["Load", "Loads", "Units", "Write"]

Loads: TypeAlias = tuple[tuple[int, Slot], ...]
"""States of a subgroup by number, each with the slot that it is read from."""


@dataclass(frozen=True)
class Load:
    """States that a task wants in its buffer."""

    task: Task
    buffer: CsdBuffer
    states: Loads


@dataclass(frozen=True)
class Write:
    """States that a task has left in its buffer, by number."""

    task: Task
    buffer: CsdBuffer
    states: Sequence[int]


class Units:
    """Performs units; thread-safe, several of one task too.

    Args:
      directory: where the chunk files are.
      chunks: which slots to write, and the checksums.
      csds: the store's CSDs, by number.
      pace: is told how long the CSDs take.
      timeline: is told when.
    """

    def __init__(
        self,
        directory: StoreDirectory,
        chunks: ChunkTable,
        csds: Sequence[Csd],
        pace: Pace,
        timeline: Timeline,
    ) -> None:
        self._directory = directory
        self._chunks = chunks
        self._csds = csds
        self._pace = pace
        self._timeline = timeline

    def load(self, loads: Sequence[Load]) -> list[Loads]:
        """Reads states of one CSD; of each load those that only the update can check.

        Raises:
          StoreError: the drive failed, or has not what was written.
        """
        transfers = [
            self._transfer(load.task, load.buffer, state, slot)
            for load in loads
            for state, slot in load.states
        ]
        if transfers:
            csd = loads[0].task.layout.subgroup.csd
            with self._request(csd, "read", transfers):
                self._csds[csd].read(transfers)
        return [self._check_loaded(load) for load in loads]

    def _check_loaded(self, load: Load) -> Loads:
        layout, csd = load.task.layout, self._csd(load.task)
        unchecked: list[tuple[int, Slot]] = []
        for state, slot in load.states:
            if self._chunks.is_checked(layout, state):
                with self._timeline.span("checksum"):
                    checksum = csd.checksum(load.buffer, layout.extents[state])
                if checksum is None:
                    unchecked.append((state, slot))
                else:
                    self._chunks.loaded(layout, state, slot, checksum)
        return tuple(unchecked)

    def compute(self, task: Task, buffer: CsdBuffer, unchecked: Loads) -> None:
        """Runs the task's `compute`, and checks what is not checked yet.

        Raises:
          BaseException: what `compute` raises.
          StoreCorruptError: a state is not what was written.
        """
        csd = self._csd(task)
        if not task.runs_kernel:
            self._check_on_host(task, buffer, unchecked)
            unchecked = ()
        with (
            self._pace.request(task.layout.subgroup.csd, "update"),
            self._timeline.span("update"),
        ):
            checksums = task.compute(csd, buffer) or {}
        self._check_told(task, unchecked, checksums)

    def write(self, writes: Sequence[Write]) -> None:
        """Writes states of one CSD to the slot that the step builds.

        Raises:
          StoreError: the drive failed.
        """
        csd = writes[0].task.layout.subgroup.csd
        transfers: list[Transfer] = []
        for write in writes:
            layout = write.task.layout
            for state in write.states:
                extent = layout.extents[state]
                with self._timeline.span("checksum"):
                    checksum = self._csds[csd].checksum(write.buffer, extent)
                    if checksum is None:  # no kernel has passed over it
                        checksum = crc32c(self._csds[csd].view(write.buffer, extent))
                self._chunks.stored(layout, state, checksum)
                file = self._chunks.prepare_write(layout, state)
                transfers.append(Transfer(write.buffer, extent, file))
        with self._request(csd, "write", transfers):
            self._csds[csd].write(transfers)

    def _transfer(
        self, task: Task, buffer: CsdBuffer, state: int, slot: Slot
    ) -> Transfer:
        file = self._directory.chunk_file(slot, *task.layout.place(state))
        return Transfer(buffer, task.layout.extents[state], file)

    @contextlib.contextmanager
    def _request(
        self, csd: int, kind: Literal["read", "write"], transfers: Sequence[Transfer]
    ) -> Iterator[None]:
        lengths = [transfer.extent.num_bytes for transfer in transfers]
        with self._pace.request(csd, kind, lengths), self._timeline.span(kind):
            yield

    def _csd(self, task: Task) -> Csd:
        return self._csds[task.layout.subgroup.csd]

    def _check_on_host(self, task: Task, buffer: CsdBuffer, states: Loads) -> None:
        """Takes checksums of what the host is about to read itself."""
        layout, csd = task.layout, self._csd(task)
        for state, slot in states:
            with self._timeline.span("checksum"):
                checksum = crc32c(csd.view(buffer, layout.extents[state]))
            self._chunks.loaded(layout, state, slot, checksum)

    def _check_told(
        self, task: Task, states: Loads, checksums: Mapping[int, int]
    ) -> None:
        """Compares what a kernel says that it read, before anything comes of it."""
        for state, slot in states:
            if state in checksums:
                self._chunks.loaded(task.layout, state, slot, checksums[state])
            else:  # read ahead, and not used after all
                assert (state, slot) not in task.loads
