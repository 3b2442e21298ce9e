"""Compiles C++ into a library for this machine.

Invariant: only the standard library is used, so that the build of a wheel can run this
file without jaxinf's dependencies.
"""

import functools
import hashlib
import os
import platform
import shutil
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path

__all__ = [
    "BLOCK_CODES",
    "COMPILERS",
    "GENERATED",
    "HELPERS",
    "LEVELS",
    "PREBUILT",
    "RSQRT_ESTIMATES",
    "TRANSFERS",
    "CompilerError",
    "command",
    "compile_package",
    "compile_source",
    "content_hash",
    "entry_point",
    "find_compiler",
    "key_of_library",
    "levels",
    "levels_of",
    "prebuilt_library",
    "run_compiler",
]

COMPILERS = ("c++", "g++", "clang++")
"""Compilers to look for if ``CXX`` names none."""

LEVELS = ("x86-64-v4", "x86-64-v3")
"""Processor levels to compile for, best first; all give the same bits."""

INCLUDE = Path(__file__).parent / "cpp"
GENERATED = Path(__file__).parent / "generated"
RSQRT_ESTIMATES = INCLUDE / "rsqrt_estimates.cpp"
TRANSFERS = INCLUDE / "transfers.cpp"
BLOCK_CODES = INCLUDE / "block_codes.cpp"
HELPERS = (RSQRT_ESTIMATES, TRANSFERS, BLOCK_CODES)
"""Sources that are compiled beside kernels."""
PREBUILT = Path(__file__).parent / "prebuilt"

_V3 = "avx avx2 bmi1 bmi2 f16c fma abm movbe xsave"
_V4 = f"{_V3} avx512f avx512bw avx512cd avx512dq avx512vl"
_CPU_FLAGS = {"x86-64-v4": frozenset(_V4.split()), "x86-64-v3": frozenset(_V3.split())}

# Only explicit fused multiply-adds in the source; the compiler adds none.
_FLAGS = (
    "-std=c++17", "-O2", "-ftree-vectorize", "-fPIC", "-shared",
    "-fvisibility=hidden", "-ffp-contract=off", "-fno-math-errno",
    "-fno-trapping-math", "-Wno-psabi",
)  # fmt: skip


class CompilerError(Exception):
    """The compiler failed; the text is its message."""


@functools.cache
def levels() -> tuple[str, ...]:
    """The levels of `LEVELS` that this processor has, best first."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return ()
    for line in text.splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "flags":
            return levels_of(value.split())
    return ()


def levels_of(cpu_flags: Iterable[str]) -> tuple[str, ...]:
    """The levels of a processor with the flags that ``/proc/cpuinfo`` names."""
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return ()
    flags = set(cpu_flags)
    return tuple(level for level in LEVELS if _CPU_FLAGS[level] <= flags)


def find_compiler() -> str | None:
    """Finds the C++ compiler: ``$CXX``, or the first of `COMPILERS`, or None."""
    wanted = os.environ.get("CXX", "").strip()
    names = [wanted] if wanted else COMPILERS
    return next((path for name in names if (path := shutil.which(name))), None)


def content_hash(source: str) -> str:
    """Hashes a source, without its first comment, and the headers."""
    digest = hashlib.sha256(_headers())
    lines = source.splitlines(keepends=True)
    while lines and (lines[0].startswith("//") or not lines[0].strip()):
        del lines[0]
    digest.update("".join(lines).encode())
    return digest.hexdigest()


def entry_point(source: str) -> str:
    """Returns the name of its function in a library of several."""
    return f"jaxinf_{content_hash(source)[:32]}"


def prebuilt_library(level: str) -> Path:
    """Returns the package's library for a level; it may be missing."""
    return PREBUILT / f"jaxinf-{level}.so"


def key_of_library(source: str, compiler: str, level: str) -> str:
    """Hashes content, compiler and flags of a compiled source."""
    path = os.path.realpath(compiler)
    status = os.stat(path)
    identity = (path, status.st_size, status.st_mtime_ns, *command(compiler, level))
    digest = hashlib.sha256(content_hash(source).encode())
    digest.update(repr(identity).encode())
    return digest.hexdigest()


def command(compiler: str, level: str) -> list[str]:
    """Returns the compiler's command line, without files and entry point."""
    return [compiler, f"-march={level}", *_FLAGS, f"-I{INCLUDE}"]


def compile_source(source: Path, output: Path, *, compiler: str, level: str) -> None:
    """Compiles one file, whose entry point is then ``jaxinf_entry``.

    Raises:
      CompilerError: The compiler failed.
    """
    run_compiler([*command(compiler, level), str(source), "-lm", "-o", str(output)])


def compile_package(output: Path, *, compiler: str, level: str) -> None:
    """Compiles `GENERATED` and `HELPERS` into one library, for a wheel.

    Raises:
      CompilerError: The compiler failed.
    """
    lines = ['#include "shell.hpp"', ""]
    sources = [*sorted(GENERATED.glob("*.cpp")), *HELPERS]
    for number, source in enumerate(sources):
        lines += [
            f"#define JAXINF_ENTRY {entry_point(source.read_text())}",
            f"#define Body Body{number}",
            f'#include "{source}"',
            "#undef Body",
            "#undef JAXINF_ENTRY",
            "",
        ]
    text = output.with_suffix(".cpp")
    text.write_text("\n".join(lines))
    compile_source(text, output, compiler=compiler, level=level)
    text.unlink()


def run_compiler(arguments: Sequence[str]) -> None:
    """Runs a command line.

    Raises:
      CompilerError: It failed.
    """
    try:
        result = subprocess.run(
            arguments, capture_output=True, text=True, errors="replace", check=False
        )
    except OSError as error:
        raise CompilerError(f"{arguments[0]}: {error}") from error
    if result.returncode:
        text = result.stderr.strip()[-2000:]
        raise CompilerError(
            f"{' '.join(arguments)} exited with status {result.returncode}:\n{text}"
        )


@functools.cache
def _headers() -> bytes:
    return b"".join(path.read_bytes() for path in sorted(INCLUDE.glob("*.hpp")))
