"""Compiles the standard optimizers' kernels into the wheel; all else: pyproject.toml.

Without a C++ compiler, or on another processor than x86-64, the wheel is built without
them: jaxinf then compiles kernels when it needs them, or runs them on NumPy.
"""

import importlib.util
import platform
import sys
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
        try:
            toolchain.compile_package(output, compiler=compiler, level=level)
        except toolchain.CompilerError as error:
            print(
                f"jaxinf: built without kernels for {level}: {error}", file=sys.stderr
            )

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
        return ("py3", "none", super().get_tag()[2])


def extensions():
    """One a level, or none, with a notice."""
    if platform.machine().lower() not in ("x86_64", "amd64"):
        reason = f"no kernels for {platform.machine()}"
    elif toolchain.find_compiler() is None:
        reason = "no C++ compiler (c++, g++ or clang++)"
    else:
        prefix = "jaxinf.native.prebuilt."
        return [Extension(prefix + level, sources=[]) for level in toolchain.LEVELS]
    notice(f"built without compiled kernels: {reason}")
    return []


modules = extensions()
commands = {"build_ext": BuildKernels, "bdist_wheel": KernelWheel} if modules else {}
setup(ext_modules=modules, cmdclass=commands)
