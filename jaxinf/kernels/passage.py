"""Work beside an update in the same pass over a chunk: checksums, params in and out.

Invariant: results are those of separate passes over the arrays. `run_evaluator` makes
these passes; ``cpp/shell.hpp`` does everything block by block in one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxinf.io import crc32c
from jaxinf.kernels.evaluator import evaluate
from jaxinf.layout import CodedSlot
from jaxinf.program.kernel import Kernel
from jaxinf.typing import Array

__all__ = ["Passage", "run_evaluator", "stored_arrays"]


@dataclass(eq=False)
class Passage:
    """Requests to a kernel's run beside the update, and their results.

    The stored arrays are the params, then the slots. A coded state has its codes, then
    their scales or remainders.

    Attributes:
      given: ``(n,)`` params that replace the stored ones before the update, in their
        dtype: float32, or the codes' dtype.
      wants_params: whether float32 `out` receives the new params, not the update.
      reads: for each stored array, whether its checksum before the update is requested.
      writes: the same for the checksum after the update.
      read: the CRC-32C of each array before the update, 0 if not requested; filled by
        the run.
      written: the same after the update.
    """

    given: Array | None = None
    wants_params: bool = False
    reads: Sequence[bool] = ()
    writes: Sequence[bool] = ()
    read: tuple[int, ...] = ()
    written: tuple[int, ...] = ()


def stored_arrays(
    params: Array | CodedSlot, slots: Sequence[Array | CodedSlot]
) -> list[Array]:
    """Returns the arrays that have checksums, in order."""
    result = []
    for state in (params, *slots):
        if not isinstance(state, CodedSlot):
            result.append(state)
            continue
        result.append(state.codes)
        if state.beside is not None:
            result.append(state.beside)
    return result


def run_evaluator(
    kernel: Kernel,
    passage: Passage,
    *,
    params: Array | CodedSlot,
    slots: Sequence[Array | CodedSlot],
    out: Array,
    **arguments: Any,
) -> bool:
    """Runs `evaluate` and fulfils the requests of a passage."""
    is_coded = isinstance(params, CodedSlot)
    if passage.given is not None:
        (params.codes if is_coded else params)[...] = passage.given
    stored = stored_arrays(params, slots)
    passage.read = _checksums(stored, passage.reads)
    finite = evaluate(kernel, params=params, slots=slots, out=out, **arguments)
    if passage.wants_params and out.dtype == np.float32:
        out[...] = params.decode() if is_coded else params
    passage.written = _checksums(stored, passage.writes)
    return finite


def _checksums(arrays: Sequence[Array], wanted: Sequence[bool]) -> tuple[int, ...]:
    return tuple(
        crc32c(np.ascontiguousarray(array)) if is_wanted else 0
        for array, is_wanted in zip(arrays, wanted, strict=bool(wanted))
    )
