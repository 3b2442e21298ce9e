"""Kernels as machine code: the compiled form of a `Kernel`, and how it is found.

Invariant: a compiled kernel takes the arguments of `Kernel.evaluate` and has its
effect, with the roundings of jitted optax on XLA's CPU backend; where no compiled form
can be had, the NumPy evaluator runs, and a warning was logged once.
"""

import ctypes
import functools
import logging
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxinf.kernels import libraries, toolchain
from jaxinf.kernels.codecs import CodedSlot
from jaxinf.kernels.emitter import Source, UnsupportedKernelError, emit, header
from jaxinf.kernels.kernel import Kernel
from jaxinf.kernels.lowering import lower
from jaxinf.kernels.passage import Passage, run_evaluator, stored_arrays
from jaxinf.typing import Array

__all__ = [
    "CompiledKernel",
    "compile_kernel",
    "compiled",
    "invoke",
    "runner",
    "scalar_word",
    "source_of",
]

_LOGGER = logging.getLogger("jaxinf.kernels")
_DTYPES = (
    "float32", "bfloat16", "float16", "int32", "uint32",
    "bool", "int8", "uint8", "int16", "uint16",
)  # fmt: skip
_CODES = {jnp.dtype(name): code for code, name in enumerate(_DTYPES)}
_BF16_STOCHASTIC, _INT8_BLOCKS, _BF16_SPLIT = range(len(_DTYPES), len(_DTYPES) + 3)


class _Array(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("beside", ctypes.c_void_p),
        ("dtype", ctypes.c_int32),
        ("key", ctypes.c_uint32),
        ("first", ctypes.c_uint32),
    ]


class _Passage(ctypes.Structure):
    _fields_ = [
        ("given", ctypes.c_void_p),
        ("sums", ctypes.c_void_p),
        ("wanted", ctypes.c_char_p),
        ("wants_params", ctypes.c_int32),
    ]


@dataclass(frozen=True, eq=False)
class CompiledKernel:
    """A kernel in machine code. Thread-safe; releases the GIL while it runs.

    Attributes:
      kernel: What it computes.
      level: What it was compiled for, e.g. ``"x86-64-v3"``.
      origin: ``"package"`` or ``"cache"``.
    """

    kernel: Kernel = field(repr=False)
    level: str
    origin: str
    _function: Callable[..., int] = field(repr=False)
    _constants: tuple[int, ...] = field(repr=False)

    def run(
        self,
        *,
        gradient: Array,
        params: Array | CodedSlot,
        slots: Sequence[Array | CodedSlot],
        scalars: Sequence[np.generic | Array],
        arrays: Sequence[Array],
        out: Array,
        passage: Passage | None = None,
    ) -> bool:
        """Updates one chunk in place; see `Kernel.evaluate`, also for the errors.

        Denormals are read and written as zero. The bits are those of jitted optax on
        XLA's CPU backend: with its fused multiply-adds and reciprocals, which the
        NumPy evaluator does not have.
        """
        kernel = self.kernel
        numbers = kernel.check_arguments(
            gradient=gradient, params=params, slots=slots,
            scalars=scalars, arrays=arrays, out=out,
        )  # fmt: skip
        plain = [v for v in (params, *slots) if not isinstance(v, CodedSlot)]
        chunks = [gradient, out, *plain, *arrays]
        if passage is not None and passage.given is not None:
            chunks.append(passage.given)
        if not all(array.flags.c_contiguous for array in chunks):
            return self._run_copies(
                gradient, params, slots, scalars, arrays, out, passage
            )
        return invoke(
            self._function, gradient=gradient, params=params, out=out, slots=slots,
            arrays=arrays, scalars=numbers, constants=self._constants,
            passage=passage,
        )  # fmt: skip

    def _run_copies(
        self,
        gradient: Array,
        params: Array | CodedSlot,
        slots: Sequence[Array | CodedSlot],
        scalars: Sequence[np.generic | Array],
        arrays: Sequence[Array],
        out: Array,
        passage: Passage | None,
    ) -> bool:
        """The same on strided views."""
        if passage is not None and passage.given is not None:
            passage.given = np.ascontiguousarray(passage.given)
        state = (params, *slots)
        views = [out, *(v for v in state if not isinstance(v, CodedSlot))]
        copies = [np.ascontiguousarray(view) for view in views]
        plain = iter(copies[1:])
        master, *others = (
            s if isinstance(s, CodedSlot) else next(plain) for s in state
        )
        finite = self.run(
            gradient=np.ascontiguousarray(gradient),
            params=master,
            slots=others,
            scalars=scalars,
            arrays=[np.ascontiguousarray(array) for array in arrays],
            out=copies[0],
            passage=passage,
        )
        for view, copy in zip(views, copies, strict=True):
            view[...] = copy
        return finite


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
    """Calls an entry point of `libraries` on contiguous arrays; nothing is checked."""
    passage = passage or Passage()
    num_stored = len(stored_arrays(params, slots))
    reads = passage.reads or [False] * num_stored
    writes = passage.writes or [False] * num_stored
    wanted = bytes([*reads, *writes])
    sums = (ctypes.c_uint32 * len(wanted))()
    given = passage.given
    finite = function(
        gradient.size,
        ctypes.byref(_array(gradient)),
        ctypes.byref(_array(params)),
        ctypes.byref(_array(out)),
        (_Array * max(1, len(slots)))(*map(_array, slots)),
        (_Array * max(1, len(arrays)))(*map(_array, arrays)),
        (ctypes.c_uint32 * max(1, len(scalars)))(*map(scalar_word, scalars)),
        (ctypes.c_uint32 * max(1, len(constants)))(*constants),
        ctypes.byref(
            _Passage(
                None if given is None else given.ctypes.data,
                ctypes.addressof(sums),
                wanted,
                passage.wants_params,
            )
        ),
    )
    told = tuple(
        s if is_wanted else 0 for s, is_wanted in zip(sums, wanted, strict=True)
    )
    passage.read, passage.written = told[:num_stored], told[num_stored:]
    return bool(finite)


