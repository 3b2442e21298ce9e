"""Tests on the real XRT runtime, without a card: ``make test-xrt``.

They run where ``JAXINF_TEST_XRT`` names a directory for what is built, and are not
collected elsewhere. Each runs in a sandbox (swemu/isolation.py).
"""

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from swemu.build import Runtime, RuntimeUnavailable, build_runtime, build_xclbin
from swemu.isolation import Totals, run_isolated
from swemu.sandbox import Sandbox
from swemu.table import units
from xrt_card import Card
from xrt_kernels import KERNELS, SOURCES

BUILD = os.environ.get("JAXINF_TEST_XRT", "")
TOTALS = Totals()
collect_ignore_glob = [] if BUILD else ["test_*.py"]


def the_runtime() -> Runtime:
    try:
        return build_runtime(Path(BUILD).resolve())
    except RuntimeUnavailable as error:
        pytest.exit(f"tests/xrt cannot run here: {error}", returncode=1)


def pytest_runtest_protocol(item: pytest.Item) -> bool | None:
    if not item.path.is_relative_to(HERE):
        return None  # pytest asks for every test, whatever its directory
    run_isolated(item, the_runtime(), TOTALS)
    return True


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if TOTALS.tests:
        terminalreporter.write_line(
            f"xrt: {TOTALS.tests} tests in process sessions of their own; left behind: "
            f"{TOTALS.processes} processes, {TOTALS.files} files"
        )


@pytest.fixture
def runtime() -> Runtime:
    return the_runtime()


@pytest.fixture
def xclbin() -> Path:
    """The tests' own kernels, two compute units of each."""
    compute_units = units(KERNELS, per_kernel=2)
    return build_xclbin(Path(BUILD).resolve(), compute_units, SOURCES)


@pytest.fixture
def open_card(xclbin: Path) -> Callable[..., Card]:
    """Opens a card by its number, with the tests' kernels."""
    return lambda index=0: Card(index, xclbin)


@pytest.fixture
def sandbox(runtime: Runtime) -> Iterator[Sandbox]:
    """A sandbox within the test's own, for programs that end badly."""
    outer = Path(os.environ["SDACCEL_EM_RUN_DIR"]).parent
    inner = Sandbox(runtime, within=outer)
    yield inner
    inner.close()
