"""The wheels that `make wheels` has built, and a bare environment with one of them."""

import importlib.util
import os
import platform
import subprocess
import sys
import venv
from dataclasses import dataclass, field
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COMPILERS = ("cc", "c++", "gcc", "g++", "clang", "clang++")


@dataclass(frozen=True)
class Wheels:
    """The directory that JAXINF_TEST_WHEELS names."""

    directory: Path

    def of(self, machine):
        """Returns a machine's wheel; skips the test if it was not asked for."""
        found = list(self.directory.glob(f"jaxinf-*_{machine}.whl"))
        if not found:
            pytest.skip(f"no wheel for {machine} in {self.directory}")
        (wheel,) = found
        return wheel

    @property
    def zig(self):
        spec = importlib.util.find_spec("ziglang")
        assert spec, "ziglang is missing; make wheels installs it"
        return str(Path(spec.origin).parent / "zig")


@pytest.fixture(scope="session")
def wheels():
    setting = os.environ.get("JAXINF_TEST_WHEELS")
    if not setting:
        pytest.skip("JAXINF_TEST_WHEELS is not set; use make wheels")
    return Wheels(Path(setting).absolute())


@dataclass(frozen=True)
class Bare:
    """An environment with the wheel and what it requires, and no compiler.

    The compilers in its PATH only write their names to a file, and fail.
    """

    directory: Path
    variables: dict[str, str] = field(default_factory=dict)

    @property
    def python(self):
        return self.directory / "bin" / "python"

    @property
    def packages(self):
        (found,) = (self.directory / "lib").glob("python*/site-packages")
        return found

    def called(self):
        """Returns the names of the compilers that were called."""
        log = self.directory / "called"
        return log.read_text().split() if log.exists() else []

    def run(self, *words, check=True, **variables):
        """Runs Python with no variable of this process's."""
        result = subprocess.run(
            [str(self.python), *map(str, words)],
            cwd=self.directory, env=self.variables | variables,
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert not check or result.returncode == 0, result.stdout + result.stderr
        return result


@pytest.fixture(scope="session")
def bare(wheels, tmp_path_factory):
    directory = tmp_path_factory.mktemp("bare")
    venv.create(directory / "venv", with_pip=False)
    found = Bare(directory / "venv")
    traps = found.directory / "traps"
    traps.mkdir()
    for name in COMPILERS:
        script = f"#!/bin/sh\necho {name} >> {found.directory / 'called'}\nexit 1\n"
        (traps / name).write_text(script)
        (traps / name).chmod(0o755)
    pip = [sys.executable, "-m", "pip", "--python", str(found.python), "install"]
    wheel = str(wheels.of(platform.machine()))
    subprocess.run([*pip, "--quiet", "--only-binary", ":all:", wheel], check=True)
    home = {"HOME": str(directory), "XDG_CACHE_HOME": str(directory / "cache")}
    variables = home | {"PATH": str(traps), "JAX_PLATFORMS": "cpu"}
    return Bare(found.directory, variables)
