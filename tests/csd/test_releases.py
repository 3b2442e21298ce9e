"""The contract of CSDs, on cards that a release of pyxrt without contexts drives."""

import functools

import pytest
from csd_contract import *  # noqa: F403 (tests and fixtures)

from jaxinf.csd import parse_csd
from jaxinf.csd.cards import smartssd
from jaxinf.csd.cards.standin import EmulatedXrt


@pytest.fixture
def spec(monkeypatch):
    runtime = functools.partial(EmulatedXrt, has_contexts=False)
    monkeypatch.setattr(smartssd, "EmulatedXrt", runtime)
    return parse_csd("emulated")
