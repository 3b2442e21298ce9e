"""Leaves some cases of the contract of CSDs to `make test-cards`."""

import pytest
from csd_contract import CASES


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Limits `make test` to the emulated card's simplest kernels: others take g++
    seconds each."""
    for item in items:
        parameters = getattr(item, "callspec", None)
        if parameters is None or parameters.params.get("spec", "host") == "host":
            continue
        if parameters.params.get("case", CASES[0]) != CASES[0]:
            item.add_marker(pytest.mark.cards)
