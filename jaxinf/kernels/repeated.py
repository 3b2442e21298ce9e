"""A kernel's call that repeats in every step, with most of its arguments made once.

Invariant: a call is repeated only with arrays of the lengths and dtypes of one that
`CompiledKernel.run` has checked; the states lie at the same places of another buffer.
"""

import ctypes
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from jaxinf.kernels.calls import Block, array_fields, holding_gil, scalar_word
from jaxinf.kernels.compiled import CompiledKernel
from jaxinf.kernels.passage import Passage
from jaxinf.layout import CodedSlot
from jaxinf.typing import Array

__all__ = ["RepeatedCall"]

_SHORT_ELEMENTS = 1 << 13
"""A kernel over at most so many elements takes some 10 us and holds the GIL."""


class _Place(NamedTuple):
    """Where a buffer has params or a slot, and how they are stored.

    Attributes:
      offset_bytes: of the elements or codes.
      beside_bytes: offset of scales or remainders; None if there are none.
      code: of the dtype or codec, as in ``cpp/shell.hpp``.
      is_coded: whether rounding needs a seed.
    """

    offset_bytes: int
    beside_bytes: int | None
    code: int
    is_coded: bool


@dataclass(frozen=True, eq=False)
class RepeatedCall:
    """A compiled kernel's call with states at fixed places of a buffer. Thread-safe.

    It releases the GIL while the kernel runs, unless that takes some microseconds only.

    Attributes:
      compiled: the kernel.
      num_elements: the arrays' length.
      gradient_dtype, out_dtype: of the arrays.
      params_dtype: of the params as they are stored.
      num_bytes: end of the last state in the buffer.
    """

    compiled: CompiledKernel
    num_elements: int
    gradient_dtype: np.dtype
    out_dtype: np.dtype
    params_dtype: np.dtype
    num_bytes: int
    _function: Callable[..., int]
    _places: tuple[_Place, ...]
    _gradient_code: int
    _out_code: int
    _num_stored: int
    _block: Block

    @classmethod
    def of(
        cls,
        compiled: CompiledKernel,
        address: int,
        *,
        states: Sequence[Array | CodedSlot],
        gradient: Array,
        out: Array,
    ) -> "RepeatedCall":
        """Makes it from the arguments of a call that has been checked.

        Args:
          compiled: the kernel.
          address: where the buffer begins.
          states: params, then slots, all in the buffer.
          gradient, out: of the call.
        """
        places = tuple(_place(state, address) for state in states)
        num_stored = len(places) + sum(p.beside_bytes is not None for p in places)
        num_scalars = len(compiled.kernel.scalar_dtypes)
        num_words = num_scalars + len(compiled.constants)
        params = states[0]
        is_coded = isinstance(params, CodedSlot)
        function = compiled.function
        if gradient.size <= _SHORT_ELEMENTS:
            function = holding_gil(function)
        return cls(
            compiled,
            gradient.size,
            gradient.dtype,
            out.dtype,
            params.codes.dtype if is_coded else params.dtype,
            max(map(_end, states)) - address,
            function,
            places,
            array_fields(gradient)[2],
            array_fields(out)[2],
            num_stored,
            Block.of(len(places) - 1, 0, num_scalars, num_words, 2 * num_stored),
        )

    def fits(
        self,
        *,
        gradient: Array,
        out: Array,
        scalars: Sequence[np.generic | Array],
        given: Array | None,
    ) -> bool:
        """Whether these arguments are like those of the checked call."""
        shape, kernel = (self.num_elements,), self.compiled.kernel
        return (
            gradient.shape == out.shape == shape
            and gradient.dtype == self.gradient_dtype
            and out.dtype == self.out_dtype
            and gradient.flags.c_contiguous
            and out.flags.c_contiguous
            and (given is None or self._fits_given(given))
            and tuple([s.dtype for s in scalars]) == kernel.scalar_dtypes
            and all(s.shape == () for s in scalars)
        )

    def _fits_given(self, given: Array) -> bool:
        is_alike = given.shape == (self.num_elements,)
        is_alike = is_alike and given.dtype == self.params_dtype
        return is_alike and given.flags.c_contiguous

    def run(
        self,
        address: int,
        *,
        gradient: Array,
        out: Array,
        scalars: Sequence[np.generic | Array],
        key: int,
        first: int,
        passage: Passage,
    ) -> bool:
        """Updates the states of a buffer in place; for arguments that fit.

        Args:
          address: where the buffer begins.
          gradient, out, scalars: as of `CompiledKernel.run`.
          key, first: the seed of rounding.
          passage: with flags for every stored array; receives the checksums.

        Returns:
          Whether the gradient is finite.
        """
        given, wanted = passage.given, bytes((*passage.reads, *passage.writes))
        block = self._block
        memory = ctypes.create_string_buffer(block.num_bytes)
        start = ctypes.addressof(memory)
        master, *slots = [
            (
                address + offset,
                0 if beside is None else address + beside,
                code,
                (key + number & 0xFFFFFFFF) if is_coded else 0,
                first if is_coded else 0,
            )
            for number, (offset, beside, code, is_coded) in enumerate(self._places)
        ]
        fields = [gradient.ctypes.data, 0, self._gradient_code, 0, 0, *master]
        fields += (out.ctypes.data, 0, self._out_code, 0, 0)
        for slot in slots:
            fields += slot
        block.packer.pack_into(
            memory,
            0,
            *fields,
            0 if given is None else given.ctypes.data,
            start + block.sums,
            start + block.wanted,
            passage.wants_params,
            *map(scalar_word, scalars),
            *self.compiled.constants,
            wanted,
        )
        finite = self._function(self.num_elements, *[start + n for n in block.offsets])
        sums = block.sums_unpacker.unpack_from(memory, block.sums)
        told = tuple(map(operator.mul, sums, wanted))
        passage.read, passage.written = (
            told[: self._num_stored],
            told[self._num_stored :],
        )
        return bool(finite)


def _place(state: Array | CodedSlot, address: int) -> _Place:
    data, beside, code, _, _ = array_fields(state)
    is_coded = isinstance(state, CodedSlot)
    return _Place(data - address, beside - address if beside else None, code, is_coded)


def _end(state: Array | CodedSlot) -> int:
    """The address behind a state's arrays."""
    if not isinstance(state, CodedSlot):
        return state.ctypes.data + state.nbytes
    beside = () if state.beside is None else (state.beside,)
    return max(map(_end, (state.codes, *beside)))
