"""Kernels as machine code: the compiled form of a `Kernel`, and how it is found.

Invariant: a compiled kernel takes the arguments of `evaluate` and has its
effect, with the roundings of jitted optax on XLA's CPU backend; where no compiled form
can be had, the NumPy evaluator runs, and a warning was logged once.
"""

import ctypes
import functools
import logging
import operator
import os
import struct
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxinf.kernels.checking import check_arguments
from jaxinf.kernels.codecs import CodedSlot
from jaxinf.kernels.emitter import Source, UnsupportedKernelError, emit, header
from jaxinf.kernels.evaluator import evaluate
from jaxinf.kernels.lowering import lower
from jaxinf.kernels.passage import Passage, run_evaluator
from jaxinf.native import libraries, toolchain
from jaxinf.program.kernel import Kernel
from jaxinf.typing import BFLOAT16, FLOAT16, FLOAT32, Array

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
class _Block:
    """All arguments of one call in one piece of memory: packed at once.

    Arrays, passage, then words (scalars, constants, sums), then what is wanted.

    Attributes:
      packer: of all of it.
      num_bytes: as long as that.
      offsets: of gradient, params, out, slots, arrays, scalars, constants, passage.
      sums: where those are.
      sums_unpacker: of them.
      wanted: where that is.
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
    ) -> "_Block":
        """For so many of each; the words are scalars and constants."""
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
    num_stored = _num_stored(params) + sum(map(_num_stored, slots))
    none = (False,) * num_stored
    wanted = bytes((*(passage.reads or none), *(passage.writes or none)))
    num_words = len(scalars) + len(constants)
    block = _Block.of(len(slots), len(arrays), len(scalars), num_words, len(wanted))
    memory = ctypes.create_string_buffer(block.num_bytes)
    address = ctypes.addressof(memory)
    given = passage.given
    fields: list[Any] = []
    for array in (gradient, params, out, *slots, *arrays):
        fields += _array(array)
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


def runner(kernel: Kernel) -> Callable[..., bool]:
    """What to call with `evaluate`'s arguments: compiled code if possible.

    It takes a `Passage`, too.
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


def source_of(
    kernel: Kernel,
    title: str = "An optimizer's kernel.",
    versions: Mapping[str, str] | None = None,
) -> str:
    """The C++ of a kernel with its header comment.

    Args:
      kernel: any.
      title: the comment's first line.
      versions: of the libraries that the equations came from, by name.

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


def _array(array: Array | CodedSlot) -> tuple[int, int, int, int, int]:
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
    """Of how many arrays it is stored."""
    return 2 if isinstance(state, CodedSlot) and state.beside is not None else 1


def scalar_word(number: np.generic | Array) -> int:
    """The 32 bits in which a kernel takes a scalar; all set for true."""
    if number.dtype == np.bool_:
        return _WORD if number else 0
    return int(np.asarray(number).view(np.uint32))
