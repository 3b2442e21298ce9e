"""Runs in several processes, each program once."""

import functools

import pytest
from processes import run_alone


@pytest.fixture(scope="session")
def alone(tmp_path_factory):
    """Runs the program in one process; the same arguments run once."""

    @functools.cache
    def run(*arguments, num_devices=2):
        store = tmp_path_factory.mktemp("alone") / "store"
        return run_alone(store, *arguments, num_devices=num_devices)

    return run
