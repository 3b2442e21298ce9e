"""The contract of CSDs, on cards that the real runtime drives."""

import pytest
from csd_contract import *  # noqa: F403 (tests and fixtures)

from jaxinf.csd import parse_csd


@pytest.fixture
def spec():
    return parse_csd("smartssd")
