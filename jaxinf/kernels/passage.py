"""What is done beside an update while a chunk passes: checksums, params in and out.

Invariant: the numbers are those of separate passes over the arrays; ``cpp/shell.hpp``
does it block by block, and `run_evaluator` in so many passes.
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
    """What is wanted of a kernel's run beside the update.

    The stored arrays are the params, then the slots; of those that are coded the codes,
    then what is beside them.

    Attributes:
      given: ``(n,)`` params to take instead of what `params` holds, float32 or coded,
        which is overwritten; of its dtype.
      wants_params: float32 `out` receives the new params, not the update.
      reads: of each stored array, whether its checksum is wanted before the update.
      writes: the same after it.
      read: the CRC-32C of each, 0 where not wanted; filled by the run.
      written: the same.
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
    """The arrays that checksums are taken of, in order."""
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
    """`evaluate`, and around it what a passage asks for."""
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
