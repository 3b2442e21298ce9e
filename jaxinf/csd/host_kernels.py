"""The host's kernels over a subgroup: first states, updates, sparse gradients.

Invariant: every kind of CSD has the first states made here. A sparse gradient has the
bits and checksums of the dense one with zeros between the elements sent; temporary
memory does not grow with the subgroup.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from jaxinf.compress import SparseGradient
from jaxinf.csd.base import Csd, CsdBuffer, Extent, Rounding, Update
from jaxinf.kernels import Checksums, compiled, initialise, stored_arrays
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
    *,
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
    states = kernel_states(views, extents, rounding)
    for piece in _pieces(params.size):
        parts = [state[piece] for state in states]
        master, *slots = (
            np.empty(piece.stop - piece.start, np.float32)
            if isinstance(part, CodedSlot)
            else part
            for part in parts
        )
        master[...] = params[piece]
        initialise(
            kernel,
            params=master,
            slots=slots,
            scalars=inputs.scalars,
            arrays=[array[piece] for array in inputs.arrays],
        )
        for part, values in zip(parts, (master, *slots), strict=True):
            if isinstance(part, CodedSlot):
                part.encode(values)
    if not csd.is_host:
        for extent, values in zip(extents, views, strict=True):
            csd.put(buffer, extent, values)


def kernel_states(
    views: Sequence[Array], extents: Sequence[Extent], rounding: Rounding
) -> list[Array | CodedSlot]:
    """Returns params and slots in the form of the host's kernels."""
    states: list[Array | CodedSlot] = []
    remaining = iter(zip(views, extents, strict=True))
    for values, extent in remaining:
        key = rounding.key + len(states) & 0xFFFFFFFF
        if extent.codec:
            has_companion = extent.codec in ("int8", "split")
            companion = next(remaining)[0] if has_companion else None
            first = rounding.first_element
            states.append(CodedSlot(values, companion, key=key, first=first))
        else:
            states.append(values)
    return states


def run_update(
    states: Sequence[Array | CodedSlot], update: Update, checksums: Checksums
) -> bool:
    """Runs a kernel over params, then slots; returns whether the gradient is finite."""
    if isinstance(update.gradient, SparseGradient):
        return _run_sparse(states, update, update.gradient, checksums)
    params, *slots = states
    return compiled(update.kernel).run(
        gradient=update.gradient,
        params=params,
        slots=slots,
        scalars=update.inputs.scalars,
        arrays=update.inputs.arrays,
        out=update.out,
        caller_params=update.caller_params,
        checksums=checksums,
    )


def _run_sparse(
    states: Sequence[Array | CodedSlot],
    update: Update,
    gradient: SparseGradient,
    checksums: Checksums,
) -> bool:
    """Runs the kernel piece by piece, over a dense copy of the gradient's piece."""
    kernel, is_finite = compiled(update.kernel), True
    scratch_elements = min(gradient.num_elements, _PIECE_ELEMENTS)
    scratch = np.zeros(scratch_elements, gradient.values.dtype)
    pieces: list[tuple[Checksums, list[int]]] = []
    for piece in _pieces(gradient.num_elements):
        sent = gradient.part(piece.start, piece.stop)
        dense = scratch[: sent.num_elements]
        dense[sent.indices] = sent.values
        parts = [state[piece] for state in states]
        sums = replace(checksums)
        is_finite &= kernel.run(
            gradient=dense,
            params=parts[0],
            slots=parts[1:],
            scalars=update.inputs.scalars,
            arrays=[array[piece] for array in update.inputs.arrays],
            out=_piece_of(update.out, piece),
            caller_params=_piece_of(update.caller_params, piece),
            checksums=sums,
        )
        dense[sent.indices] = 0  # the others are
        pieces.append((sums, [array.nbytes for array in stored_arrays(parts)]))
    checksums.before = _combine([(sums.before, lengths) for sums, lengths in pieces])
    checksums.after = _combine([(sums.after, lengths) for sums, lengths in pieces])
    return is_finite


def _pieces(num_elements: int) -> Iterator[slice]:
    for start in range(0, num_elements, _PIECE_ELEMENTS):
        yield slice(start, min(start + _PIECE_ELEMENTS, num_elements))


def _piece_of(array: Array | None, piece: slice) -> Array | None:
    return None if array is None else array[piece]


def _combine(pieces: Sequence[tuple[Sequence[int], Sequence[int]]]) -> tuple[int, ...]:
    """Combines checksums and lengths in bytes, by piece, then by stored array."""
    arrays = zip(*(zip(*piece, strict=True) for piece in pieces), strict=True)
    return tuple(crc32c_combine(array) for array in arrays)
