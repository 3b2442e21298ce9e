"""Compiles C++ into a library for this machine.

Invariant: only the standard library is used, so that the build of a wheel can run this
file without jaxinf's dependencies.
"""

import functools
import hashlib
import importlib.util
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

COMPILERS = ("c++", "g++", "clang++")
"""Compilers to look for if ``CXX`` names none; then that of the package ziglang."""

NO_COMPILER = (
    "expected a C++ compiler (the one that CXX names, or c++, g++, clang++, or the "
    "package ziglang), found none; install one, or run: pip install 'jaxinf[compiler]'"
)

LEVELS = {"x86_64": ("x86-64-v4", "x86-64-v3", "x86-64"), "aarch64": ("armv8-a",)}
"""Levels of a processor to compile for, best first, by its name in ``uname -m``; those
of x86-64 give the same bits."""

INCLUDE = Path(__file__).parent / "cpp"
GENERATED = Path(__file__).parent / "generated"
RSQRT_ESTIMATES = INCLUDE / "rsqrt_estimates.cpp"
TRANSFERS = INCLUDE / "transfers.cpp"
HELPERS = (RSQRT_ESTIMATES, TRANSFERS)
"""Sources that are compiled beside kernels."""
PREBUILT = Path(__file__).parent / "prebuilt"

_V3 = "avx avx2 bmi1 bmi2 f16c fma abm movbe xsave"
_V4 = f"{_V3} avx512f avx512bw avx512cd avx512dq avx512vl"
_CPU_FLAGS = {"x86-64-v4": frozenset(_V4.split()), "x86-64-v3": frozenset(_V3.split())}
_ZIG_CPUS = {"x86-64": "x86_64", "armv8-a": "generic"}

# Only explicit fused multiply-adds in the source; the compiler adds none. Nothing needs
# the C++ library when it runs.
_FLAGS = (
    "-std=c++17", "-O2", "-ftree-vectorize", "-fPIC", "-fvisibility=hidden",
    "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-fno-exceptions",
    "-fno-threadsafe-statics", "-Wno-psabi",
)  # fmt: skip


class CompilerError(Exception):
    """The compiler failed; the text is its message."""


def cache_directory() -> Path:
    """``$JAXINF_CACHE_DIR``, ``$XDG_CACHE_HOME/jaxinf`` or ``~/.cache/jaxinf``."""
    if explicit := os.environ.get("JAXINF_CACHE_DIR"):
        return Path(explicit)
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(base) / "jaxinf"


@functools.cache
def levels() -> tuple[str, ...]:
    """The levels of `LEVELS` that this processor has, best first."""
    named = re.search(r"(?m)^flags\s*:(.*)", Path("/proc/cpuinfo").read_text())
    flags = set(named[1].split()) if named else set[str]()
    candidates = LEVELS.get(platform.machine(), ())
    return tuple(x for x in candidates if _CPU_FLAGS.get(x, frozenset()) <= flags)


def find_compiler() -> str | None:
    """Finds the C++ compiler: ``$CXX``, one of `COMPILERS`, ziglang's, or None."""
    if wanted := os.environ.get("CXX", "").strip():
        return shutil.which(wanted.removesuffix(" c++"))  # as in "zig c++"
    paths = filter(None, map(shutil.which, COMPILERS))
    return next(paths, None) or _installed_zig()


def is_zig(compiler: str) -> bool:
    """Whether a compiler is Zig, which wants its flags in another form."""
    return Path(compiler).name == "zig"


def _installed_zig() -> str | None:
    spec = importlib.util.find_spec("ziglang")
    if spec is None or spec.origin is None:
        return None
    return shutil.which("zig", path=str(Path(spec.origin).parent))


def content_hash(source: str) -> str:
    """Hashes a source, without its first comment, and the headers."""
    digest = hashlib.sha256(_headers())
    lines = source.splitlines(keepends=True)
    while lines and (lines[0].startswith("//") or not lines[0].strip()):
        del lines[0]
    digest.update("".join(lines).encode())
    return digest.hexdigest()


