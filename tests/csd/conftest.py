"""Lets any test import the contract of CSDs: ``from csd_contract import *``."""

import os
import sys

import pytest

sys.path.insert(0, os.path.dirname(__file__))

from csd_contract import CASES


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """The emulated card has its simplest kernels alone in `make test`: others take g++
    seconds each."""
    for item in items:
        parameters = getattr(item, "callspec", None)
        if parameters is None or parameters.params.get("spec", "host") == "host":
            continue
        if parameters.params.get("case", CASES[0]) != CASES[0]:
            item.add_marker(pytest.mark.cards)