def runner(kernel: Kernel) -> Callable[..., bool]:
    """What to call with `Kernel.evaluate`'s arguments: compiled code if possible.

    It takes a `Passage`, too.
    """
    found = compiled(kernel)
    return functools.partial(_evaluate, kernel) if found is None else found.run


def _evaluate(
    kernel: Kernel, *, passage: Passage | None = None, **arguments: Any
) -> bool:
    if passage is None:
        return kernel.evaluate(**arguments)
    return run_evaluator(kernel.evaluate, passage, **arguments)


def compiled(kernel: Kernel) -> CompiledKernel | None:
    """The kernel as machine code; None where it cannot be had, after one warning.

    The package brings the common optimizers; others are compiled once and kept in
    `libraries.cache_directory`. Blocks while the compiler runs. Thread-safe; a
    process asks once for each kernel. ``JAXINF_KERNELS=numpy`` turns it off.
    """
    with _LOCK:
        if kernel not in _FOUND:
            _FOUND[kernel] = _find(kernel)
        return _FOUND[kernel]


def compile_kernel(
    kernel: Kernel, *, level: str, compiler: str | None = None
) -> CompiledKernel:
    """The kernel for one level: the package's, or by `compiler` if that is given.

    Raises:
      UnsupportedKernelError: It has no C++ form.
      CompilerError: There is no compiler, or it failed.
    """
    source = emit(lower(kernel))
    function, origin = None, "package"
    if compiler is None:
        function = libraries.load_prebuilt(source.text, level)
        compiler = compiler or toolchain.find_compiler()
    if function is None:
        if compiler is None:
            raise toolchain.CompilerError("no C++ compiler (c++, g++ or clang++)")
        text = source_of(kernel)
        function, origin = libraries.load_cached(text, level, compiler), "cache"
    return CompiledKernel(
        kernel=kernel,
        level=level,
        origin=origin,
        _function=function,
        _constants=source.constants,
    )


def source_of(kernel: Kernel, title: str = "An optimizer's kernel.") -> str:
    """The C++ of a kernel with its header comment.

    Raises:
      UnsupportedKernelError: It has no C++ form.
    """
    source: Source = emit(lower(kernel))
    versions = {"jax": jax.__version__, "optax": optax.__version__}
    return header(title, kernel.describe(), versions) + source.text


_LOCK = threading.Lock()
_FOUND: dict[Kernel, CompiledKernel | None] = {}


def _find(kernel: Kernel) -> CompiledKernel | None:
    setting = os.environ.get("JAXINF_KERNELS", "").strip() or "auto"
    if setting == "numpy":
        return None
    if setting != "auto" and setting not in toolchain.LEVELS:
        raise ValueError(
            "JAXINF_KERNELS: expected auto, numpy or one of "
            f"{', '.join(toolchain.LEVELS)}, found {setting!r}"
        )
    available = toolchain.levels()
    if not available or (setting != "auto" and setting not in available):
        _warn("this processor is below x86-64-v3" if not available else
              f"this processor has no {setting}")  # fmt: skip
        return None
    try:
        return compile_kernel(
            kernel, level=available[0] if setting == "auto" else setting
        )
    except (UnsupportedKernelError, toolchain.CompilerError, OSError) as error:
        _warn(str(error))
        return None


@functools.cache
def _warn(reason: str) -> None:
    _LOGGER.warning(
        "kernels run on NumPy, at about a third of the speed and with roundings that "
        "differ from jitted optax's: %s",
        reason,
    )


def _array(array: Array | CodedSlot) -> _Array:
    if not isinstance(array, CodedSlot):
        return _Array(array.ctypes.data, None, _CODES[array.dtype], 0, 0)
    codes, scales, rest = array.codes.ctypes.data, array.scales, array.remainders
    if rest is not None:
        return _Array(codes, rest.ctypes.data, _BF16_SPLIT, array.key, array.first)
    if scales is None:
        return _Array(codes, None, _BF16_STOCHASTIC, array.key, array.first)
    return _Array(codes, scales.ctypes.data, _INT8_BLOCKS, array.key, array.first)


def scalar_word(number: np.generic | Array) -> int:
    """The 32 bits in which a kernel takes a scalar; all set for true."""
    if number.dtype == np.bool_:
        return 0xFFFFFFFF if number else 0
    return int(np.asarray(number).view(np.uint32))
