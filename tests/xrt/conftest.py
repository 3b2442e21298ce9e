"""Tests on the real XRT runtime, without a card: ``make test-xrt``.

They are collected in a sandbox alone, in which `run.py` runs each file.
"""

import os
from pathlib import Path

import pytest
from swemu.build import build_runtime
from swemu.sandbox import Sandbox

RUN_DIRECTORY = os.environ.get("SDACCEL_EM_RUN_DIR", "")
collect_ignore_glob = [] if RUN_DIRECTORY else ["test_*.py"]


@pytest.fixture
def runtime():
    return build_runtime(Path(os.environ["JAXINF_TEST_XRT"]))


@pytest.fixture
def sandbox(runtime):
    """A sandbox within the file's own, for programs that end badly."""
    inner = Sandbox(runtime, within=Path(RUN_DIRECTORY).parent)
    yield inner
    inner.close()