def entry_point(source: str) -> str:
    """Returns the name of the source's function in a library of several."""
    return f"jaxinf_{content_hash(source)[:32]}"


def prebuilt_library(level: str) -> Path:
    return PREBUILT / f"jaxinf-{level}.so"


def library_key(source: str, compiler: str, level: str) -> str:
    """Hashes content, compiler and flags of a compiled source."""
    command = [*compiler_command(compiler, level), *_FLAGS, f"-I{INCLUDE}"]
    digest = hashlib.sha256(content_hash(source).encode())
    digest.update(compiler_identity(compiler, command))
    return digest.hexdigest()


def compiler_identity(compiler: str, command: Sequence[str]) -> bytes:
    """Returns bytes that differ for another compiler, version or flag."""
    path = os.path.realpath(compiler)
    status = os.stat(path)
    return repr((path, status.st_size, status.st_mtime_ns, *command)).encode()


def compiler_command(
    compiler: str, level: str | None, target: str | None = None
) -> list[str]:
    """Returns the beginning of a command line: the compiler, for a processor.

    Args:
      level: One of `LEVELS`, or None for the compiler's default.
      target: Another machine for Zig to compile for, as in `compile_package`.
    """
    if not is_zig(compiler):
        return [compiler, *([f"-march={level}"] if level else [])]
    cpu = _ZIG_CPUS.get(level, level.replace("-", "_")) if level else None
    target_words = ["-target", target] if target else []
    return [compiler, "c++", *target_words, *([f"-mcpu={cpu}"] if cpu else [])]


def compile_source(
    source: Path, output: Path, *, compiler: str, level: str, target: str | None = None
) -> None:
    """Compiles one file, whose entry point is then ``jaxinf_entry``."""
    command = [*compiler_command(compiler, level, target), *_FLAGS]
    compile_ = [*command, f"-I{INCLUDE}", str(source)]
    if not is_zig(compiler):
        link = ["-shared", "-s", "-Wl,--as-needed", "-lm", "-o", str(output)]
        run_compiler([*compile_, *link])
        return
    # In one call Zig would compile its C++ library first, which takes a minute.
    code = output.with_suffix(".o")
    run_compiler([*compile_, "-c", "-o", str(code)])
    _, _, *target_words = compiler_command(compiler, None, target)
    link = [compiler, "cc", *target_words, "-shared", "-s", str(code)]
    run_compiler([*link, "-lm", "-lc", "-o", str(output)])
    code.unlink()


def compile_package(
    output: Path, *, compiler: str, level: str, target: str | None = None
) -> None:
    """Compiles `GENERATED` and `HELPERS` into one library, for a wheel.

    Args:
      target: Another machine for Zig to compile for, e.g. ``aarch64-linux-gnu.2.28``,
        where the number is the oldest version of glibc.
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
    try:
        compile_source(text, output, compiler=compiler, level=level, target=target)
    finally:
        text.unlink()


def run_compiler(arguments: Sequence[str]) -> None:
    """Runs a compiler's command line; a `CompilerError` has its first message."""
    try:
        result = subprocess.run(
            arguments, capture_output=True, text=True, errors="replace", check=False,
            env=_environment(arguments[0]),
        )  # fmt: skip
    except OSError as error:
        raise CompilerError(f"{arguments[0]}: {error}") from error
    if result.returncode:
        text = result.stderr.strip()
        errors = [line for line in text.splitlines() if "error" in line] or [text]
        raise CompilerError(
            f"{arguments[0]} exited with status {result.returncode}: {errors[0]}"
        )


def _environment(compiler: str) -> dict[str, str] | None:
    """Returns the environment of a compiler; Zig keeps its libraries in our cache."""
    if not is_zig(compiler):
        return None
    directory = str(cache_directory() / "zig")
    caches = {f"ZIG_{kind}_CACHE_DIR": directory for kind in ("GLOBAL", "LOCAL")}
    return caches | os.environ


@functools.cache
def _headers() -> bytes:
    return b"".join(path.read_bytes() for path in sorted(INCLUDE.glob("*.hpp")))
