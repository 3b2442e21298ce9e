"""The contract of CSDs over pyxrt, which is used where XRT's library is not."""

import pytest
from csd_contract import *  # noqa: F403 (tests and fixtures)

from jaxinf.csd import parse_csd
from jaxinf.csd.cards import library, xrt


@pytest.fixture
def spec(monkeypatch):
    monkeypatch.setattr(library, "LIBRARY", "libxrt_of_no_release.so")
    yield parse_csd("smartssd")
    assert {card._module.__name__ for card in xrt._OPEN.values()} == {"pyxrt"}
