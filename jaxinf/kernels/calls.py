"""A call of a kernel's machine code: its arguments in one piece of memory.

Invariant: the layout is that of ``cpp/shell.hpp``.
"""

import ctypes
import functools
import operator
import struct
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxinf.kernels.passage import Passage
from jaxinf.layout import CodedSlot
from jaxinf.typing import BFLOAT16, FLOAT16, FLOAT32, Array

__all__ = [
    "Block",
    "array_fields",
    "holding_gil",
    "invoke",
    "scalar_word",
    "with_prototype",
]

_DTYPES = (
    FLOAT32, BFLOAT16, FLOAT16,
    *map(np.dtype, ["int32", "uint32", "bool", "int8", "uint8", "int16", "uint16"]),
)  # fmt: skip
_CODES = {dtype: code for code, dtype in enumerate(_DTYPES)}
_BF16_STOCHASTIC, _INT8_BLOCKS, _BF16_SPLIT = range(len(_DTYPES), len(_DTYPES) + 3)


_WORD = 0xFFFFFFFF
"""All 32 bits."""

_ARRAY = "PPiII4x"
"""``jaxinf::Array`` of ``cpp/shell.hpp``: data, beside, dtype, key, first."""

_PASSAGE = "PPPi4x"
"""``jaxinf::Passage``: given, sums, wanted, wants_params."""


@dataclass(frozen=True)
class Block:
    """All arguments of one call in one piece of memory: packed at once.

    It has arrays, passage, words (scalars, constants, sums), and the wanted flags.

    Attributes:
      packer: packs the whole block.
      num_bytes: length of the block.
      offsets: offsets of gradient, params, out, slots, arrays, scalars, constants,
        passage.
      sums: offset of the sums.
      sums_unpacker: unpacks the sums.
      wanted: offset of the wanted flags.
    """

    packer: struct.Struct
    num_bytes: int
    offsets: tuple[int, ...]
    sums: int
    sums_unpacker: struct.Struct
    wanted: int

    @classmethod
    @functools.cache
    def of(
        cls,
        num_slots: int,
        num_arrays: int,
        num_scalars: int,
        num_words: int,
        num_sums: int,
    ) -> "Block":
        """Makes the block for these numbers; the words are scalars and constants."""
        length = struct.calcsize(_ARRAY)
        arrays = 3 + num_slots
        passage = (arrays + num_arrays) * length
        words = passage + struct.calcsize(_PASSAGE)
        first_sum = words + 4 * num_words
        wanted = first_sum + 4 * num_sums
        packer = struct.Struct(
            _ARRAY * (arrays + num_arrays)
            + _PASSAGE
            + f"{num_words}I{4 * num_sums}x{num_sums}s"
        )
        return cls(
            packer,
            packer.size,
            (
                0, length, 2 * length, 3 * length, arrays * length,
                words, words + 4 * num_scalars, passage,
            ),
            first_sum,
            struct.Struct(f"{num_sums}I"),
            wanted,
        )  # fmt: skip


def with_prototype(function: Any) -> Callable[..., int]:
    """Returns a kernel's entry point with the types of ``cpp/shell.hpp``."""
    function.argtypes = [ctypes.c_long, *[ctypes.c_void_p] * 8]
    function.restype = ctypes.c_int
    return function


def holding_gil(function: Any) -> Callable[..., int]:
    """The same entry point, called without a release of the GIL.

    Another thread may take a released GIL, and a short kernel then waits for it longer
    than it runs.
    """
    prototype = ctypes.PYFUNCTYPE(function.restype, *function.argtypes)
    address = ctypes.cast(function, ctypes.c_void_p).value
    assert address is not None
    return prototype(address)


def invoke(
    function: Callable[..., int],
    *,
    gradient: Array,
    params: Array | CodedSlot,
    out: Array,
    slots: Sequence[Array | CodedSlot],
    arrays: Sequence[Array],
    scalars: Sequence[np.generic],
    constants: Sequence[int],
    passage: Passage | None = None,
) -> bool:
    """Calls a kernel's entry point on contiguous arrays; nothing is checked."""
    passage = passage or Passage()
    num_stored = _num_stored(params) + sum(map(_num_stored, slots))
    none = (False,) * num_stored
    wanted = bytes((*(passage.reads or none), *(passage.writes or none)))
    num_words = len(scalars) + len(constants)
    block = Block.of(len(slots), len(arrays), len(scalars), num_words, len(wanted))
    memory = ctypes.create_string_buffer(block.num_bytes)
    address = ctypes.addressof(memory)
    given = passage.given
    fields: list[Any] = []
    for array in (gradient, params, out, *slots, *arrays):
        fields += array_fields(array)
    block.packer.pack_into(
        memory,
        0,
        *fields,
        0 if given is None else given.ctypes.data,
        address + block.sums,
        address + block.wanted,
        passage.wants_params,
        *map(scalar_word, scalars),
        *constants,
        wanted,
    )
    finite = function(gradient.size, *[address + offset for offset in block.offsets])
    sums = block.sums_unpacker.unpack_from(memory, block.sums)
    told = tuple(map(operator.mul, sums, wanted))
    passage.read, passage.written = told[:num_stored], told[num_stored:]
    return bool(finite)


def array_fields(array: Array | CodedSlot) -> tuple[int, int, int, int, int]:
    """The fields of `_ARRAY`."""
    if not isinstance(array, CodedSlot):
        return array.ctypes.data, 0, _CODES[array.dtype], 0, 0
    codes, scales, rest = array.codes.ctypes.data, array.scales, array.remainders
    key, first = array.key & _WORD, array.first & _WORD
    if rest is not None:
        return codes, rest.ctypes.data, _BF16_SPLIT, key, first
    if scales is None:
        return codes, 0, _BF16_STOCHASTIC, key, first
    return codes, scales.ctypes.data, _INT8_BLOCKS, key, first


def _num_stored(state: Array | CodedSlot) -> int:
    """Returns the number of arrays that a state is stored in."""
    return 2 if isinstance(state, CodedSlot) and state.beside is not None else 1


def scalar_word(number: np.generic | Array) -> int:
    """Converts a scalar to a kernel's 32 bits; all set for true."""
    if number.dtype == np.bool_:
        return _WORD if number else 0
    return int.from_bytes(number.tobytes(), sys.byteorder)
