"""A CSD whose processor is a card: the protocol over pyxrt's buffers and kernels.

        NVMe ──preadv──► P2P buffer ══ kernel, in place ══► P2P buffer ──pwritev──► NVMe
                             gradient ──sync──►  ║  ──sync──► update or new params
        drive                                  card                          host

Invariant: a kernel's state moves only between the drive and the card's memory. The host
sends gradients, and gets results and the kernel's status: whether the gradient is
finite, and the checksums of the states as read and as written. For its own use the host
reads the file, since it can read a card's memory only at tens of megabytes a second.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxinf.compress import SparseGradient
from jaxinf.csd.base import CsdBuffer, Extent, Transfer, Update, UpdateOutcome, is_idle
from jaxinf.csd.cards.memory import CardBuffer, CardMemory
from jaxinf.csd.cards.peer import p2p_transfer
from jaxinf.csd.cards.xrt import XrtCard
from jaxinf.csd.host_kernels import run_update
from jaxinf.errors import CsdError
from jaxinf.kernels import STATUS_BYTES, CardKernel, CardStatus, Checksums, card_kernel
from jaxinf.transfer import (
    PAGE_BYTES,
    ByteMeters,
    allocate_pages,
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

    If `buffered`, files go through the page cache where direct I/O is refused.
    """

    is_host = False  # a wait for the card can be interrupted, and the card goes on

    def __init__(
        self,
        card: XrtCard,
        memory: CardMemory,
        root: Path,
        meters: ByteMeters,
        *,
        buffered: bool,
    ) -> None:
        self.memory = memory
        self._card = card
        self._root = root
        self._meters, self._buffered = meters, buffered

    def acquire(self, num_bytes: int) -> CsdBuffer | None:
        return self.memory.acquire(num_bytes)

    # --- drive and card ------------------------------------------------------------

    def read(self, transfers: Sequence[Transfer]) -> None:
        meters, buffered = self._meters, self._buffered
        for buffer, extent, file, for_host in transfers:
            buffer = _card_buffer(buffer)
            buffer.forget(extent)
            pages = buffer.pages(extent)
            place = extent.file_offset_bytes, extent.num_bytes
            if not for_host and extent.num_bytes >= PAGE_BYTES:
                with p2p_transfer(pages, extent.file_offset_bytes):
                    read_into(file, pages, *place, meters=meters, buffered=buffered)
                continue
            copy = allocate_pages(extent.num_bytes)
            read_into(file, copy, *place, meters=meters)
            if for_host:
                buffer.host_copies[extent.buffer_offset_bytes] = copy
            else:  # the file may be shorter; a drive sends a card only whole pages
                pages[: extent.num_bytes] = copy[: extent.num_bytes]

    def write(self, transfers: Sequence[Transfer]) -> None:
        meters, buffered = self._meters, self._buffered
        for buffer, extent, file, _ in transfers:
            pages = _card_buffer(buffer).pages(extent)
            place = extent.file_offset_bytes, extent.num_bytes
            if extent.num_bytes >= PAGE_BYTES:
                with p2p_transfer(pages, extent.file_offset_bytes):
                    write_from(file, pages, *place, meters=meters, buffered=buffered)
            else:
                copy = allocate_pages(extent.num_bytes)
                copy[: extent.num_bytes] = pages[: extent.num_bytes]
                write_from(file, copy, *place, meters=meters)

    def view(self, buffer: CsdBuffer, extent: Extent) -> Array:
        """Returns state read for the host, or the card's memory, which is slow."""
        buffer = _card_buffer(buffer)
        copy = buffer.host_copies.get(extent.buffer_offset_bytes)
        if copy is not None:
            return copy[: extent.num_bytes].view(extent.dtype)
        return buffer.elements(extent)

    def put(self, buffer: CsdBuffer, extent: Extent, values: Array) -> None:
        """Host → card, through the window, which is fast to write."""
        buffer = _card_buffer(buffer)
        buffer.forget(extent)
        stored = np.ascontiguousarray(values, extent.dtype)
        buffer.elements(extent)[...] = stored
        buffer.checksums[extent.buffer_offset_bytes] = crc32c(stored)

    def checksum(self, buffer: CsdBuffer, extent: Extent) -> int | None:
        return _card_buffer(buffer).checksums.get(extent.buffer_offset_bytes)

    # --- kernels -------------------------------------------------------------------

    def update(self, buffer: CsdBuffer, update: Update) -> UpdateOutcome:
        """Runs the card's kernel; this thread sleeps meanwhile."""
        assert update.caller_params is None  # a card reads its own params
        buffer, extents, out = _card_buffer(buffer), update.extents, update.out
        if is_idle(update.kernel):
            return self._update_nothing(buffer, update)
        for extent in extents:  # the kernel needs state that was read for the host
            copy = buffer.host_copies.pop(extent.buffer_offset_bytes, None)
            if copy is not None:
                buffer.pages(extent)[: copy.size] = copy
        status = self._run(_find_kernel(update), buffer, update)
        if out is not None:
            buffer.out.from_card(out.nbytes)
            out[...] = _as_array(buffer.out.array, out)
        for extent, checksum in zip(extents, status.checksums_written, strict=True):
            buffer.checksums[extent.buffer_offset_bytes] = checksum
        read = dict(enumerate(status.checksums_read))
        wanted = {n: read[n] for n in update.wanted_checksums if n in read}
        return UpdateOutcome(status.is_finite, wanted)

    def _run(
        self, kernel: CardKernel, buffer: CardBuffer, update: Update
    ) -> CardStatus:
        """Runs a kernel, after the transfer of the gradient; returns its status."""
        num_elements = update.extents[0].num_elements
        num_selected = _send_gradient(buffer, update.gradient)
        words = kernel.scalar_values(
            num_elements=num_elements,
            num_selected=num_selected,
            rounding_key=update.rounding.key,
            rounding_first=update.rounding.first_element,
            scalars=update.inputs.scalars,
        )
        pointers = self._pointers(kernel, buffer, update.extents)
        try:
            self._card.run(kernel.name, pointers, words, timeout_s=RUN_TIMEOUT_S)
        except CsdError as error:
            raise CsdError(f"CSD {self._root}: {error}") from error
        buffer.status.from_card(STATUS_BYTES)
        status = kernel.read_status(buffer.status.array[:STATUS_BYTES].view(np.uint32))
        if not status.has_valid_indices:
            raise CsdError(
                f"CSD {self._root}: kernel {kernel.name}: expected rising indices "
                f"below {num_elements}, found others; what compresses the gradient is "
                "broken"
            )
        return status

    def _pointers(
        self, kernel: CardKernel, buffer: CardBuffer, extents: Sequence[Extent]
    ) -> list[Any]:
        """Returns a buffer for each pointer; a state's two share one, in place."""
        named = {"gradient": buffer.gradient.bo, "out": buffer.out.bo}
        named |= {"indices": buffer.indices.bo, "status": buffer.status.bo}
        if kernel.has_rsqrt:
            named["rsqrt_estimates"] = self.memory.rsqrt_estimates().bo
        for name, extent in zip(kernel.extents, extents, strict=True):
            place = extent.buffer_offset_bytes, page_ceil(extent.num_bytes)
            part = self._card.part(buffer.state, *place)
            named |= {f"{name}_in": part, f"{name}_out": part}
        return [named[pointer.name] for pointer in kernel.pointers]

    def _update_nothing(self, buffer: CardBuffer, update: Update) -> UpdateOutcome:
        """Handles a leaf that the optimizer does not change, without the card."""
        params, *_ = views = [self.view(buffer, extent) for extent in update.extents]
        slots = [np.zeros(params.size, dtype) for dtype in update.kernel.slot_dtypes]
        is_finite = run_update([params.copy(), *slots], update, Checksums())
        checksums = {n: crc32c(view) for n, view in enumerate(views)}
        return UpdateOutcome(is_finite, checksums)


