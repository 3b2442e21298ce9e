"""The contract of CSDs, on cards that releases of pyxrt drive."""

import functools

import pytest
from csd_contract import *  # noqa: F403 (tests and fixtures)

from jaxinf.csd import parse_csd
from jaxinf.csd.cards import smartssd
from jaxinf.csd.cards.releases import RELEASES
from jaxinf.csd.cards.standin import EmulatedXrt

DEFAULT = EmulatedXrt().release  # which test_contract.py runs on


@pytest.fixture(params=[r for r in RELEASES[1:] if r != DEFAULT])
def spec(request, monkeypatch):
    runtime = functools.partial(EmulatedXrt, request.param)
    monkeypatch.setattr(smartssd, "EmulatedXrt", runtime)
    return parse_csd("emulated")
