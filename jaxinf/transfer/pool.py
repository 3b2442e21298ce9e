"""Page-aligned buffers under a hard budget: the only memory that state passes through.

Buffers lie in huge pages if the system has them, and short ones of one length side by
side. Direct I/O then describes a request by a few runs of physical memory, and not by
one for each page, which takes the kernel and the drive several times less work.

Invariant: memory that is lent or kept for reuse never exceeds the capacity.
"""

import contextlib
import math
import mmap
import threading
import warnings
from collections import Counter
from typing import Any

import numpy as np

from jaxinf.errors import StoreClosedError
from jaxinf.typing import Array

PAGE_BYTES = 4096
"""Unit of direct I/O: of file offsets, buffer addresses and lengths."""

_HUGE_BYTES = 2 << 20
"""A huge page, on x86-64 and most of AArch64; elsewhere the hint has no effect."""

_LONG_BYTES, _HUGE_SHARE = 2 * _HUGE_BYTES, 8
"""A buffer of this length gets whole huge pages if these add at most an eighth."""

_SLAB_BYTES = 8 << 20
"""Limit of the length of buffers that are mapped together."""


def page_floor(num_bytes: int) -> int:
    """Rounds down to whole pages."""
    return num_bytes - num_bytes % PAGE_BYTES


def page_ceil(num_bytes: int) -> int:
    """Rounds up to whole pages."""
    return num_bytes + -num_bytes % PAGE_BYTES


def huge_page_ceil(num_bytes: int) -> int:
    """Rounds up to whole pages; a long buffer to huge ones, if that adds little.

    Then buffers of nearly one length share their memory, and none ends in short pages,
    which direct I/O moves slowly: 8 MiB take a fifth less time. The result for up to
    `huge_page_floor(n)` bytes is at most n.
    """
    longer = num_bytes + -num_bytes % _HUGE_BYTES
    adds_little = (longer - num_bytes) * _HUGE_SHARE <= num_bytes
    is_long = num_bytes >= _LONG_BYTES and adds_little
    return longer if is_long else page_ceil(num_bytes)


def huge_page_floor(num_bytes: int) -> int:
    """Rounds down to whole huge pages; a short buffer to whole pages."""
    unit = _HUGE_BYTES if num_bytes >= _LONG_BYTES else PAGE_BYTES
    return num_bytes - num_bytes % unit


class Buffer:
    """Page-aligned memory lent by a `BufferPool`; also a context manager.

    Its contents are arbitrary. After `release` the memory belongs to the next user, and
    views of `array` must no longer be used.

    Attributes:
      num_bytes: Length in bytes: the requested one, rounded up to whole pages.
      array: The memory, `uint8[num_bytes]`, writable; there until the release.
      address: The address of the array, also until the release.
    """

    __slots__ = ("_mapping", "_pool", "address", "array", "num_bytes")

    def __init__(self, pool: "BufferPool", mapping: "_Mapping") -> None:
        self._pool = pool
        self._mapping: _Mapping | None = mapping
        self.array, self.address = mapping.array, mapping.address
        self.num_bytes = mapping.array.nbytes

    def release(self) -> None:
        """Gives the memory back to the pool. Idempotent; thread-safe."""
        self._pool._take_back(self)

    def __enter__(self) -> "Buffer":
        return self

    def __exit__(self, *error: object) -> None:
        self.release()


