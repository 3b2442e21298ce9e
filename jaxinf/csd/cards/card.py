"""A CSD whose processor is a card: the protocol over pyxrt's buffers and kernels.

        NVMe ──preadv──► P2P buffer ══ kernel, in place ══► P2P buffer ──pwritev──► NVMe
                             gradient ──sync──►  ║  ──sync──► update or new params
        drive                                  card                          host

Invariant: a kernel's state moves only between the drive and the card's memory. The host
  sends gradients, and gets results and the kernel's status: whether the gradient is
  finite, and the checksums of the states as read and as written. For its own use the
  host reads the file, since it can read a card's memory only at tens of megabytes a
  second.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxinf.compress import SparseGradient
from jaxinf.csd.base import (
    CsdBuffer,
    Extent,
    Transfer,
    Update,
    UpdateOutcome,
    is_idle,
)
from jaxinf.csd.cards.memory import CardBuffer, CardMemory
from jaxinf.csd.cards.peer import with_card
from jaxinf.csd.cards.xrt import XrtCard
from jaxinf.csd.host_kernels import run_update
from jaxinf.errors import CsdError
from jaxinf.kernels import STATUS_BYTES, CardKernel, Passage, card_kernel
from jaxinf.transfer import (
    PAGE_BYTES,
    ByteMeters,
    aligned,
    crc32c,
    page_ceil,
    read_into,
    write_from,
)
from jaxinf.typing import FLOAT32, Array

RUN_TIMEOUT_S = 60.0
"""Limit for a kernel's run over a subgroup, which takes milliseconds."""


class CardCsd:
    """See `jaxinf.csd.Csd`. Thread-safe.

    Args:
      root: directory of the chunk files; must exist.
      meters: counts the drive's bytes.
      buffered: whether files go through the page cache where direct I/O is refused.
    """

    is_host = False  # a wait for the card can be interrupted, and the card goes on

    def __init__(
        self,
        card: XrtCard,
        memory: CardMemory,
        root: Path,
        meters: ByteMeters,
        buffered: bool,
    ) -> None:
        self.memory = memory
        self._card = card
        self._root = root
        self._meters, self._buffered = meters, buffered

    def acquire(self, num_bytes: int) -> CsdBuffer | None:
        """Returns memory of the card, or None if all of it is lent."""
        return self.memory.acquire(num_bytes)

    # --- drive and card ------------------------------------------------------------

    def read(self, transfers: Sequence[Transfer]) -> None:
        meters, buffered = self._meters, self._buffered
        for buffer, extent, file, for_host in transfers:
            own = _own(buffer)
            _forget(own, extent)
            place = extent.file_offset_bytes, extent.num_bytes
            pages = own.pages(extent)
            if not for_host and extent.num_bytes >= PAGE_BYTES:
                with with_card(pages, extent.file_offset_bytes):
                    read_into(file, pages, *place, meters=meters, buffered=buffered)
                continue
            memory = aligned(extent.num_bytes)
            read_into(file, memory, *place, meters=meters)
            if for_host:
                own.host[extent.buffer_offset_bytes] = memory
            else:  # the file may be shorter; a drive sends a card only whole pages
                pages[: extent.num_bytes] = memory[: extent.num_bytes]

    def write(self, transfers: Sequence[Transfer]) -> None:
        meters, buffered = self._meters, self._buffered
        for buffer, extent, file, _ in transfers:
            pages = _own(buffer).pages(extent)
            place = extent.file_offset_bytes, extent.num_bytes
            if extent.num_bytes >= PAGE_BYTES:
                with with_card(pages, extent.file_offset_bytes):
                    write_from(file, pages, *place, meters=meters, buffered=buffered)
            else:
                memory = aligned(extent.num_bytes)
                memory[: extent.num_bytes] = pages[: extent.num_bytes]
                write_from(file, memory, *place, meters=meters)

    def view(self, buffer: CsdBuffer, extent: Extent) -> Array:
        """Returns state read for the host, or the card's memory, which is slow."""
        host = _own(buffer).host.get(extent.buffer_offset_bytes)
        if host is not None:
            return host[: extent.num_bytes].view(extent.dtype)
        return _window(_own(buffer), extent)

    def put(
        self,
        buffer: CsdBuffer,
        extent: Extent,
        values: Array,
    ) -> None:
        """Host → card, through the window, which is fast to write."""
        own = _own(buffer)
        _forget(own, extent)
        stored = np.ascontiguousarray(values, extent.dtype)
        _window(own, extent)[...] = stored
        own.sums[extent.buffer_offset_bytes] = crc32c(stored)

    def checksum(self, buffer: CsdBuffer, extent: Extent) -> int | None:
        """Returns the checksum from the last update or `initialise`."""
        return _own(buffer).sums.get(extent.buffer_offset_bytes)

    # --- kernels -------------------------------------------------------------------

    def update(self, buffer: CsdBuffer, update: Update) -> UpdateOutcome:
        """Runs the card's kernel; this thread sleeps meanwhile."""
        extents, kernel, gradient, inputs, out, rounding, *_ = update
        assert update.given is None  # a card reads its own params
        own, num = _own(buffer), extents[0].num_elements
        if is_idle(kernel):
            return self._update_nothing(own, update)
        card = _kernel_of(update)
        for extent in extents:
            # Its kernel needs state that was read for the host.
            host = own.host.pop(extent.buffer_offset_bytes, None)
            if host is not None:
                own.pages(extent)[: host.size] = host
        num_selected = _send(own, gradient)
        words = card.scalar_values(
            num_elements=num,
            num_selected=num_selected,
            rounding_key=rounding.key,
            rounding_first=rounding.first,
            scalars=inputs.scalars,
        )
        arguments = self._arguments(card, own, extents)
        try:
            self._card.kernel(card.name).run(arguments, words, RUN_TIMEOUT_S)
        except CsdError as error:
            raise CsdError(f"CSD {self._root}: {error}") from error
        if out is not None:
            own.out.from_card(out.nbytes)
            out[...] = _as_array(own.out.array, out)
        own.status.from_card(STATUS_BYTES)
        status = card.read_status(own.status.array[:STATUS_BYTES].view(np.uint32))
        if not status.indices_valid:
            raise CsdError(
                f"CSD {self._root}: kernel {card.name}: expected rising indices below "
                f"{num}, found others; what compresses the gradient is broken"
            )
        for extent, checksum in zip(extents, status.checksums_written, strict=True):
            own.sums[extent.buffer_offset_bytes] = checksum
        read = dict(enumerate(status.checksums_read))
        told = {number: read[number] for number in update.tells if number in read}
        return UpdateOutcome(status.finite, told)

    def _arguments(
        self, card: CardKernel, own: CardBuffer, extents: Sequence[Extent]
    ) -> list[Any]:
        """Returns buffers for the pointers; a state has one, updated in place."""
        named = {"gradient": own.gradient.bo, "out": own.out.bo}
        named["status"] = own.status.bo
        if card.compressed:
            named["indices"] = own.indices.bo
        if card.has_rsqrt:
            named["rsqrt_estimates"] = self.memory.rsqrt_estimates().bo
        for name, extent in zip(card.extents, extents, strict=True):
            place = extent.buffer_offset_bytes, page_ceil(extent.num_bytes)
            part = self._card.part(own.state, *place)
            named |= {f"{name}_in": part, f"{name}_out": part}
        return [named[pointer.name] for pointer in card.pointers]

    def _update_nothing(self, own: CardBuffer, update: Update) -> UpdateOutcome:
        """Handles a leaf that the optimizer does not change, without the card."""
        params, *_ = views = [self.view(own, extent) for extent in update.extents]
        slots = [np.zeros(params.size, dtype) for dtype in update.kernel.slot_dtypes]
        is_finite = run_update([params.copy(), *slots], update, Passage())
        sums = {n: crc32c(view) for n, view in enumerate(views)}
        return UpdateOutcome(is_finite, sums)


