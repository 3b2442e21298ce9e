"""Kernels as machine code: finds or compiles the code of a `Kernel`.

Invariant: a compiled kernel has the arguments and the effect of `evaluate`, with the
roundings of jitted optax on XLA's CPU backend. Without a compiled form the NumPy
evaluator runs, after one warning.
"""

import functools
import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxinf.kernels.calls import invoke, with_prototype
from jaxinf.kernels.checking import check_arguments
from jaxinf.kernels.emitter import Source, UnsupportedKernelError, emit, header
from jaxinf.kernels.evaluator import evaluate
from jaxinf.kernels.lowering import lower
from jaxinf.kernels.passage import Passage, run_evaluator
from jaxinf.layout import CodedSlot
from jaxinf.native import libraries, toolchain
from jaxinf.program.kernel import Kernel
from jaxinf.typing import Array

__all__ = [
    "CompiledKernel",
    "compile_kernel",
    "compiled",
    "runner",
    "source_of",
]

_LOGGER = logging.getLogger("jaxinf.kernels")


@dataclass(frozen=True, eq=False)
class CompiledKernel:
    """A kernel in machine code. Thread-safe; releases the GIL while it runs.

    Attributes:
      kernel: The kernel.
      level: Its processor level, e.g. ``"x86-64-v3"``.
      origin: ``"package"`` or ``"cache"``.
      function: Its entry point.
      constants: The words of its literals.
    """

    kernel: Kernel = field(repr=False)
    level: str
    origin: str
    function: Callable[..., int] = field(repr=False)
    constants: tuple[int, ...] = field(repr=False)

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
        """Updates one chunk in place; see `evaluate`, also for the errors.

        Denormals are read and written as zero. The bits are those of jitted optax on
        XLA's CPU backend: with its fused multiply-adds and reciprocals, which the
        NumPy evaluator does not have.
        """
        kernel = self.kernel
        numbers = check_arguments(
            kernel, gradient=gradient, params=params, slots=slots,
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
            self.function, gradient=gradient, params=params, out=out, slots=slots,
            arrays=arrays, scalars=numbers, constants=self.constants,
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
        """Runs the kernel on contiguous copies of strided views."""
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


def runner(kernel: Kernel) -> Callable[..., bool]:
    """Returns a function with `evaluate`'s arguments: compiled code if possible.

    It also takes a `Passage`.
    """
    found = compiled(kernel)
    return functools.partial(_evaluate, kernel) if found is None else found.run


def _evaluate(
    kernel: Kernel, *, passage: Passage | None = None, **arguments: Any
) -> bool:
    if passage is None:
        return evaluate(kernel, **arguments)
    return run_evaluator(kernel, passage, **arguments)


def compiled(kernel: Kernel) -> CompiledKernel | None:
    """Returns the kernel as machine code, or None after one warning.

    The package contains the common optimizers; others are compiled once and kept in
    `toolchain.cache_directory`. Blocks while the compiler runs. Thread-safe; a process
    tries each kernel once. ``JAXINF_KERNELS=numpy`` turns it off.
    """
    with _LOCK:
        if kernel not in _FOUND:
            _FOUND[kernel] = _find(kernel)
        return _FOUND[kernel]


def compile_kernel(
    kernel: Kernel, *, level: str, compiler: str | None = None
) -> CompiledKernel:
    """Returns the kernel for one level, from the package or compiled by `compiler`.

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
            raise toolchain.CompilerError(toolchain.NO_COMPILER)
        text = source_of(kernel)
        function, origin = libraries.load_cached(text, level, compiler), "cache"
    return CompiledKernel(
        kernel=kernel,
        level=level,
        origin=origin,
        function=with_prototype(function),
        constants=source.constants,
    )


def source_of(
    kernel: Kernel,
    title: str = "An optimizer's kernel.",
    versions: Mapping[str, str] | None = None,
) -> str:
    """Returns the C++ of a kernel with its header comment.

    Args:
      kernel: the kernel.
      title: the comment's first line.
      versions: versions of the libraries behind the equations, by name.

    Raises:
      UnsupportedKernelError: It has no C++ form.
    """
    source: Source = emit(lower(kernel))
    return header(title, kernel.describe(), versions or {}) + source.text


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
        _warn("this processor is neither x86-64 nor aarch64" if not available else
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
