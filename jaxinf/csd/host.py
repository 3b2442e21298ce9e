"""The CSD that every machine has: a directory on a drive and the host's CPU beside it.

Invariant: chunks go by direct I/O between the drive and budgeted, page-aligned buffers,
and are updated there in place. Many short transfers are one native call, which releases
the GIL once for all; effects, errors and counted bytes are those of single ones.
"""

import os
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from jaxinf.csd.base import (
    CsdBuffer,
    Extent,
    KernelNeed,
    Transfer,
    Update,
    UpdateOutcome,
)
from jaxinf.csd.host_kernels import run_update, states_as_slots
from jaxinf.errors import CsdError, UnsupportedTransformError
from jaxinf.kernels import Passage, compiled
from jaxinf.native import transfers as native
from jaxinf.transfer import (
    Buffer,
    BufferPool,
    ByteMeters,
    crc32c,
    page_ceil,
    read_into,
    write_from,
)
from jaxinf.typing import Array


class HostFleet:
    """See `jaxinf.csd.CsdFleet`: CSDs that share one budget of host memory."""

    def __init__(self, memory_bytes: int, meters: ByteMeters) -> None:
        self._pool = BufferPool(memory_bytes)
        self._meters = meters

    @property
    def peak_bytes(self) -> int:
        return self._pool.peak_bytes

    def limit_memory(self, num_bytes: int) -> None:
        """Limits all buffers together; buffers that are lent stay."""
        self._pool.resize(num_bytes)

    @property
    def num_kernels(self) -> int:
        return len(os.sched_getaffinity(0))

    def check(self, needs: Sequence[KernelNeed]) -> None:
        """Finds or compiles every leaf's kernel.

        Raises:
          CsdError: there is no compiler for a kernel that is not the package's.
          UnsupportedTransformError: a kernel has no C++.
        """
        for need in needs:
            try:
                compiled(need.kernel)
            except (CsdError, UnsupportedTransformError) as error:
                raise type(error)(f"leaf {need.leaf}: {error}") from error

    def check_buffer(self, num_bytes: int, num_elements: int) -> None:
        """Accepts all lengths; the engine has cut subgroups to the budget."""

    def attach(
        self, directories: Sequence[Path], buffer_bytes: int, num_elements: int
    ) -> "Sequence[HostCsd]":
        del buffer_bytes, num_elements
        return [HostCsd(self._pool, self._meters) for _ in directories]

    def close(self) -> None:
        """Frees the buffers."""
        self._pool.close()


@dataclass(eq=False, slots=True)
class _HostBuffer:
    """Memory, with the known checksums of the extents in it.

    Attributes:
      known: by offset, the checksum from the last update; None for state read since.
    """

    memory: Buffer
    known: dict[int, int | None] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        return self.memory.num_bytes

    def release(self) -> None:
        self.memory.release()


class HostCsd:
    """See `jaxinf.csd.Csd`. Thread-safe.

    Args:
      memory: where buffers come from; CSDs of one store share it.
      meters: counts the drive's bytes.
    """

    is_host = True

    def __init__(self, memory: BufferPool, meters: ByteMeters) -> None:
        self.memory = memory
        self._meters = meters
        native.function()  # compiles it now if it is not in the cache

    def acquire(self, num_bytes: int) -> CsdBuffer | None:
        """Returns a page-aligned buffer, or None if the budget has no room now."""
        memory = self.memory.try_acquire(num_bytes)
        return None if memory is None else _HostBuffer(memory)

    def read(self, transfers: Sequence[Transfer]) -> None:
        """Drive → buffers."""
        for transfer in self._unusual(transfers, writes=False):
            read_into(*_request(transfer), meters=self._meters)
        for buffer, extent, *_ in transfers:
            _own(buffer).known[extent.buffer_offset_bytes] = None

    def write(self, transfers: Sequence[Transfer]) -> None:
        """Buffers → drive, with zeros behind each state in its last page."""
        for transfer in self._unusual(transfers, writes=True):
            write_from(*_request(transfer), meters=self._meters)

    def _unusual(
        self, transfers: Sequence[Transfer], *, writes: bool
    ) -> Sequence[Transfer]:
        """Moves transfers by the native call; returns those that it leaves."""
        places = array("q")
        for buffer, extent, *_ in transfers:
            address = _own(buffer).memory.address + extent.buffer_offset_bytes
            places.extend((address, extent.file_offset_bytes, extent.num_bytes))
        done = native.move([one.file for one in transfers], places, writes=writes)
        if done is None:
            return transfers
        way = "drive_write_bytes" if writes else "drive_read_bytes"
        self._meters.add(**{way: sum([n for n in done if n > 0])})
        return [one for one, n in zip(transfers, done, strict=True) if n < 0]

    def checksum(self, buffer: CsdBuffer, extent: Extent) -> int | None:
        """Returns the checksum from the last update or computes it; None after a read.

        A separate pass would cost more than the kernel, since memory limits both.
        """
        known, place = _own(buffer).known, extent.buffer_offset_bytes
        if place not in known:
            return crc32c(self.view(buffer, extent))
        return known[place]

    def update(self, buffer: CsdBuffer, update: Update) -> UpdateOutcome:
        """Runs the kernel on this thread; checksums, too, in the same pass."""
        extents, given, own = update.extents, update.given, _own(buffer)
        reads = [number in update.tells for number in range(len(extents))]
        reads[0] |= given is not None
        passage = Passage(given, reads=reads, writes=_written(update))
        views = [self.view(own, extent) for extent in extents]
        states = states_as_slots(views, extents, update.rounding)
        is_finite = run_update(states, update, passage)
        own.known = {
            extent.buffer_offset_bytes: checksum
            for extent, checksum, is_written in zip(
                extents, passage.written, passage.writes, strict=True
            )
            if is_written
        }
        read = passage.read
        return UpdateOutcome(
            is_finite, {n: read[n] for n, is_wanted in enumerate(reads) if is_wanted}
        )

    def view(self, buffer: CsdBuffer, extent: Extent) -> Array:
        """Returns the buffer's own memory as an array of the extent's dtype."""
        start = extent.buffer_offset_bytes
        memory = _own(buffer).memory.array[start : start + extent.num_bytes]
        return memory.view(extent.dtype)

    def put(
        self,
        buffer: CsdBuffer,
        extent: Extent,
        values: Array,
    ) -> None:
        """Copies values into the buffer's own memory."""
        self.view(buffer, extent)[...] = values
        _own(buffer).known.pop(extent.buffer_offset_bytes, None)


def _written(update: Update) -> list[bool]:
    kernel, result = update.kernel, list[bool]()
    names = iter(("params", *kernel.slots))
    for extent in update.extents:
        is_beside = extent.codec in ("scale", "remainder")
        result.append(result[-1] if is_beside else next(names) not in kernel.unchanged)
    return result


def _own(buffer: CsdBuffer) -> _HostBuffer:
    assert isinstance(buffer, _HostBuffer)
    return buffer


def _request(transfer: Transfer) -> tuple[Path, Array, int, int]:
    buffer, extent, file, _ = transfer
    first = extent.buffer_offset_bytes
    memory = _own(buffer).memory.array[first : first + page_ceil(extent.num_bytes)]
    return file, memory, extent.file_offset_bytes, extent.num_bytes
