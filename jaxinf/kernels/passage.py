"""What is done beside an update while a chunk passes: checksums, params in and out.

Invariant: the numbers are those of separate passes over the arrays; ``cpp/shell.hpp``
does it block by block, and `run_evaluator` in so many passes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from jaxinf.io import crc32c
from jaxinf.kernels.codecs import CodedSlot
from jaxinf.typing import Array

__all__ = ["Passage", "run_evaluator", "stored_arrays"]


@dataclass(eq=False)
class Passage:
    """What is wanted of a kernel's run beside the update.

    The stored arrays are the params, then the slots; of 8-bit slots the codes, then
    their scales.

    Attributes:
      given: ``(n,)`` float32 params to take instead of what `params` holds, which is
        overwritten; may be `out` itself.
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


def stored_arrays(params: Array, slots: Sequence[Array | CodedSlot]) -> list[Array]:
    """The arrays that checksums are taken of, in order."""
    result = [params]
    for slot in slots:
        if not isinstance(slot, CodedSlot):
            result.append(slot)
            continue
        result.append(slot.codes)
        if slot.scales is not None:
            result.append(slot.scales)
    return result


def run_evaluator(
    evaluate: Callable[..., bool],
    passage: Passage,
    *,
    params: Array,
    slots: Sequence[Array | CodedSlot],
    out: Array,
    **arguments: object,
) -> bool:
    """`Kernel.evaluate`, and around it what a passage asks for."""
    if passage.given is not None:
        params[...] = passage.given
    stored = stored_arrays(params, slots)
    passage.read = _checksums(stored, passage.reads)
    finite = evaluate(params=params, slots=slots, out=out, **arguments)
    if passage.wants_params and out.dtype == np.float32:
        out[...] = params
    passage.written = _checksums(stored, passage.writes)
    return finite


def _checksums(arrays: Sequence[Array], wanted: Sequence[bool]) -> tuple[int, ...]:
    return tuple(
        crc32c(np.ascontiguousarray(array)) if is_wanted else 0
        for array, is_wanted in zip(arrays, wanted, strict=bool(wanted))
    )
