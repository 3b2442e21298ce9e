"""A call of a kernel's machine code: its arguments in one piece of memory.

Invariant: the layout is that of ``cpp/shell.hpp``. What a passage asks for beside the
update has the results of separate passes over the arrays, and is done in the same one.
"""

import ctypes
import functools
import operator
import struct
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from jaxinf.layout import CodedSlot
from jaxinf.typing import BFLOAT16, FLOAT16, FLOAT32, Array

_SHORT_ELEMENTS = 1 << 13
"""A kernel over at most so many elements takes some 10 us and holds the GIL."""

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

_NOWHERE = (0, 0, _CODES[FLOAT32], 0, 0)
"""The fields of an `out` that nobody wants."""

_PASSAGE = "PPPi4x"
"""``jaxinf::Passage``: given, sums, wanted, wants_params."""


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
    """Returns the arrays of a subgroup in their order on the drive, codes apart."""
    states = (
        (state.codes, state.beside) if isinstance(state, CodedSlot) else (state,)
        for state in (params, *slots)
    )
    return [array for own in states for array in own if array is not None]


class EntryPoint:
    """A kernel's function in a library, with the types of ``cpp/shell.hpp``.

    Another thread may take a released GIL, and a short kernel then waits for it longer
    than it runs. So there are two ways to call it.
    """

    def __init__(self, function: Any) -> None:
        function.argtypes = [ctypes.c_long, *[ctypes.c_void_p] * 8]
        function.restype = ctypes.c_int
        self.releasing: Callable[..., int] = function
        prototype = ctypes.PYFUNCTYPE(function.restype, *function.argtypes)
        address = ctypes.cast(function, ctypes.c_void_p).value
        assert address is not None
        self.holding: Callable[..., int] = prototype(address)


class CallInputs(NamedTuple):
    """The inputs of a call beside the states; see `CompiledKernel.run`."""

    gradient: Array
    out: Array | None
    scalars: Sequence[np.generic | Array] = ()
    arrays: Sequence[Array] = ()


def call_kernel(
    entry: EntryPoint,
    constants: Sequence[int],
    states: Sequence[Array | CodedSlot],
    inputs: CallInputs,
    passage: Passage,
) -> bool:
    """Updates states in place; returns whether all of the gradient is finite.

    It releases the GIL while the kernel runs, unless that takes some microseconds only.

    Args:
      constants: the words of the kernel's literals.
      states: params, then slots; contiguous, as is `out`.
      passage: receives the checksums.
    """
    gradient, out, given = inputs.gradient, inputs.out, passage.given
    gradient = np.ascontiguousarray(gradient)
    given = None if given is None else np.ascontiguousarray(given)
    arrays = list(map(np.ascontiguousarray, inputs.arrays))
    params, *slots = states
    fields = [*array_fields(gradient), *array_fields(params)]
    for array in (out, *slots, *arrays):
        fields += _NOWHERE if array is None else array_fields(array)
    num_stored = len(stored_arrays(params, slots))
    none = bytes(num_stored)
    wanted = bytes(passage.reads or none) + bytes(passage.writes or none)
    counts = len(slots), len(arrays), len(inputs.scalars), len(constants), num_stored
    packer, offsets, sums, sums_at = _layout(*counts)
    memory = ctypes.create_string_buffer(packer.size)
    start = ctypes.addressof(memory)
    packer.pack_into(
        memory,
        0,
        *fields,
        0 if given is None else given.ctypes.data,
        start + sums_at,
        start + sums_at + 4 * len(wanted),
        passage.wants_params,
        *map(scalar_word, inputs.scalars),
        *constants,
        wanted,
    )
    is_short = gradient.size <= _SHORT_ELEMENTS
    function = entry.holding if is_short else entry.releasing
    finite = function(gradient.size, *[start + offset for offset in offsets])
    told = tuple(map(operator.mul, sums.unpack_from(memory, sums_at), wanted))
    passage.read, passage.written = told[:num_stored], told[num_stored:]
    return bool(finite)


@functools.lru_cache(maxsize=256)
def _layout(
    num_slots: int, num_arrays: int, num_scalars: int, num_constants: int, num_sums: int
) -> tuple[struct.Struct, tuple[int, ...], struct.Struct, int]:
    """Returns the layout of a call's arguments, which are packed at once.

    They are arrays (gradient, params, out, slots, others), the passage, words (scalars,
    constants), sums before and after, and whether each is wanted.

    Returns:
      Their form; offsets of gradient, params, out, slots, arrays, scalars, constants
      and passage; form and offset of the sums.
    """
    length, num_words = struct.calcsize(_ARRAY), num_scalars + num_constants
    arrays_at = (3 + num_slots) * length
    passage_at = arrays_at + num_arrays * length
    words_at = passage_at + struct.calcsize(_PASSAGE)
    constants_at, sums_at = words_at + 4 * num_scalars, words_at + 4 * num_words
    offsets = 0, length, 2 * length, 3 * length
    offsets = *offsets, arrays_at, words_at, constants_at, passage_at
    form = _ARRAY * (3 + num_slots + num_arrays) + _PASSAGE
    form += f"{num_words}I{8 * num_sums}x{2 * num_sums}s"
    return struct.Struct(form), offsets, struct.Struct(f"{2 * num_sums}I"), sums_at


def array_fields(array: Array | CodedSlot) -> tuple[int, int, int, int, int]:
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
