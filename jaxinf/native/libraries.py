"""Compiled C++ on disk: what came with the package, and a cache of the rest.

Invariant: what is loaded is complete: a cached library ends with a checksum of itself,
is written under another name and renamed; a damaged one is compiled again.
"""

import ctypes
import functools
import hashlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jaxinf.native import toolchain

__all__ = [
    "cache_directory",
    "cached_library",
    "load_cached",
    "load_helper",
    "load_prebuilt",
]

_DIGEST_BYTES = hashlib.sha256().digest_size


def cache_directory() -> Path:
    """``$JAXINF_CACHE_DIR``, ``$XDG_CACHE_HOME/jaxinf`` or ``~/.cache/jaxinf``."""
    if explicit := os.environ.get("JAXINF_CACHE_DIR"):
        return Path(explicit)
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(base) / "jaxinf"


def load_prebuilt(source: str, level: str) -> Any:
    """The entry point of `source` where the installed package has it, else None.

    It has no prototype yet, here and below: who calls it knows its arguments.
    """
    library = _prebuilt_library(level)
    if library is None:
        return None
    return getattr(library, toolchain.entry_point(source), None)


def load_cached(source: str, level: str, compiler: str) -> Any:
    """The entry point of `source`, compiled unless the cache has it; blocks.

    Processes that need the same library at once may each compile it; the last one's
    file stays. Where the cache cannot be written, the library lives as long as the
    process.

    Raises:
      CompilerError: The compiler failed.
    """
    key = toolchain.key_of_library(source, compiler, level)
    compile_ = functools.partial(_compile, source, level, compiler)
    try:
        path = cached_library(key, compile_)
    except OSError:
        with tempfile.TemporaryDirectory(prefix="jaxinf-") as directory:
            path = Path(directory) / f"{key}.so"
            compile_(path)
            return ctypes.CDLL(str(path)).jaxinf_entry
    return ctypes.CDLL(str(path)).jaxinf_entry


def load_helper(path: Path) -> Any:
    """The entry point of one of `toolchain.HELPERS`.

    Blocks while it is compiled, where the installed package has none. None on other
    processors than x86-64.

    Raises:
      CompilerError: There is no compiler, or it failed.
    """
    levels = toolchain.levels()
    if not levels:
        return None
    source = path.read_text()
    function = load_prebuilt(source, levels[0])
    if function is not None:
        return function
    compiler = toolchain.find_compiler()
    if compiler is None:
        raise toolchain.CompilerError("no C++ compiler (c++, g++ or clang++)")
    return load_cached(source, levels[0], compiler)


def cached_library(key: str, compile_: Callable[[Path], None]) -> Path:
    """The library of a key in the cache; `compile_` writes it where it is not there.

    Raises:
      CompilerError: The compiler failed.
      OSError: The cache cannot be written.
    """
    path = cache_directory() / "kernels" / f"{key}.so"
    if not _is_complete(path):
        _write(path, compile_)
    return path


@functools.cache
def _prebuilt_library(level: str) -> ctypes.CDLL | None:
    path = toolchain.prebuilt_library(level)
    try:
        return ctypes.CDLL(str(path)) if path.exists() else None
    except OSError:
        return None


def _compile(source: str, level: str, compiler: str, output: Path) -> None:
    text = output.with_suffix(".cpp")
    text.write_text(source)
    toolchain.compile_source(text, output, compiler=compiler, level=level)


def _write(path: Path, compile_: Callable[[Path], None]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix="new-") as directory:
        new = Path(directory) / path.name
        compile_(new)
        # ELF ignores what follows it: the digest travels with the library.
        with new.open("ab") as file:
            file.write(hashlib.sha256(new.read_bytes()).digest())
        new.replace(path)


def _is_complete(path: Path) -> bool:
    try:
        content = path.read_bytes()
    except OSError:
        return False
    library, digest = content[:-_DIGEST_BYTES], content[-_DIGEST_BYTES:]
    return hashlib.sha256(library).digest() == digest
