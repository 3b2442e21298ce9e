"""Compiles the standard optimizers' kernels into the wheel; all else: pyproject.toml.

Without a C++ compiler, or on another processor than x86-64 or aarch64, the wheel is
built without them: jaxinf then compiles kernels when it needs them, for which it needs
a compiler, such as that of the extra ``compiler``.

JAXINF_MANYLINUX=2_28 makes a wheel for every Linux with that glibc or a newer one, of
the machine that _PYTHON_HOST_PLATFORM names (linux-aarch64). For another machine than
this one CXX must name Zig. `make wheels` does all this.
"""

import importlib.util
import os
import platform
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent


def load_toolchain():
    """jaxinf's own module, without importing jaxinf, which needs JAX."""
    path = ROOT / "jaxinf" / "native" / "toolchain.py"
    spec = importlib.util.spec_from_file_location("toolchain", path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


toolchain = load_toolchain()
INPUTS = [
    Path(__file__),
    Path(toolchain.__file__),
    *toolchain.INCLUDE.glob("*.hpp"),
    *toolchain.GENERATED.glob("*.cpp"),
    *toolchain.HELPERS,
]
NEWEST_INPUT = max(path.stat().st_mtime for path in INPUTS)
MACHINE = sysconfig.get_platform().partition("-")[2]
MANYLINUX = os.environ.get("JAXINF_MANYLINUX")


def notice(text):
    """To the build's log, which pip shows with ``-v``."""
    print(f"jaxinf: {text}", file=sys.stderr)


class BuildKernels(build_ext):
    """One library a level, named as jaxinf looks for it."""

    def get_ext_filename(self, fullname):
        """`fullname` is the level, with or without the package before it."""
        *package, level = fullname.split(".")
        return str(Path(*package, toolchain.prebuilt_library(level).name))

    def build_extensions(self):
        """Runs the compiler once a level, side by side."""
        with ThreadPoolExecutor() as pool:
            list(pool.map(self.build_extension, self.extensions))

    def build_extension(self, ext):
        """Compiles; a failure is a notice, not an error."""
        level = ext.name.rpartition(".")[2]
        output = Path(self.get_ext_fullpath(ext.name)).absolute()
        output.parent.mkdir(parents=True, exist_ok=True)
        if output.exists() and output.stat().st_mtime > NEWEST_INPUT:
            return
        compiler = toolchain.find_compiler()
        assert compiler
        glibc = (MANYLINUX or "").replace("_", ".")
        target = f"{MACHINE}-linux-gnu.{glibc}" if MANYLINUX else None
        try:
            toolchain.compile_package(
                output, compiler=compiler, level=level, target=target
            )
        except toolchain.CompilerError as error:
            if MANYLINUX:
                raise
            notice(f"built without kernels for {level}: {error}")

    def get_outputs(self):
        """What was built."""
        return [path for path in super().get_outputs() if Path(path).exists()]

    def copy_extensions_to_source(self):
        """For an editable installation, whose package is the source directory."""
        for ext in self.extensions:
            built = Path(self.build_lib, self.get_ext_filename(ext.name))
            if built.exists():
                target = ROOT / self.get_ext_filename(ext.name)
                target.parent.mkdir(exist_ok=True)
                target.write_bytes(built.read_bytes())


class KernelWheel(bdist_wheel):
    """Kernels depend on the processor, and not on the version of Python."""

    def get_tag(self):
        """``py3-none-<platform>``."""
        own = f"manylinux_{MANYLINUX}_{MACHINE}" if MANYLINUX else super().get_tag()[2]
        return ("py3", "none", own)


def extensions():
    """One a level, or none, with a notice."""
    compiler, levels = toolchain.find_compiler(), toolchain.LEVELS.get(MACHINE, ())
    can_target = compiler and (
        toolchain.is_zig(compiler) or platform.machine() == MACHINE
    )
    if MANYLINUX and not (levels and can_target):
        raise SystemExit(
            f"jaxinf: a wheel for manylinux_{MANYLINUX}_{MACHINE}: expected x86_64 or "
            "aarch64, and a C++ compiler for it (on another machine: CXX=…/zig, of the "
            f"package ziglang), found {compiler}; run make wheels"
        )
    if levels and compiler:
        prefix = "jaxinf.native.prebuilt."
        return [Extension(prefix + level, sources=[]) for level in levels]
    reason = toolchain.NO_COMPILER if levels else f"no kernels for {MACHINE}"
    notice(f"built without compiled kernels: {reason}")
    return []


modules = extensions()
commands = {"build_ext": BuildKernels, "bdist_wheel": KernelWheel} if modules else {}
setup(ext_modules=modules, cmdclass=commands)
