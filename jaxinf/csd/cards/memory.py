"""Buffers in the memory of a card: allocated once, lent again and again.

Invariant: buffers take no more memory than the card has or the store's limit allows.
"""

import threading
from dataclasses import dataclass, field

import numpy as np

from jaxinf.csd.base import Extent
from jaxinf.csd.cards.xrt import DEVICE_BYTES, NoCardMemory, XrtBuffer, XrtCard
from jaxinf.kernels import ESTIMATES_BYTES, rsqrt_estimates
from jaxinf.transfer import PAGE_BYTES, page_ceil
from jaxinf.typing import Array

_TABLE_BYTES = page_ceil(ESTIMATES_BYTES)
BUFFERS_BYTES = DEVICE_BYTES - _TABLE_BYTES
"""The part of a card's memory that the table of estimates leaves for buffers."""

_WIDEST_BYTES = 4  # a float32 element of a gradient or a result
_NUM_DENSE = 3  # gradient, positions, result: each on the card and mapped on the host


class CardMemory:
    """A card's buffers: as many as fit, each long enough for the longest subgroup.

    They are allocated once, because a card's memory is fixed and mapping takes long. If
    the card gives no more memory, the existing buffers must suffice.

    Args:
      limit_bytes: Limit for all buffers, with the host's memory beside them: state that
        it reads, gradients and results.
    """

    def __init__(
        self, card: XrtCard, state_bytes: int, *, num_elements: int, limit_bytes: int
    ) -> None:
        self._card = card
        self._state_bytes = max(PAGE_BYTES, state_bytes)
        self._dense_bytes = _dense_bytes(num_elements)
        self._buffer_bytes = card_buffer_bytes(state_bytes, num_elements)
        num_fitting = BUFFERS_BYTES // self._buffer_bytes
        num_allowed = max(1, limit_bytes // self._buffer_bytes)
        self._num_unallocated = min(num_fitting, num_allowed)
        self._estimates: XrtBuffer | None = None
        self._idle: list[CardBuffer] = []
        self._is_closed = False
        self._lock = threading.Lock()
        self._num_lent = self._peak_lent = 0

    @property
    def used_bytes(self) -> int:
        return self._num_lent * self._buffer_bytes

    @property
    def peak_bytes(self) -> int:
        return self._peak_lent * self._buffer_bytes

    def acquire(self, num_bytes: int) -> "CardBuffer | None":
        """Returns a free buffer or None; refuses a card without room for one."""
        assert num_bytes <= self._state_bytes
        with self._lock:
            buffer = self._idle.pop() if self._idle else self._allocate_if_room()
            if buffer is None:
                return None
            self._num_lent += 1
            self._peak_lent = max(self._peak_lent, self._num_lent)
            buffer.is_lent = True
            buffer.checksums.clear()
            return buffer

    def take_back(self, buffer: "CardBuffer") -> None:
        """Takes a buffer back; a second call does nothing."""
        with self._lock:
            if buffer.is_lent:
                buffer.is_lent = False
                buffer.host_copies.clear()
                self._num_lent -= 1
                if not self._is_closed:
                    self._idle.append(buffer)

    def rsqrt_estimates(self) -> XrtBuffer:
        """Returns the host's table on the card; the first call copies it and blocks."""
        words = rsqrt_estimates()
        with self._lock:
            if self._estimates is None:
                table = self._card.allocate(_TABLE_BYTES)
                table.array[: words.nbytes] = words.view(np.uint8)
                table.to_card(words.nbytes)
                self._estimates = table
            return self._estimates

    def close(self) -> None:
        """Frees idle buffers now, and lent ones at their release."""
        with self._lock:
            self._is_closed = True
            self._idle.clear()
            self._estimates = None
            self._num_unallocated = 0

    def _allocate_if_room(self) -> "CardBuffer | None":
        if not self._num_unallocated:
            return None
        self._num_unallocated -= 1
        try:
            return self._allocate()
        except NoCardMemory:
            if not self._num_lent:
                raise
            self._num_unallocated = 0
            return None

    def _allocate(self) -> "CardBuffer":
        allocate = self._card.allocate
        return CardBuffer(
            self,
            state=allocate(self._state_bytes, p2p=True),
            gradient=allocate(self._dense_bytes),
            indices=allocate(self._dense_bytes),
            out=allocate(self._dense_bytes),
            status=allocate(PAGE_BYTES),
        )


@dataclass(eq=False)
class CardBuffer:
    """Memory of a card for one subgroup in flight.

    Attributes:
      state: P2P memory for the extents.
      gradient, indices, out, status: Other memory of a kernel; indices only with sparse
        gradients.
      checksums: Known checksums, by offset in `state`.
      host_copies: State read for the host, in its own memory, by offset in `state`.
    """

    memory: CardMemory
    state: XrtBuffer
    gradient: XrtBuffer
    indices: XrtBuffer
    out: XrtBuffer
    status: XrtBuffer
    checksums: dict[int, int] = field(default_factory=dict)
    host_copies: dict[int, Array] = field(default_factory=dict)
    is_lent: bool = False

    def release(self) -> None:
        self.memory.take_back(self)

    def pages(self, extent: Extent) -> Array:
        """Returns the whole pages of an extent, through the card's window."""
        start = extent.buffer_offset_bytes
        return self.state.array[start : start + page_ceil(extent.num_bytes)]

    def elements(self, extent: Extent) -> Array:
        """Returns the elements of an extent, through the card's window."""
        return self.pages(extent)[: extent.num_bytes].view(extent.dtype)

    def forget(self, extent: Extent) -> None:
        """Forgets checksum and host's copy of a state that is replaced."""
        self.checksums.pop(extent.buffer_offset_bytes, None)
        self.host_copies.pop(extent.buffer_offset_bytes, None)


def card_buffer_bytes(state_bytes: int, num_elements: int) -> int:
    """Returns a buffer's bytes on the card, with gradient, result and status."""
    dense_bytes = _NUM_DENSE * _dense_bytes(num_elements)
    return max(PAGE_BYTES, state_bytes) + dense_bytes + PAGE_BYTES


def _dense_bytes(num_elements: int) -> int:
    return max(PAGE_BYTES, page_ceil(num_elements * _WIDEST_BYTES))
