"""Kernels as machine code: finds or compiles the code of a `Kernel`.

Invariant: a compiled kernel has the roundings of jitted optax on XLA's CPU backend, the
same on every processor level of x86-64.
"""

import functools
import platform
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from jaxinf.errors import CsdError
from jaxinf.kernels.calls import CallInputs, EntryPoint, Passage, call_kernel
from jaxinf.kernels.emitter import emit
from jaxinf.kernels.lowering import lower
from jaxinf.layout import CodedSlot
from jaxinf.native import libraries, toolchain
from jaxinf.program import Constant, Kernel, Result, traced_kernels
from jaxinf.typing import FLOAT32, FLOAT_DTYPES, Array


@dataclass(frozen=True, eq=False)
class CompiledKernel:
    """A kernel in machine code. Thread-safe; releases the GIL in long runs."""

    kernel: Kernel = field(repr=False)
    entry: EntryPoint = field(repr=False)
    constants: tuple[int, ...] = field(repr=False)  # the words of its literals

    def run(
        self,
        *,
        gradient: Array,
        params: Array | CodedSlot,
        out: Array | None,
        slots: Sequence[Array | CodedSlot] = (),
        scalars: Sequence[np.generic | Array] = (),
        arrays: Sequence[Array] = (),
        passage: Passage | None = None,
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
          passage: work beside the update.

        Returns:
          Whether all of the gradient is finite. If not, the caller must discard
          `params`, `slots` and `out`, whose contents are undefined.
        """
        states, inputs = (params, *slots), CallInputs(gradient, out, scalars, arrays)
        _check(self.kernel, states, inputs)
        found = passage or Passage()
        return call_kernel(self.entry, self.constants, states, inputs, found)


def _check(
    kernel: Kernel, states: Sequence[Array | CodedSlot], inputs: CallInputs
) -> None:
    """Asserts lengths and dtypes, which the machine code does not check."""
    gradient, out, scalars, arrays = inputs
    written = [s.codes if isinstance(s, CodedSlot) else s for s in states]
    plain = [FLOAT32, *kernel.slot_dtypes]
    for state, dtype in zip(states, plain, strict=True):
        assert isinstance(state, CodedSlot) or state.dtype == dtype, state.dtype
    num = written[0].size
    if out is not None:
        written.append(out)
        assert out.dtype in FLOAT_DTYPES, out.dtype
    assert gradient.dtype in FLOAT_DTYPES, gradient.dtype
    assert tuple(array.dtype for array in arrays) == kernel.array_dtypes
    assert tuple(scalar.dtype for scalar in scalars) == kernel.scalar_dtypes
    for array in (gradient, *arrays, *written):
        assert array.shape == (num,), (array.shape, num)
    assert all(array.flags.c_contiguous for array in written)


def compiled(kernel: Kernel) -> CompiledKernel:
    """Returns the kernel as machine code, which is kept. Thread-safe.

    The package contains the common optimizers; others are compiled once and kept in
    `toolchain.cache_directory`. Blocks while the compiler runs.

    Raises:
      UnsupportedTransformError: it computes with integers of fewer than 32 bits.
      CsdError: there is no compiler for it, or the compiler failed, or kernels are not
        made for this processor.
    """
    with _LOCK:  # one thread compiles it, and the others wait
        return _find(kernel)


_LOCK = threading.Lock()


@functools.lru_cache(maxsize=4096)
def _find(kernel: Kernel) -> CompiledKernel:
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

    `params` are only read, `slots` only written; others are as of `CompiledKernel.run`.

    Raises:
      CsdError, UnsupportedTransformError: see `compiled`; only of a state that needs
        arithmetic, and not of literals, params and results of the prologue.
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
    """Returns the kernel for one level, from the package or compiled by `compiler`.

    Raises:
      UnsupportedTransformError: It has no C++ form.
      CompilerError: There is no compiler, or it failed.
    """
    source = emit(lower(kernel))
    entry = EntryPoint(libraries.load_function(source.text, level, compiler))
    return CompiledKernel(kernel, entry, source.constants)


@functools.cache
def standard_kernels() -> Mapping[str, Kernel]:
    """Returns kernels by name; of several with the same C++, the first.

    The first call traces them all, which takes about a second.
    """
    by_text: dict[str, tuple[str, Kernel]] = {}
    for name, kernel in traced_kernels().items():
        by_text.setdefault(emit(lower(kernel)).text, (name, kernel))
    return dict(by_text.values())
