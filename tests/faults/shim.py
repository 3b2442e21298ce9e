"""Programs whose real calls of the operating system are made to fail."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

__all__ = ["Ask", "asked", "built_shim"]

FAULTS = Path(__file__).parent

Ask = Callable[..., dict[str, Any]]
"""Sends a case to a program, by keywords, and returns its answer."""


def built_shim(build: Path) -> Path:
    """Compiles the shim into an empty directory; returns the library to preload."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        if os.environ.get("JAXINF_REQUIRE_MOUNTS") == "1":
            pytest.fail("make test-faults needs a C compiler to build the shim with")
        pytest.skip("no C compiler to build the shim with")
    library = build / "shim.so"
    flags = ["-shared", "-fPIC", "-O1", "-o", library, FAULTS / "shim.c", "-ldl"]
    subprocess.run([compiler, *flags], check=True)
    return library


@contextlib.contextmanager
def asked(build: Path) -> Iterator[Ask]:
    """Runs `shim_child.py` beside the shim, which is built into an empty directory."""
    environment = {
        **os.environ,
        "LD_PRELOAD": str(built_shim(build)),
        "JAX_PLATFORMS": "cpu",
    }
    with subprocess.Popen(
        [sys.executable, FAULTS / "shim_child.py"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        stdin, stdout = process.stdin, process.stdout

        def ask(**case: Any) -> dict[str, Any]:
            print(json.dumps(case), file=stdin)
            stdin.flush()
            return json.loads(stdout.readline())

        yield ask
        stdin.close()
