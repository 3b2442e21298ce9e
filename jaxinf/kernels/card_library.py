"""Card kernels on a machine without a card: the same C++, compiled for its CPU.

Invariant: a library is built from the same sources as for synthesis, with the header
  files in ``hls/csim`` in place of the vendor's.
"""

import ctypes
import functools
import hashlib
import importlib.util
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jaxinf.kernels.card_kernels import CardKernel
from jaxinf.kernels.card_source import card_source
from jaxinf.native import cached_library, load_library, toolchain

_FLAGS = (
    "-std=c++17", "-O2", "-fPIC", "-shared", "-fvisibility=hidden",
    "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math",
    "-Wall", "-Wno-unknown-pragmas", "-Wno-unused-label", "-DJAXINF_CSIM",
    "-DJAXINF_CPU_INSTRUCTIONS",
)  # fmt: skip
_WITH_FMA = ("x86-64-v3", "armv8-a")


def card_library(*cards: CardKernel) -> Path:
    """Returns a shared library with these kernels, compiled at first use; blocks.

    Each is an ``extern "C"`` function of the card kernel's name. It returns nothing and
    takes `CardKernel.arguments`: pointers, aligned to 64 bytes and with memory in
    multiples of 64 bytes, then 32-bit scalars. Calls from several threads are
    independent.

    Args:
      cards: kernels of one body.

    Raises:
      CompilerError: there is no compiler, or it failed.
      OSError: no directory has room for the library, not even the one for temporary
        files.
    """
    compiler = toolchain.find_compiler()
    if compiler is None:
        raise toolchain.CompilerError(
            f"card kernels run here as compiled C++: {toolchain.NO_COMPILER}"
        )
    text, command = card_source(cards), _command(compiler)
    digest = hashlib.sha256(text.encode())
    for path in _inputs(cards[0].body):
        digest.update(path.read_bytes())
    status = os.stat(os.path.realpath(compiler))
    digest.update(repr((command, status.st_size, status.st_mtime_ns)).encode())
    compile_ = functools.partial(_compile, text, command)
    return cached_library(f"card-{digest.hexdigest()}", compile_)


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
    spec = importlib.util.find_spec("jaxinf_hls")
    assert spec
    assert spec.submodule_search_locations
    return Path(next(iter(spec.submodule_search_locations)))


def _command(compiler: str) -> list[str]:
    """Returns a command with the processor's fused multiply-add: a call is slow."""
    level = next((x for x in toolchain.levels() if x in _WITH_FMA), None)
    begin = toolchain.words(compiler, level)
    return [*begin, *_FLAGS, *(f"-I{path}" for path in _include_paths())]


def _include_paths() -> Sequence[Path]:
    """The bodies' ``#include "shell.hpp"`` finds the card's."""
    hls = hls_directory()
    return hls / "include", hls / "csim", toolchain.INCLUDE, toolchain.GENERATED


def _inputs(body: str) -> list[Path]:
    headers = [p for path in _include_paths()[:3] for p in path.glob("*.h*")]
    return [*sorted(headers), toolchain.GENERATED / f"{body}.cpp"]


def _compile(text: str, command: Sequence[str], output: Path) -> None:
    source = output.with_suffix(".cpp")
    source.write_text(text)
    toolchain.run_compiler([*command, str(source), "-lm", "-o", str(output)])