def _kernel_of(update: Update) -> CardKernel:
    extents, kernel, gradient, _, out, *_ = update
    is_sparse = isinstance(gradient, SparseGradient)
    dtype = (gradient.values if is_sparse else gradient).dtype
    codec = extents[1].codec if len(extents) > 1 else ""
    result = FLOAT32 if out is None else out.dtype
    return card_kernel(kernel, dtype, result, codec, is_sparse)


def _send(own: CardBuffer, gradient: Array | SparseGradient) -> int:
    """Copies a gradient to the card.

    Returns:
      The number of elements sent of a sparse gradient, 0 for a dense one.
    """
    values, num_selected = gradient, 0
    if isinstance(gradient, SparseGradient):
        values, num_selected = gradient.values, gradient.indices.size
        _as_array(own.indices.array, gradient.indices)[...] = gradient.indices
        own.indices.to_card(gradient.indices.nbytes)
    assert not isinstance(values, SparseGradient)
    _as_array(own.gradient.array, values)[...] = values
    own.gradient.to_card(values.nbytes)
    return num_selected


def _own(buffer: CsdBuffer) -> CardBuffer:
    assert isinstance(buffer, CardBuffer)
    return buffer


def _forget(own: CardBuffer, extent: Extent) -> None:
    """Forgets data about a state that is replaced."""
    own.sums.pop(extent.buffer_offset_bytes, None)
    own.host.pop(extent.buffer_offset_bytes, None)


def _window(own: CardBuffer, extent: Extent) -> Array:
    return own.pages(extent)[: extent.num_bytes].view(extent.dtype)


def _as_array(memory: Array, like: Array) -> Array:
    """Returns the first bytes of memory as an array like another."""
    return memory[: like.nbytes].view(like.dtype)
