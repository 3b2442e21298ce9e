"""A call of a kernel's machine code: its arguments in one piece of memory.

Invariant: the layout is that of ``cpp/shell.hpp``. What a passage asks for beside the
update has the results of separate passes over the arrays, and is done in the same one.
"""

import ctypes
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
    """What a call gets beside the states; see `CompiledKernel.run`."""

    gradient: Array
    out: Array | None
    scalars: Sequence[np.generic | Array] = ()
    arrays: Sequence[Array] = ()


class KernelCall:
    """A kernel's call on arrays like those that it was made from. Thread-safe.

    The states, params and slots, lie at the same places of any buffer. It releases the
    GIL while the kernel runs, unless that takes some microseconds only. All arguments
    are in one piece of memory, packed at once: arrays, passage, words (scalars,
    constants, sums), and the wanted flags.

    Args:
      entry: the kernel's function.
      constants: the words of its literals.
      states: params, then slots, all in the buffer. All arrays are contiguous.
      like: inputs of its dtypes and lengths.
      address: where the buffer begins; 0 if the states are at their addresses.
      key, first: seed of rounding of the buffer, which the states' own count from.

    Attributes:
      num_bytes: end of the last state in the buffer.
    """

    def __init__(
        self,
        entry: EntryPoint,
        constants: Sequence[int],
        states: Sequence[Array | CodedSlot],
        like: CallInputs,
        *,
        address: int = 0,
        key: int = 0,
        first: int = 0,
    ) -> None:
        gradient, out, scalars, arrays = like
        is_short = gradient.size <= _SHORT_ELEMENTS
        self._function = entry.holding if is_short else entry.releasing
        self._constants = constants
        self._scalar_dtypes = tuple([scalar.dtype for scalar in scalars])
        params = states[0]
        codes = params.codes if isinstance(params, CodedSlot) else params
        self._shape, self._has_out = gradient.shape, out is not None
        result = None if out is None else out.dtype
        self._dtypes = gradient.dtype, result, codes.dtype
        self._places: list[tuple[int, int | None, int, int | None, int]] = []
        for state in states:  # offsets, code, and seed of its own
            data, beside, code, own_key, own_first = array_fields(state)
            own = own_key - key if isinstance(state, CodedSlot) else None
            at = beside - address if beside else None
            self._places.append((data - address, at, code, own, own_first - first))
        stored = stored_arrays(params, states[1:])
        ends = [array.ctypes.data + array.nbytes for array in stored]
        self.num_bytes = max(ends) - address
        self._num_stored = len(stored)
        num_words, num_sums = len(scalars) + len(constants), 2 * len(stored)
        length = struct.calcsize(_ARRAY)
        arrays_at = (2 + len(states)) * length  # behind gradient, params, out, slots
        passage_at = arrays_at + len(arrays) * length
        words_at = passage_at + struct.calcsize(_PASSAGE)
        constants_at = words_at + 4 * len(scalars)
        self._sums_at = words_at + 4 * num_words
        states_at = (0, length, 2 * length, 3 * length)
        self._offsets = *states_at, arrays_at, words_at, constants_at, passage_at
        self._packer = struct.Struct(
            _ARRAY * (2 + len(states) + len(arrays))
            + _PASSAGE
            + f"{num_words}I{4 * num_sums}x{num_sums}s"
        )

    def fits(self, inputs: CallInputs, given: Array | None) -> bool:
        """Whether these, and given params, are like those that it was made from."""
        gradient, out, scalars, _ = inputs
        if (out is not None) != self._has_out:
            return False
        for array, dtype in zip((gradient, out, given), self._dtypes, strict=True):
            if array is not None and not (
                array.shape == self._shape
                and array.dtype == dtype
                and array.flags.c_contiguous
            ):
                return False
        dtypes = tuple([scalar.dtype for scalar in scalars])
        return dtypes == self._scalar_dtypes and not any(s.shape for s in scalars)

    def run(
        self,
        inputs: CallInputs,
        passage: Passage,
        address: int = 0,
        key: int = 0,
        first: int = 0,
    ) -> bool:
        """Updates the states of a buffer in place; returns whether all is finite.

        Args:
          inputs: like those that the call was made from.
          passage: receives the checksums.
          address: where the buffer begins.
          key, first: the seed of rounding.
        """
        given, num_stored = passage.given, self._num_stored
        given = None if given is None else np.ascontiguousarray(given)
        gradient = np.ascontiguousarray(inputs.gradient)
        arrays = list(map(np.ascontiguousarray, inputs.arrays))
        none = bytes(num_stored)
        wanted = bytes(passage.reads or none) + bytes(passage.writes or none)
        sums_at, num_sums = self._sums_at, 2 * num_stored
        memory = ctypes.create_string_buffer(self._packer.size)
        start = ctypes.addressof(memory)
        master, *slots = [
            (
                address + offset,
                0 if beside is None else address + beside,
                code,
                0 if own_key is None else key + own_key & _WORD,
                0 if own_key is None else first + own_first & _WORD,
            )
            for offset, beside, code, own_key, own_first in self._places
        ]
        out = _NOWHERE if inputs.out is None else array_fields(inputs.out)
        fields = [*array_fields(gradient), *master, *out]
        for slot in slots:
            fields += slot
        for array in arrays:
            fields += array_fields(array)
        self._packer.pack_into(
            memory,
            0,
            *fields,
            0 if given is None else given.ctypes.data,
            start + sums_at,
            start + sums_at + 4 * num_sums,
            passage.wants_params,
            *map(scalar_word, inputs.scalars),
            *self._constants,
            wanted,
        )
        offsets = [start + offset for offset in self._offsets]
        finite = self._function(gradient.size, *offsets)
        sums = struct.unpack_from(f"{num_sums}I", memory, sums_at)
        told = tuple(map(operator.mul, sums, wanted))
        passage.read, passage.written = told[:num_stored], told[num_stored:]
        return bool(finite)


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
