"""Computes the first state of a subgroup by the host's kernel, for every kind of CSD.

Invariant: all kinds share this code, and so have the same bits.
"""

from collections.abc import Sequence

import numpy as np

from jaxinf.csd.base import Csd, CsdBuffer, Extent, Rounding, ScalarInputs
from jaxinf.kernels import initialise
from jaxinf.layout import CodedSlot
from jaxinf.program import Kernel
from jaxinf.typing import Array

_PIECE_ELEMENTS = 1 << 16


def initialise_states(
    csd: Csd,
    buffer: CsdBuffer,
    extents: Sequence[Extent],
    kernel: Kernel,
    params: Array,
    inputs: ScalarInputs,
    rounding: Rounding,
) -> None:
    """Fills a subgroup's master params and first state in a new buffer of a CSD."""
    if csd.is_host:
        views = [csd.view(buffer, extent) for extent in extents]
    else:
        views = [np.empty(extent.num_elements, extent.dtype) for extent in extents]
    states = states_as_slots(views, extents, rounding)
    for start in range(0, params.size, _PIECE_ELEMENTS):
        part = slice(start, min(start + _PIECE_ELEMENTS, params.size))
        parts = [slot_part(state, part) for state in states]
        master, *slots = (
            np.empty(part.stop - start, np.float32)
            if isinstance(state, CodedSlot)
            else state
            for state in parts
        )
        master[...] = params[part]
        initialise(
            kernel,
            params=master,
            slots=slots,
            scalars=inputs.scalars,
            arrays=[array[part] for array in inputs.arrays],
        )
        for state, values in zip(parts, (master, *slots), strict=True):
            if isinstance(state, CodedSlot):
                state.encode(values)
    if not csd.is_host:
        for extent, values in zip(extents, views, strict=True):
            csd.put(buffer, extent, values)


def states_as_slots(
    views: Sequence[Array], extents: Sequence[Extent], rounding: Rounding
) -> list[Array | CodedSlot]:
    """Returns params and slots in the form of the host's kernels."""
    slots: list[Array | CodedSlot] = []
    coming = iter(zip(views, extents, strict=True))
    for values, extent in coming:
        key = rounding.key + len(slots) & 0xFFFFFFFF
        if extent.codec:
            has_more = extent.codec in ("int8", "split")
            beside = next(coming)[0] if has_more else None
            slots.append(CodedSlot(values, beside, key, rounding.first))
        else:
            slots.append(values)
    return slots


def slot_part(slot: Array | CodedSlot, part: slice) -> Array | CodedSlot:
    """Returns a part of a slot; coded ones start at a block."""
    if isinstance(slot, CodedSlot):
        return slot.part(part.start, part.stop)
    return slot[part]
