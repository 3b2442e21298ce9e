"""Programs whose real calls of the operating system are made to fail."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

FAULTS = Path(__file__).parent


def built_shim(build):
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
