"""Kernels as machine code: finds or compiles the code of a `Kernel`.

Invariant: a compiled kernel has the roundings of jitted optax on XLA's CPU backend, the
same on every processor level of x86-64.
"""

import ctypes
import functools
import itertools
import operator
import platform
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from jaxinf.errors import CsdError
from jaxinf.kernels.calls import (
    Checksums,
    EntryPoint,
    array_fields,
    call_layout,
    scalar_word,
    stored_arrays,
)
from jaxinf.kernels.emitter import emit
from jaxinf.layout import CodedSlot
from jaxinf.native import libraries, toolchain
from jaxinf.program import Constant, Kernel, Result, trace_standard_kernels
from jaxinf.typing import FLOAT32, FLOAT_DTYPES, Array

_SHORT_ELEMENTS = 1 << 13
"""A kernel over at most so many elements takes some 10 us and holds the GIL."""


@dataclass(frozen=True, eq=False, repr=False)
class CompiledKernel:
    """A kernel in machine code. Thread-safe; releases the GIL in long runs."""

    kernel: Kernel
    entry: EntryPoint
    constants: tuple[int, ...]  # the words of its literals

    def run(
        self,
        *,
        gradient: Array,
        params: Array | CodedSlot,
        out: Array | None,
        slots: Sequence[Array | CodedSlot] = (),
        scalars: Sequence[np.generic | Array] = (),
        arrays: Sequence[Array] = (),
        caller_params: Array | None = None,
        checksums: Checksums | None = None,
    ) -> bool:
        """Updates one chunk in place; blocks the caller.

        16-bit floats are computed in float32 and then rounded. Denormals are read and
        written as zero. The bits are those of jitted optax on XLA's CPU backend, with
        its fused multiply-adds and reciprocals.

        Args:
          gradient: ``(n,)`` float32, bfloat16 or float16; only read.
          params: ``(n,)`` float32 master; becomes ``params + u``. It may be a
            `CodedSlot`, for params that are bfloat16 on the JAX device. It, `slots` and
            `out` are contiguous.
          slots: ``(n,)`` each; become the new state. A float32 slot may be a
            `CodedSlot`.
          scalars: 0-d, the prologue's results.
          arrays: ``(n,)`` each, the chunk's part of the prologue's arrays.
          out: ``(n,)``: float32 receives `u`; bfloat16 or float16 receives the new
            params rounded to nearest even, or, of coded params, their bfloat16 codes.
            None: nobody wants them.
          caller_params: ``(n,)`` params that replace the stored ones before the update:
            float32, or the codes' dtype.
          checksums: Requests checksums, and receives them.

        Returns:
          Whether the whole gradient is finite. If not, the caller must discard
          `params`, `slots` and `out`, whose contents are undefined.
        """
        states = (params, *slots)
        _check(self.kernel, states, gradient, out=out, scalars=scalars, arrays=arrays)
        gradient = np.ascontiguousarray(gradient)
        arrays = list(map(np.ascontiguousarray, arrays))
        if caller_params is not None:
            caller_params = np.ascontiguousarray(caller_params)
        checksums = checksums or Checksums()
        num_stored = len(stored_arrays(states))
        none = bytes(num_stored)
        wanted = bytes(checksums.wants_before or none)
        wanted += bytes(checksums.wants_after or none)
        layout = call_layout(
            num_slots=len(slots),
            num_arrays=len(arrays),
            num_scalars=len(scalars),
            num_constants=len(self.constants),
            num_stored=num_stored,
        )
        memory = ctypes.create_string_buffer(layout.whole.size)
        start = ctypes.addressof(memory)
        fields = map(array_fields, (gradient, params, out, *slots, *arrays))
        layout.whole.pack_into(
            memory,
            0,
            *itertools.chain.from_iterable(fields),
            0 if caller_params is None else caller_params.ctypes.data,
            start + layout.sums_offset,
            start + layout.sums_offset + layout.sums.size,
            False,  # wants_params
            *map(scalar_word, scalars),
            *self.constants,
            wanted,
        )
        is_short = gradient.size <= _SHORT_ELEMENTS
        call = self.entry.holding_gil if is_short else self.entry.releasing_gil
        is_finite = call(gradient.size, *[start + n for n in layout.offsets])
        sums = layout.sums.unpack_from(memory, layout.sums_offset)
        sums = tuple(map(operator.mul, sums, wanted))
        checksums.before, checksums.after = sums[:num_stored], sums[num_stored:]
        return bool(is_finite)


