"""The memory of a call of a kernel's machine code.

Invariant: the layout is that of ``cpp/shell.hpp``. Checksums come from the same pass as
the update, and equal those of separate passes over the arrays.
"""

import ctypes
import functools
import struct
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from jaxinf.layout import CodedSlot
from jaxinf.typing import BFLOAT16, FLOAT16, FLOAT32, Array

_DTYPES = (
    FLOAT32, BFLOAT16, FLOAT16,
    *map(np.dtype, ["int32", "uint32", "bool", "int8", "uint8", "int16", "uint16"]),
)  # fmt: skip
_CODES = {dtype: code for code, dtype in enumerate(_DTYPES)}
_BF16_STOCHASTIC, _INT8_BLOCKS, _BF16_SPLIT = range(len(_DTYPES), len(_DTYPES) + 3)

_WORD = 0xFFFFFFFF

_ARRAY = "PPiII4x"
"""``jaxinf::Array`` of ``cpp/shell.hpp``: data, beside, dtype, key, first."""

_PASSAGE = "PPPi4x"
"""``jaxinf::Passage``: caller's params, sums, wanted sums, wants_params (not used)."""


@dataclass(eq=False)
class Checksums:
    """Which checksums of the stored arrays a run computes, and their values.

    The stored arrays are the params, then the slots. A coded state has two: its codes,
    then their scales or remainders.

    Attributes:
      wants_before: For each stored array, whether its checksum before the update is
        requested; empty for none.
      wants_after: The same for the checksum after the update.
      before: The CRC-32C of each array before the update, 0 if not requested; set by
        the run, as is `after`.
    """

    wants_before: Sequence[bool] = ()
    wants_after: Sequence[bool] = ()
    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()


def stored_arrays(states: Iterable[Array | CodedSlot]) -> list[Array]:
    """Returns the arrays of params and slots as a drive stores them, in order."""
    pairs = (
        (state.codes, state.companion) if isinstance(state, CodedSlot) else (state,)
        for state in states
    )
    return [array for pair in pairs for array in pair if array is not None]


class EntryPoint:
    """A kernel's function in a library, with the types of ``cpp/shell.hpp``.

    Another thread may take a released GIL, and a short kernel then waits for it longer
    than it runs. So there are two ways to call it.
    """

    def __init__(self, function: Any) -> None:
        function.argtypes = [ctypes.c_long, *[ctypes.c_void_p] * 8]
        function.restype = ctypes.c_int
        self.releasing_gil: Callable[..., int] = function
        prototype = ctypes.PYFUNCTYPE(function.restype, *function.argtypes)
        address = ctypes.cast(function, ctypes.c_void_p).value
        assert address is not None
        self.holding_gil: Callable[..., int] = prototype(address)


class CallLayout(NamedTuple):
    """Where a call's arguments are in its memory, which is packed at once.

    In order: arrays (gradient, params, out, slots, others), the passage, words (of
    scalars and constants), sums before and after the update, which of them are wanted.
    `offsets` are those of the entry point's arguments.
    """

    whole: struct.Struct
    offsets: tuple[int, ...]
    sums: struct.Struct
    sums_offset: int


@functools.lru_cache(maxsize=256)
def call_layout(
    *,
    num_slots: int,
    num_arrays: int,
    num_scalars: int,
    num_constants: int,
    num_stored: int,
) -> CallLayout:
    length, num_words = struct.calcsize(_ARRAY), num_scalars + num_constants
    arrays = (3 + num_slots) * length
    passage = arrays + num_arrays * length
    words = passage + struct.calcsize(_PASSAGE)
    constants, sums = words + 4 * num_scalars, words + 4 * num_words
    form = _ARRAY * (3 + num_slots + num_arrays) + _PASSAGE
    form += f"{num_words}I{8 * num_stored}x{2 * num_stored}s"
    offsets = (0, length, 2 * length, 3 * length, arrays, words, constants, passage)
    checksums = struct.Struct(f"{2 * num_stored}I")
    return CallLayout(struct.Struct(form), offsets, checksums, sums)


def array_fields(array: Array | CodedSlot | None) -> tuple[int, int, int, int, int]:
    if array is None:
        return 0, 0, _CODES[FLOAT32], 0, 0
    if not isinstance(array, CodedSlot):
        return array.ctypes.data, 0, _CODES[array.dtype], 0, 0
    assert array.key is not None, "machine code rounds stochastically"
    codes, scales, rest = array.codes.ctypes.data, array.scales, array.remainders
    key, first = array.key & _WORD, array.first & _WORD
    if rest is not None:
        return codes, rest.ctypes.data, _BF16_SPLIT, key, first
    if scales is None:
        return codes, 0, _BF16_STOCHASTIC, key, first
    return codes, scales.ctypes.data, _INT8_BLOCKS, key, first


def scalar_word(number: np.generic | Array) -> int:
    """Converts a scalar to a kernel's 32 bits; all set for true."""
    if number.dtype == np.bool_:
        return _WORD if number else 0
    return int.from_bytes(number.tobytes(), sys.byteorder)
