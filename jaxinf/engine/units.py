"""The units of a task: load, compute, write, each with its checksums.

Invariant: what a unit moves is timed, and nothing is stored or returned of state whose
checksum is wrong.
"""

from collections.abc import Mapping, Sequence
from typing import TypeAlias

from jaxinf.csd import Csd, CsdBuffer
from jaxinf.engine.chunks import ChunkTable
from jaxinf.engine.pace import Pace
from jaxinf.engine.tasks import Task
from jaxinf.engine.timeline import Timeline
from jaxinf.io import crc32c
from jaxinf.store import Slot, StoreDirectory

__all__ = ["Loads", "Units"]

Loads: TypeAlias = tuple[tuple[int, Slot], ...]
"""States of a subgroup by number, each with the slot that it is read from."""


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

    def load(self, task: Task, buffer: CsdBuffer, loads: Loads) -> Loads:
        """Reads states; those of them that only the update can check.

        Raises:
          StoreError: the drive failed, or has not what was written.
        """
        layout, csd = task.layout, self._csd(task)
        unchecked: list[tuple[int, Slot]] = []
        for state, slot in loads:
            file = self._directory.chunk_file(slot, *layout.place(state))
            extent = layout.extents[state]
            with (
                self._pace.request(layout.subgroup.csd, "read", extent.num_bytes),
                self._timeline.span("read"),
            ):
                csd.read(buffer, extent, file)
            if self._chunks.is_checked(layout, state):
                with self._timeline.span("checksum"):
                    checksum = csd.checksum(buffer, extent)
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

    def write(self, task: Task, buffer: CsdBuffer, state: int) -> None:
        """Writes a state to the slot that the step builds.

        Raises:
          StoreError: the drive failed.
        """
        layout, csd = task.layout, self._csd(task)
        extent = layout.extents[state]
        with self._timeline.span("checksum"):
            checksum = csd.checksum(buffer, extent)
            if checksum is None:  # no kernel has passed over it
                checksum = crc32c(csd.view(buffer, extent))
        self._chunks.stored(layout, state, checksum)
        file = self._chunks.prepare_write(layout, state)
        with (
            self._pace.request(layout.subgroup.csd, "write", extent.num_bytes),
            self._timeline.span("write"),
        ):
            csd.write(buffer, extent, file)

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
