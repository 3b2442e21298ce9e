"""A kernel over a sparse gradient, for CSDs whose processor is the host's CPU.

Invariant: bits and checksums are those of the dense gradient with zeros between the
  sent elements; temporary memory does not grow with the subgroup.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from jaxinf.compress import SparseGradient
from jaxinf.csd.initial import slot_part
from jaxinf.kernels import CallInputs, CompiledKernel, Passage, stored_arrays
from jaxinf.layout import CodedSlot
from jaxinf.transfer import crc32c_combine
from jaxinf.typing import Array

# Size of the dense scratch: 1 MiB in float32 stays in a core's cache. Only written
# elements are cleared.
_PIECE_ELEMENTS = 1 << 18


def run_sparse(
    kernel: CompiledKernel,
    states: Sequence[Array | CodedSlot],
    gradient: SparseGradient,
    inputs: CallInputs,
    passage: Passage,
) -> bool:
    """Runs a kernel piece by piece, each piece's gradient scattered into a scratch.

    Args:
      states: params, then slots.
      inputs: all but the gradient.

    Returns:
      Whether every value is finite.
    """
    size = gradient.num_elements
    scratch = np.zeros(min(size, _PIECE_ELEMENTS), gradient.values.dtype)
    is_finite = True
    sums: list[tuple[Passage, list[int]]] = []
    for start in range(0, size, _PIECE_ELEMENTS):
        part = slice(start, min(start + _PIECE_ELEMENTS, size))
        sent = gradient.part(part.start, part.stop)
        dense = scratch[: sent.num_elements]
        sent.put_into(dense)
        given = None if passage.given is None else passage.given[part]
        params, *slots = (slot_part(state, part) for state in states)
        arrays = [array[part] for array in inputs.arrays]
        own = replace(passage, given=given)
        out = None if inputs.out is None else inputs.out[part]
        piece = CallInputs(dense, out, inputs.scalars, arrays)
        is_finite &= kernel.call((params, *slots), piece).run(piece, own)
        dense[sent.indices] = 0
        stored = stored_arrays(params, slots)
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