def _find_kernel(update: Update) -> CardKernel:
    extents, gradient = update.extents, update.gradient
    is_sparse = isinstance(gradient, SparseGradient)
    return card_kernel(
        update.kernel,
        gradient_dtype=(gradient.values if is_sparse else gradient).dtype,
        out_dtype=FLOAT32 if update.out is None else update.out.dtype,
        codec=extents[1].codec if len(extents) > 1 else "",
        is_sparse=is_sparse,
    )


def _send_gradient(buffer: CardBuffer, gradient: Array | SparseGradient) -> int:
    """Copies a gradient to the card; returns the elements of a sparse one, else 0."""
    if isinstance(gradient, SparseGradient):
        _as_array(buffer.indices.array, gradient.indices)[...] = gradient.indices
        buffer.indices.to_card(gradient.indices.nbytes)
        values, num_selected = gradient.values, gradient.indices.size
    else:
        values, num_selected = gradient, 0
    _as_array(buffer.gradient.array, values)[...] = values
    buffer.gradient.to_card(values.nbytes)
    return num_selected


def _card_buffer(buffer: CsdBuffer) -> CardBuffer:
    assert isinstance(buffer, CardBuffer)
    return buffer


def _as_array(memory: Array, like: Array) -> Array:
    """Returns the first bytes of memory as an array like another."""
    return memory[: like.nbytes].view(like.dtype)
