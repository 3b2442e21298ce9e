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
from jaxinf.csd.host_kernels import kernel_states, run_update
from jaxinf.errors import CsdError, UnsupportedTransformError
from jaxinf.kernels import Checksums, compiled, stored_arrays
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

    @property
    def num_parallel_updates(self) -> int:
        return len(os.sched_getaffinity(0))

    def limit_memory(self, num_bytes: int) -> None:
        self._pool.resize(num_bytes)

    def check(self, needs: Sequence[KernelNeed]) -> None:
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
        self._pool.close()


@dataclass(eq=False, slots=True)
class _HostBuffer:
    """Memory, with the known checksums of the extents in it.

    Attributes:
      checksums: By offset; None for a state that was read and not updated since.
    """

    memory: Buffer
    checksums: dict[int, int | None] = field(default_factory=dict)

    def release(self) -> None:
        self.memory.release()


class HostCsd:
    """See `jaxinf.csd.Csd`; CSDs of one store share `memory`. Thread-safe."""

    is_host = True

    def __init__(self, memory: BufferPool, meters: ByteMeters) -> None:
        self.memory = memory
        self._meters = meters
        native.load()  # compiles it now if it is not in the cache

    def acquire(self, num_bytes: int) -> CsdBuffer | None:
        """Returns a page-aligned buffer, or None if the budget has no room now."""
        memory = self.memory.try_acquire(num_bytes)
        return None if memory is None else _HostBuffer(memory)

    def read(self, transfers: Sequence[Transfer]) -> None:
        """Drive → buffers."""
        self._move(transfers, writes=False)
        for buffer, extent, *_ in transfers:
            _host_buffer(buffer).checksums[extent.buffer_offset_bytes] = None

    def write(self, transfers: Sequence[Transfer]) -> None:
        """Buffers → drive, with zeros behind each state in its last page."""
        self._move(transfers, writes=True)

    def _move(self, transfers: Sequence[Transfer], *, writes: bool) -> None:
        """Moves transfers by one native call, and singly those that it leaves."""
        places = array("q")
        for buffer, extent, *_ in transfers:
            address = _host_buffer(buffer).memory.address + extent.buffer_offset_bytes
            places.extend((address, extent.file_offset_bytes, extent.num_bytes))
        files = [transfer.file for transfer in transfers]
        moved_bytes = native.move_many(files, places, writes=writes)
        meter = "drive_write_bytes" if writes else "drive_read_bytes"
        self._meters.add(**{meter: sum([n for n in moved_bytes if n > 0])})
        move_one = write_from if writes else read_into
        for transfer, num_bytes in zip(transfers, moved_bytes, strict=True):
            if num_bytes < 0:
                place = transfer.extent.file_offset_bytes, transfer.extent.num_bytes
                move_one(transfer.file, _pages(transfer), *place, meters=self._meters)

    def checksum(self, buffer: CsdBuffer, extent: Extent) -> int | None:
        """Returns the checksum from the last update or computes it; None after a read.

        A separate pass would cost more than the kernel, since memory limits both.
        """
        checksums = _host_buffer(buffer).checksums
        if extent.buffer_offset_bytes not in checksums:
            return crc32c(self.view(buffer, extent))
        return checksums[extent.buffer_offset_bytes]

    def update(self, buffer: CsdBuffer, update: Update) -> UpdateOutcome:
        """Runs the kernel on this thread; computes checksums in the same pass."""
        extents = update.extents
        wanted = [n in update.wanted_checksums for n in range(len(extents))]
        wanted[0] |= update.caller_params is not None
        views = [self.view(buffer, extent) for extent in extents]
        states = kernel_states(views, extents, update.rounding)
        names = "params", *update.kernel.slots
        are_written = [
            name not in update.kernel.unchanged
            for name, state in zip(names, states, strict=True)
            for _ in stored_arrays([state])
        ]
        checksums = Checksums(wants_before=wanted, wants_after=are_written)
        is_finite = run_update(states, update, checksums)
        _host_buffer(buffer).checksums = {
            extent.buffer_offset_bytes: checksum
            for extent, checksum, is_written in zip(
                extents, checksums.after, are_written, strict=True
            )
            if is_written
        }
        before = checksums.before
        return UpdateOutcome(
            is_finite, {n: before[n] for n, is_wanted in enumerate(wanted) if is_wanted}
        )

    def view(self, buffer: CsdBuffer, extent: Extent) -> Array:
        """Returns the buffer's own memory as an array of the extent's dtype."""
        start = extent.buffer_offset_bytes
        memory = _host_buffer(buffer).memory.array[start : start + extent.num_bytes]
        return memory.view(extent.dtype)

    def put(self, buffer: CsdBuffer, extent: Extent, values: Array) -> None:
        """Copies values into the buffer's own memory."""
        self.view(buffer, extent)[...] = values
        _host_buffer(buffer).checksums.pop(extent.buffer_offset_bytes, None)


def _host_buffer(buffer: CsdBuffer) -> _HostBuffer:
    assert isinstance(buffer, _HostBuffer)
    return buffer


def _pages(transfer: Transfer) -> Array:
    """Returns the whole pages of the transfer's extent in its buffer."""
    start = transfer.extent.buffer_offset_bytes
    stop = start + page_ceil(transfer.extent.num_bytes)
    return _host_buffer(transfer.buffer).memory.array[start:stop]
