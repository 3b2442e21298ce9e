"""Checks the arguments of a kernel.

Invariant: checked arguments have the counts, lengths and dtypes of the kernel, so that
machine code can use their addresses.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxinf.layout import CODE_BLOCK, CodedSlot
from jaxinf.program.kernel import InitKernel, Kernel
from jaxinf.typing import BFLOAT16, FLOAT32, FLOAT_DTYPES, Array

__all__ = ["check_arguments", "check_init_arguments"]


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
    """Checks the arguments of `evaluate`, and returns the scalars as NumPy's.

    Raises:
      TypeError, ValueError: A dtype, shape or count is not the kernel's.
    """
    if isinstance(params, CodedSlot):
        num = params.codes.size
        _require_bf16("params", params, num)
    else:
        num = params.size
        _require_chunk("params", params, num, (FLOAT32,))
    _check(kernel, num, slots, scalars, arrays)
    _require_chunk("gradient", gradient, num, FLOAT_DTYPES)
    is_coded = isinstance(params, CodedSlot)
    _require_chunk("out", out, num, (FLOAT32, BFLOAT16) if is_coded else FLOAT_DTYPES)
    return _numbers(kernel, scalars)


def check_init_arguments(
    kernel: InitKernel,
    *,
    params: Array,
    slots: Sequence[Array],
    scalars: Sequence[np.generic | Array],
    arrays: Sequence[Array],
) -> list[np.generic]:
    """Checks the arguments of `initialise`, and returns the scalars as NumPy's.

    Raises:
      TypeError, ValueError: A dtype, shape or count is not the kernel's.
    """
    _require_chunk("params", params, params.size, (FLOAT32,))
    _check(kernel, params.size, slots, scalars, arrays)
    return _numbers(kernel, scalars)


def _check(
    kernel: Kernel | InitKernel,
    num: int,
    slots: Sequence[Array | CodedSlot],
    scalars: Sequence[Any],
    arrays: Sequence[Array],
) -> None:
    for what, found, dtypes in (
        ("slots", slots, kernel.slot_dtypes),
        ("scalars", scalars, kernel.scalar_dtypes),
        ("arrays", arrays, kernel.array_dtypes),
    ):
        if len(found) != len(dtypes):
            raise ValueError(
                f"{what}: the kernel expects {len(dtypes)}, found {len(found)}"
            )
    for index, dtype in enumerate(kernel.slot_dtypes):
        slot = slots[index]
        if isinstance(slot, CodedSlot):
            _require_coded(f"slots[{index}]", slot, num, dtype)
        else:
            _require_chunk(f"slots[{index}]", slot, num, (dtype,))
    for index, dtype in enumerate(kernel.array_dtypes):
        _require_chunk(f"arrays[{index}]", arrays[index], num, (dtype,))


def _numbers(kernel: Kernel | InitKernel, scalars: Sequence[Any]) -> list[np.generic]:
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


def _require_coded(what: str, slot: CodedSlot, num: int, dtype: np.dtype) -> None:
    """Checks that codes are for a float32 slot and end at the end of a block."""
    if dtype != FLOAT32:
        raise TypeError(f"{what}: the kernel expects {dtype}, found codes of float32")
    if slot.scales is not None:
        num_blocks = -(-num // CODE_BLOCK)
        _require_chunk(what, slot.codes, num, (np.dtype(np.uint8),))
        _require_chunk(f"{what}.scales", slot.scales, num_blocks, (FLOAT32,))
    else:
        _require_bf16(what, slot, num)


def _require_bf16(what: str, coded: CodedSlot, num: int) -> None:
    _require_chunk(what, coded.codes, num, (BFLOAT16,))
    if coded.remainders is not None:
        int16 = np.dtype(np.int16)
        _require_chunk(f"{what}.remainders", coded.remainders, num, (int16,))


def _require_chunk(what: str, array: Array, num: int, dtypes: Any) -> None:
    if array.shape != (num,):
        raise ValueError(
            f"{what}: the kernel expects shape ({num},), found {array.shape}"
        )
    if array.dtype not in dtypes:
        names = " or ".join(str(dtype) for dtype in dtypes)
        raise TypeError(f"{what}: the kernel expects {names}, found {array.dtype}")
