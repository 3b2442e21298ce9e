"""Card kernels on a machine without a card, and the host's table for real cards.

Invariant: a library is built from the same sources as for synthesis, with the headers
in ``hls/csim`` in place of the vendor's. With this host's table of estimates, a card's
kernel gives the bits of the host's on every processor: both compute ``cpp/rsqrt.hpp``.
"""

import ctypes
import functools
import hashlib
import importlib.resources
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from jaxinf.kernels.card_kernels import ESTIMATES_BYTES, CardKernel
from jaxinf.kernels.card_source import card_source
from jaxinf.native import cached_library, libraries, load_library, toolchain
from jaxinf.typing import Array

_LOGGER = logging.getLogger("jaxinf.kernels")
_FLAGS = (
    "-std=c++17", "-O2", "-fPIC", "-shared", "-fvisibility=hidden",
    "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math",
    "-Wall", "-Wno-unknown-pragmas", "-Wno-unused-label", "-DJAXINF_CSIM",
    "-DJAXINF_CPU_INSTRUCTIONS",
)  # fmt: skip
_WITH_FMA = ("x86-64-v3", "armv8-a")


def card_library(*cards: CardKernel) -> Path:
    """Returns a shared library with kernels of one body, compiled at first use; blocks.

    Each is an ``extern "C"`` function of the card kernel's name. It returns nothing and
    takes `CardKernel.arguments`: pointers, aligned to 64 bytes and with memory in
    multiples of 64 bytes, then 32-bit scalars. Calls from several threads are
    independent. Errors are those of `load_function`.
    """
    compiler = toolchain.find_compiler()
    if compiler is None:
        raise toolchain.CompilerError(
            f"card kernels run here as compiled C++: {toolchain.NO_COMPILER}"
        )
    hls = hls_directory()
    # The bodies' ``#include "shell.hpp"`` finds the card's.
    include = hls / "include", hls / "csim", toolchain.INCLUDE, toolchain.GENERATED
    # Without the processor's fused multiply-add each one would be a slow call.
    level = next((name for name in toolchain.levels() if name in _WITH_FMA), None)
    command = [*toolchain.compiler_command(compiler, level), *_FLAGS]
    command += [f"-I{folder}" for folder in include]
    text = card_source(cards)
    digest = hashlib.sha256(text.encode())
    headers = sorted(path for folder in include[:3] for path in folder.glob("*.h*"))
    for path in (*headers, toolchain.GENERATED / f"{cards[0].body}.cpp"):
        digest.update(path.read_bytes())
    digest.update(toolchain.compiler_identity(compiler, command))

    def compile_to(output: Path) -> None:
        source = output.with_suffix(".cpp")
        source.write_text(text)
        toolchain.run_compiler([*command, str(source), "-lm", "-o", str(output)])

    return cached_library(f"card-{digest.hexdigest()}", compile_to)


def card_function(card: CardKernel) -> Callable[..., None]:
    """Returns the kernel of `card_library` with argument types; releases the GIL."""
    function: Any = getattr(load_library(card_library(card)), card.name)
    pointers, scalars = len(card.pointers), len(card.scalars)
    function.argtypes = [ctypes.c_void_p] * pointers + [ctypes.c_int32] * scalars
    function.restype = None
    return function


def hls_directory() -> Path:
    """Returns ``hls/`` of a checkout, or the installed copy of its headers."""
    checkout = Path(__file__).parents[2] / "hls"
    if (checkout / "csim" / "hls_stream.h").exists():
        return checkout
    return Path(str(importlib.resources.files("jaxinf_hls")))


@functools.cache
def rsqrt_estimates() -> Array:
    """Returns the host's estimates of 1 / sqrt(x) as a read-only table.

    The first call takes 0.1 s, or runs the compiler.

    Returns:
      ``(ESTIMATES_BYTES / 4,)`` uint32. [0] is the number of Newton steps that the host
      takes, 1 or 2. It is 0 if the host has no such estimate: its processor is neither
      x86-64 nor aarch64, or the instruction does not read a table. A card then rounds
      sqrt(x) and its reciprocal. From [16] on stand the entries of ``cpp/rsqrt.hpp``,
      two in a word, the first in the lower half.
    """
    table = np.zeros(ESTIMATES_BYTES // 4, np.uint32)
    reason = ""
    try:
        function = libraries.load_helper(toolchain.RSQRT_ESTIMATES)
    except (toolchain.CompilerError, OSError) as error:
        function, reason = None, str(error)
    if function is not None:
        function.argtypes = [ctypes.c_void_p]
        table[0] = function(table[16:].ctypes.data)
        if not table[0]:
            reason = "this processor's instruction does not estimate by a table"
    if reason:
        _LOGGER.warning(
            "cards compute 1 / sqrt(x) with other last bits than this host: %s", reason
        )
    table.flags.writeable = False
    return table
