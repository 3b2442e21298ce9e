"""Compiled C++ on disk: libraries of the package, and a cache of others.

Invariant: a loaded library is complete, and only this user can write it. A cached
library ends with a checksum of itself, is written under another name and renamed. If it
is damaged, or another user could have written it, it is compiled again.
"""

import ctypes
import functools
import hashlib
import logging
import os
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jaxinf.native import toolchain

_LOGGER = logging.getLogger("jaxinf")

_DIGEST_BYTES = hashlib.sha256().digest_size


def load_function(source: str, level: str, compiler: str | None = None) -> Any:
    """Returns the entry point of `source` from the package, or else from the cache.

    If neither has it, this blocks while it is compiled; with `compiler`, the package's
    is not used. The caller sets the argument types.

    Raises:
      CompilerError: There is no compiler, or it failed.
      OSError: See `cached_library`.
    """
    if compiler is None:
        library, name = open_prebuilt(level), toolchain.entry_point(source)
        if (function := getattr(library, name, None)) is not None:
            return function
        compiler = toolchain.find_compiler()
    if compiler is None:
        raise toolchain.CompilerError(toolchain.NO_COMPILER)
    key = toolchain.library_key(source, compiler, level)

    def compile_to(output: Path) -> None:
        text = output.with_suffix(".cpp")
        text.write_text(source)
        toolchain.compile_source(text, output, compiler=compiler, level=level)

    return load_library(cached_library(key, compile_to)).jaxinf_entry


def load_helper(path: Path) -> Any:
    """Returns the entry point of one of `toolchain.HELPERS`; see `load_function`.

    Returns None on processors other than x86-64 and aarch64.
    """
    levels = toolchain.levels()
    return load_function(path.read_text(), levels[0]) if levels else None


def cached_library(key: str, compile_: Callable[[Path], None]) -> Path:
    """Returns a library of the cache by its key; `compile_` makes a missing one.

    Several processes may compile the same library at once; the last file stays.

    Raises:
      CompilerError: The compiler failed.
      OSError: The cache cannot be written, or others can write to it.
    """
    directory = toolchain.cache_directory() / "kernels"
    path = directory / f"{key}.so"
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        _check_owner(directory, os.lstat(directory), stat.S_ISDIR)
        if not _is_sound(path):
            _write(path, compile_)
    except OSError as error:
        raise OSError(
            f"{error}; mend the cache of compiled kernels (chmod go-w), or name a "
            "directory of your own in the variable JAXINF_CACHE_DIR"
        ) from error
    return path


def load_library(path: Path) -> ctypes.CDLL:
    """Loads a library, unless it is damaged or another user could write it."""
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        _check_owner(path.parent, os.fstat(directory), stat.S_ISDIR)
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
        with open(os.open(path.name, flags, dir_fd=directory), "rb") as file:
            _check_owner(path, os.fstat(file.fileno()), stat.S_ISREG)
            _check_digest(path, file.read())
        # The path goes through the descriptor of the checked directory, whose name may
        # now lead elsewhere. The file's name is still needed, as the loader compares
        # names.
        return ctypes.CDLL(f"/proc/self/fd/{directory}/{path.name}")
    finally:
        os.close(directory)


@functools.cache
def open_prebuilt(level: str) -> ctypes.CDLL | None:
    """Opens the installed package's library for a level, once; None without one."""
    path = toolchain.prebuilt_library(level)
    try:
        return ctypes.CDLL(str(path)) if path.exists() else None
    except OSError as error:
        raise OSError(
            f"{error}; this installation of jaxinf is for another system, or damaged; "
            "run: pip install --force-reinstall --no-deps PATH (a wheel or a checkout)"
        ) from error


def _write(path: Path, compile_: Callable[[Path], None]) -> None:
    with tempfile.TemporaryDirectory(dir=path.parent, prefix="new-") as directory:
        new = Path(directory) / path.name
        compile_(new)
        # ELF ignores bytes at the end, so the digest is part of the file.
        with new.open("ab") as file:
            file.write(hashlib.sha256(new.read_bytes()).digest())
        new.chmod(0o700)  # also if the user's umask lets a group write
        new.replace(path)


def _is_sound(path: Path) -> bool:
    try:
        _check_owner(path, os.lstat(path), stat.S_ISREG)
        _check_digest(path, path.read_bytes())
    except FileNotFoundError:
        return False
    except OSError as error:
        _LOGGER.warning("%s; it is compiled again", error)
        return False
    return True


def _check_owner(
    path: Path, status: os.stat_result, is_kind: Callable[[int], bool]
) -> None:
    kind = "directory" if is_kind is stat.S_ISDIR else "file"
    if not is_kind(status.st_mode):
        raise OSError(f"{path}: expected a {kind} of this user's, found something else")
    mode = stat.S_IMODE(status.st_mode)
    if status.st_uid != os.geteuid() or mode & 0o022:
        raise OSError(
            f"{path}: expected a {kind} that this user (uid {os.geteuid()}) owns and "
            f"nobody else can write, found uid {status.st_uid} and mode {mode:o}"
        )


def _check_digest(path: Path, content: bytes) -> None:
    library, digest = content[:-_DIGEST_BYTES], content[-_DIGEST_BYTES:]
    if hashlib.sha256(library).digest() != digest:
        raise OSError(f"{path}: expected a compiled kernel, found a damaged one")