def _check(
    kernel: Kernel,
    states: Sequence[Array | CodedSlot],
    gradient: Array,
    *,
    out: Array | None,
    scalars: Sequence[np.generic | Array],
    arrays: Sequence[Array],
) -> None:
    """Asserts lengths and dtypes, which the machine code does not check."""
    for state, dtype in zip(states, (FLOAT32, *kernel.slot_dtypes), strict=True):
        assert isinstance(state, CodedSlot) or state.dtype == dtype, state.dtype
    assert gradient.dtype in FLOAT_DTYPES, gradient.dtype
    assert tuple(array.dtype for array in arrays) == kernel.array_dtypes
    assert tuple(scalar.dtype for scalar in scalars) == kernel.scalar_dtypes
    written = [s.codes if isinstance(s, CodedSlot) else s for s in states]
    if out is not None:
        assert out.dtype in FLOAT_DTYPES, out.dtype
        written.append(out)
    num = written[0].size
    for array in (gradient, *arrays, *written):
        assert array.shape == (num,), (array.shape, num)
    assert all(array.flags.c_contiguous for array in written)


def compiled(kernel: Kernel) -> CompiledKernel:
    """Returns the kernel as machine code: the package's, or compiled once. Thread-safe.

    The caller blocks while it is compiled, for `toolchain.cache_directory`.

    Raises:
      UnsupportedTransformError: The kernel computes with integers below 32 bits.
      CsdError: There is no compiler for it, the compiler failed, or this processor is
        not supported.
    """
    with _LOCK:  # one thread compiles it, and the others wait
        return _find_or_compile(kernel)


_LOCK = threading.Lock()


@functools.lru_cache(maxsize=4096)
def _find_or_compile(kernel: Kernel) -> CompiledKernel:
    levels = toolchain.levels()
    if not levels:
        raise CsdError(
            "kernels are C++ for x86-64 and aarch64: expected such a processor, found "
            f"{platform.machine()}; train on another machine"
        )
    try:
        return compile_kernel(kernel, level=levels[0])
    except (toolchain.CompilerError, OSError) as error:
        raise CsdError(
            "the optimizer's kernel is not in this installation, and was not "
            f"compiled: {error}"
        ) from error


def initialise(
    kernel: Kernel,
    *,
    params: Array,
    slots: Sequence[Array],
    scalars: Sequence[np.generic | Array] = (),
    arrays: Sequence[Array] = (),
) -> None:
    """Writes one chunk's first state into `slots`; blocks; thread-safe.

    Arguments are those of `CompiledKernel.run`, but `params` are only read, and `slots`
    only written. A state of literals, params and results of the prologue needs no
    machine code; for others, see the errors of `compiled`.
    """
    if kernel.equations:
        compiled(kernel).run(
            gradient=np.zeros_like(params),
            params=params,
            slots=slots,
            scalars=scalars,
            arrays=arrays,
            out=np.empty_like(params),
        )
        return
    sources = {"params": [params], "scalar": scalars, "array": arrays}
    for slot, value in zip(slots, kernel.new_slots, strict=True):
        assert not isinstance(value, Result)
        is_literal = isinstance(value, Constant)
        slot[...] = value.value if is_literal else sources[value.kind][value.index]


def compile_kernel(
    kernel: Kernel, *, level: str, compiler: str | None = None
) -> CompiledKernel:
    """Returns the kernel for one level, from the package or compiled by `compiler`."""
    source = emit(kernel)
    entry = EntryPoint(libraries.load_function(source.text, level, compiler))
    return CompiledKernel(kernel, entry, source.constants)


@functools.cache
def standard_kernels() -> Mapping[str, Kernel]:
    """Returns the package's kernels by name; of those with the same C++, the first.

    The first call traces them all, which takes about a second.
    """
    by_text: dict[str, tuple[str, Kernel]] = {}
    for name, kernel in trace_standard_kernels().items():
        by_text.setdefault(emit(kernel).text, (name, kernel))
    return dict(by_text.values())
