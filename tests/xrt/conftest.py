"""Tests on the real XRT runtime, without a card: ``make test-xrt``.

They run where ``JAXINF_TEST_XRT`` names a directory for what is built, and are not
collected elsewhere. Each runs in a sandbox (swemu/isolation.py).
"""

import fcntl
import functools
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from swemu.build import NUM_DEVICES, Runtime, RuntimeUnavailable, build_runtime
from swemu.isolation import Isolation
from swemu.sandbox import Sandbox

HERE = Path(__file__).parent
BUILD = os.environ.get("JAXINF_TEST_XRT", "")
ISOLATION = Isolation()
collect_ignore_glob = [] if BUILD else ["test_*.py"]


def the_runtime() -> Runtime:
    try:
        return build_runtime(Path(BUILD).resolve())
    except RuntimeUnavailable as error:
        pytest.exit(f"tests/xrt cannot run here: {error}", returncode=1)


@functools.cache
def build_cards() -> None:
    """Builds the cards' own kernels, and names them to jaxinf and to its tests.

    The first of several processes builds, and the others wait for it.
    """
    Path(BUILD).mkdir(parents=True, exist_ok=True)
    with (Path(BUILD) / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        the_runtime()
        command = [sys.executable, HERE / "build_cards.py", BUILD]
        result = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    os.environ |= {
        "JAXINF_XCLBIN": result.stdout.strip(),
        "JAXINF_XRT_DEVICES": str(NUM_DEVICES),
        "JAXINF_TEST_CSD": "smartssd",
    }


def pytest_runtest_protocol(item: pytest.Item) -> bool | None:
    """Every test of a run for the emulation, in whatever directory it is."""
    if not BUILD:
        return None
    build_cards()
    ISOLATION.run(item, the_runtime())
    return True


@pytest.fixture
def runtime() -> Runtime:
    return the_runtime()


@pytest.fixture
def sandbox(runtime: Runtime) -> Iterator[Sandbox]:
    """A sandbox within the test's own, for programs that end badly."""
    outer = Path(os.environ["SDACCEL_EM_RUN_DIR"]).parent
    inner = Sandbox(runtime, within=outer)
    yield inner
    inner.close()
