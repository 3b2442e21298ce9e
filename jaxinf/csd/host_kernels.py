"""The host's kernels over a subgroup's states: their first values, sparse gradients.

Invariant: all kinds of CSD have the bits of one code for the first state. Those of a
  sparse gradient, and its checksums, are those of the dense one with zeros between the
  sent elements; temporary memory does not grow with the subgroup.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from jaxinf.compress import SparseGradient
from jaxinf.csd.base import Csd, CsdBuffer, Extent, Rounding, Update
from jaxinf.kernels import Passage, compiled, initialise, stored_arrays
from jaxinf.layout import CodedSlot
from jaxinf.program import Kernel, LeafInputs
from jaxinf.transfer import crc32c_combine
from jaxinf.typing import Array

# 1 MiB in float32 stays in a core's cache.
_PIECE_ELEMENTS = 1 << 18


def initialise_states(
    csd: Csd,
    buffer: CsdBuffer,
    extents: Sequence[Extent],
    kernel: Kernel,
    params: Array,
    inputs: LeafInputs,
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
        parts = [state[part] for state in states]
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


def run_update(
    states: Sequence[Array | CodedSlot], update: Update, passage: Passage
) -> bool:
    """Runs an update's kernel over states: params, then slots.

    A sparse gradient is scattered into a scratch, piece by piece.

    Returns:
      Whether every element of the gradient is finite.
    """
    params, *slots = states
    gradient, inputs, out = update.gradient, update.inputs, update.out
    run = partial(compiled(update.kernel).run, scalars=inputs.scalars)
    if not isinstance(gradient, SparseGradient):
        whole = {"gradient": gradient, "params": params, "slots": slots, "out": out}
        return run(**whole, arrays=inputs.arrays, passage=passage)
    size, is_finite = gradient.num_elements, True
    scratch = np.zeros(min(size, _PIECE_ELEMENTS), gradient.values.dtype)
    sums: list[tuple[Passage, list[int]]] = []
    for start in range(0, size, _PIECE_ELEMENTS):
        part = slice(start, min(start + _PIECE_ELEMENTS, size))
        sent = gradient.part(part.start, part.stop)
        dense = scratch[: sent.num_elements]
        sent.put_into(dense)
        master, own_slots = params[part], [slot[part] for slot in slots]
        given = None if passage.given is None else passage.given[part]
        own = replace(passage, given=given)
        is_finite &= run(
            gradient=dense,
            params=master,
            slots=own_slots,
            arrays=[array[part] for array in inputs.arrays],
            out=None if out is None else out[part],
            passage=own,
        )
        dense[sent.indices] = 0  # the others are
        stored = stored_arrays(master, own_slots)
        sums.append((own, [array.nbytes for array in stored]))
    passage.read = _combined([(own.read, lengths) for own, lengths in sums])
    passage.written = _combined([(own.written, lengths) for own, lengths in sums])
    return is_finite


def _combined(parts: Sequence[tuple[Sequence[int], Sequence[int]]]) -> tuple[int, ...]:
    """Combines the checksums of each stored array; 0 for one that is not requested.

    Args:
      parts: checksums and lengths in bytes of each piece, by stored array.
    """
    arrays = zip(*(zip(*part, strict=True) for part in parts), strict=True)
    return tuple(crc32c_combine(array) for array in arrays)
