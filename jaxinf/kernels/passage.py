"""Work beside an update in the same pass over a chunk: checksums, params in and out.

Invariant: results are those of separate passes over the arrays; ``cpp/shell.hpp`` does
everything block by block in one.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from jaxinf.layout import CodedSlot
from jaxinf.typing import Array


@dataclass(eq=False)
class Passage:
    """Requests to a kernel's run beside the update, and their results.

    The stored arrays are the params, then the slots. A coded state has its codes, then
    their scales or remainders.

    Attributes:
      given: ``(n,)`` params that replace the stored ones before the update, in their
        dtype: float32, or the codes' dtype.
      wants_params: whether float32 `out` receives the new params, not the update.
      reads: for each stored array, whether its checksum before the update is requested;
        empty for none.
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
    result = []
    for state in (params, *slots):
        if not isinstance(state, CodedSlot):
            result.append(state)
            continue
        result.append(state.codes)
        if state.beside is not None:
            result.append(state.beside)
    return result
