"""Runs in several processes, each program once."""

import functools
import os

import pytest
from processes import run_alone


@pytest.fixture(scope="session")
def alone(tmp_path_factory):
    """Runs a program in one process; the same arguments run once, compiled as now."""

    @functools.cache
    def run_once(flags, *arguments, num_devices=2):
        store = tmp_path_factory.mktemp("alone") / "store"
        return run_alone(store, *arguments, num_devices=num_devices)

    def run(*arguments, **options):
        return run_once(os.environ.get("XLA_FLAGS"), *arguments, **options)

    return run