class BufferPool:
    """Buffers of any length under one byte budget. Thread-safe.

    A request that fits is served before an older one that does not, so that a thread
    which holds buffers is never stuck behind one that waits for them. The pool does not
    detect threads that wait for each other: take one large buffer for a unit of work.

    Args:
      capacity_bytes: The budget, rounded down to whole pages; at least one.
      registry: Registers all memory as long as the pool has it, by `dma_map(address,
        size)` and `dma_unmap(address)`; memory that it refuses, by a RuntimeError, is
        lent all the same, with a warning.

    Attributes:
      used_bytes: Length of the buffers that are lent now.
    """

    def __init__(self, capacity_bytes: int, *, registry: Any = None) -> None:
        self.capacity_bytes = max(PAGE_BYTES, page_floor(capacity_bytes))
        self._changed = threading.Condition()
        self._registry = registry
        self._idle: dict[int, list[_Mapping]] = {}
        self._idle_bytes = 0
        self._num_mapped: Counter[int] = Counter()  # by length
        self.used_bytes = self.peak_bytes = 0
        self._is_closed = False

    def acquire(self, num_bytes: int) -> Buffer:
        """Lends a buffer of whole pages, at least one; waits until there is room.

        Raises:
          ValueError: If the request is above the capacity.
          StoreClosedError: If the pool is closed, before or during the wait.
        """
        with self._changed:
            while (buffer := self.try_acquire(num_bytes)) is None:
                self._changed.wait()
            return buffer

    def try_acquire(self, num_bytes: int) -> Buffer | None:
        """As `acquire`, but returns None instead of waiting."""
        rounded = page_ceil(max(num_bytes, 1))
        if num_bytes > self.capacity_bytes:
            raise ValueError(
                f"buffer pool: a buffer of {num_bytes} bytes can never be lent from a "
                f"budget of {self.capacity_bytes}; raise memory_bytes to at least "
                f"{rounded}, or make the subgroups smaller"
            )
        with self._changed:
            if self._is_closed:
                raise StoreClosedError(
                    f"buffer pool: closed while {rounded} bytes were asked for; open "
                    "the store again"
                )
            fits = rounded <= self.capacity_bytes - self.used_bytes
            return self._lend(rounded) if fits else None

    def resize(self, capacity_bytes: int) -> None:
        """Sets the budget anew; buffers lent beyond it stay until their release."""
        with self._changed:
            self.capacity_bytes = max(PAGE_BYTES, page_floor(capacity_bytes))
            self._shrink_idle(max(0, self.capacity_bytes - self.used_bytes))
            self._changed.notify_all()

    def free_idle(self) -> None:
        """Frees the memory of buffers that are not lent."""
        with self._changed:
            self._shrink_idle(0)

    def close(self) -> None:
        """Frees idle memory and fails all waiters, present and future; idempotent.

        Buffers still lent stay valid; their memory is freed at their release.
        """
        with self._changed:
            self._is_closed = True
            self._shrink_idle(0)
            self._changed.notify_all()

    def _lend(self, num_bytes: int) -> Buffer:
        if not self._idle.get(num_bytes):
            self._shrink_idle(self.capacity_bytes - self.used_bytes - num_bytes)
            self._map(num_bytes)
        mapping = self._idle[num_bytes].pop()
        self._idle_bytes -= num_bytes
        self.used_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)
        return Buffer(self, mapping)

    def _map(self, num_bytes: int) -> None:
        """Maps a buffer, and beside it as many as are mapped, if there is room."""
        room_bytes = self.capacity_bytes - self.used_bytes - self._idle_bytes
        limits = self._num_mapped[num_bytes], _SLAB_BYTES // num_bytes
        slab = _map_slab(num_bytes, max(1, min(*limits, room_bytes // num_bytes)))
        if self._registry is not None:
            for mapping in slab:
                mapping.register(self._registry)
        self._idle.setdefault(num_bytes, []).extend(slab)
        self._idle_bytes += num_bytes * len(slab)
        self._num_mapped[num_bytes] += len(slab)

    def _take_back(self, buffer: Buffer) -> None:
        with self._changed:
            mapping, buffer._mapping = buffer._mapping, None
            if mapping is None:
                return
            del buffer.array, buffer.address  # a later use of them is an error
            self.used_bytes -= buffer.num_bytes
            self._idle.setdefault(buffer.num_bytes, []).append(mapping)
            self._idle_bytes += buffer.num_bytes
            limit_bytes = max(0, self.capacity_bytes - self.used_bytes)
            self._shrink_idle(0 if self._is_closed else limit_bytes)
            self._changed.notify_all()

    def _shrink_idle(self, limit_bytes: int) -> None:
        """Unmaps idle memory down to the limit, shortest buffers last."""
        while self._idle_bytes > limit_bytes:
            num_bytes = max(n for n, mappings in self._idle.items() if mappings)
            self._idle[num_bytes].pop().free()
            self._idle_bytes -= num_bytes
            self._num_mapped[num_bytes] -= 1


class _Mapping:
    """A part of a memory mapping, in whole pages, that is lent repeatedly."""

    __slots__ = ("_memory", "_registry", "_start", "address", "array")

    def __init__(self, memory: mmap.mmap, start: int, num_bytes: int) -> None:
        self._memory, self._start = memory, start
        self._registry: Any = None
        everything = np.frombuffer(memory, np.uint8)
        self.array: Array = everything[start : start + num_bytes]
        self.address: int = self.array.ctypes.data

    def register(self, registry: Any) -> None:
        """Registers the memory until it is freed; warns if that is refused."""
        try:
            registry.dma_map(self.address, self.array.nbytes)
        except RuntimeError as error:
            warnings.warn(
                f"{self.array.nbytes} bytes of the host could not be registered for a "
                f"device's copies: {error}; they are copied once more on their way, "
                "in pinned memory beside memory_bytes. Raise the limit of locked "
                "memory (ulimit -l), or give less memory",
                stacklevel=2,
            )
        else:
            self._registry = registry

    def free(self) -> None:
        """Returns the pages to the system; they must not be lent."""
        if self._registry is not None:
            self._registry.dma_unmap(self.address)
        num_bytes = self.array.nbytes
        del self.array
        try:
            self._memory.close()
        except BufferError:
            # Another part, or a view of a released buffer, is alive, and the mapping
            # must outlive it. These pages are freed now: such a view reads zeros.
            self._memory.madvise(mmap.MADV_DONTNEED, self._start, num_bytes)


def allocate_pages(num_bytes: int) -> Array:
    """Returns whole pages of zeros, `uint8`, beside all pools.

    The system gets them back as soon as no view of them is left.
    """
    (mapping,) = _map_slab(max(page_ceil(num_bytes), PAGE_BYTES), 1)
    return mapping.array


def allocate_array(shape: tuple[int, ...], dtype: np.dtype) -> Array:
    """Returns zeros in whole pages, which JAX takes without a copy on a CPU."""
    num_bytes = math.prod(shape) * dtype.itemsize
    return allocate_pages(num_bytes)[:num_bytes].view(dtype).reshape(shape)


def _map_slab(num_bytes: int, num_parts: int) -> list[_Mapping]:
    memory = _map(num_bytes * num_parts)
    first = _aligned_start(memory)
    starts = range(first, first + num_bytes * num_parts, num_bytes)
    return [_Mapping(memory, start, num_bytes) for start in starts]


def _map(num_bytes: int) -> mmap.mmap:
    """Maps new memory; a long one gets untouched room to start on a huge page."""
    is_long = num_bytes >= _HUGE_BYTES
    # Private, since MADV_DONTNEED frees no pages of a shared mapping.
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    memory = mmap.mmap(-1, num_bytes + is_long * _HUGE_BYTES, flags=flags)
    if is_long and hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them
            # Whole huge pages only, so that no memory beyond the request is used.
            whole_bytes = num_bytes - num_bytes % _HUGE_BYTES
            memory.madvise(mmap.MADV_HUGEPAGE, _aligned_start(memory), whole_bytes)
    return memory


def _aligned_start(memory: mmap.mmap) -> int:
    """Returns the start of a buffer in its mapping; 0 for a short one."""
    if len(memory) < 2 * _HUGE_BYTES:
        return 0
    return -np.frombuffer(memory, np.uint8).ctypes.data % _HUGE_BYTES
