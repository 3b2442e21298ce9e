"""Checks the arguments of a kernel.

Invariant: checked arguments have the counts, lengths and dtypes of the kernel, so that
machine code can use their addresses.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from jaxinf.layout import CODE_BLOCK, CodedSlot
from jaxinf.program import Kernel
from jaxinf.typing import BFLOAT16, FLOAT32, FLOAT_DTYPES, Array

_INT16, _UINT8 = np.dtype(np.int16), np.dtype(np.uint8)

_Need = tuple[str, Array, int, Sequence[np.dtype]]
"""An argument's name, the argument, the length and the dtypes that it may have."""


def check_arguments(
    kernel: Kernel,
    *,
    gradient: Array,
    params: Array | CodedSlot,
    slots: Sequence[Array | CodedSlot],
    scalars: Sequence[np.generic | Array],
    arrays: Sequence[Array],
    out: Array,
) -> list[np.generic]:
    """Checks the arguments of a kernel's run, and returns the scalars as NumPy's.

    Raises:
      TypeError, ValueError: A dtype, shape or count is not the kernel's.
    """
    for what, found, dtypes in (
        ("slots", slots, kernel.slot_dtypes),
        ("scalars", scalars, kernel.scalar_dtypes),
        ("arrays", arrays, kernel.array_dtypes),
    ):
        if len(found) != len(dtypes):
            raise ValueError(
                f"{what}: the kernel expects {len(dtypes)}, found {len(found)}"
            )
    is_coded = isinstance(params, CodedSlot)
    num = params.codes.size if is_coded else params.size
    outs = (FLOAT32, BFLOAT16) if is_coded else FLOAT_DTYPES
    needs = [*_of_state("params", params, num, FLOAT32)]
    for index, dtype in enumerate(kernel.slot_dtypes):
        needs += _of_state(f"slots[{index}]", slots[index], num, dtype)
    for index, dtype in enumerate(kernel.array_dtypes):
        needs.append((f"arrays[{index}]", arrays[index], num, (dtype,)))
    needs += [("gradient", gradient, num, FLOAT_DTYPES), ("out", out, num, outs)]
    for what, array, length, dtypes in needs:
        if array.shape != (length,):
            raise ValueError(
                f"{what}: the kernel expects shape ({length},), found {array.shape}"
            )
        if array.dtype not in dtypes:
            names = " or ".join(str(dtype) for dtype in dtypes)
            raise TypeError(f"{what}: the kernel expects {names}, found {array.dtype}")
    return _numbers(kernel, scalars)


def _of_state(
    what: str, state: Array | CodedSlot, num: int, dtype: np.dtype
) -> Iterator[_Need]:
    if not isinstance(state, CodedSlot):
        yield what, state, num, (dtype,)
        return
    if dtype != FLOAT32:
        raise TypeError(f"{what}: the kernel expects {dtype}, found codes of float32")
    scales = state.scales if what != "params" else None
    yield what, state.codes, num, (BFLOAT16 if scales is None else _UINT8,)
    if scales is not None:
        yield f"{what}.scales", scales, -(-num // CODE_BLOCK), (FLOAT32,)
    elif state.remainders is not None:
        yield f"{what}.remainders", state.remainders, num, (_INT16,)


def _numbers(kernel: Kernel, scalars: Sequence[np.generic | Array]) -> list[np.generic]:
    numbers = []
    for index, dtype in enumerate(kernel.scalar_dtypes):
        number = np.asarray(scalars[index])
        if number.shape or number.dtype != dtype:
            raise TypeError(
                f"scalars[{index}]: the kernel expects a 0-d {dtype}, found "
                f"{number.dtype} of shape {number.shape}"
            )
        numbers.append(number[()])
    return numbers
