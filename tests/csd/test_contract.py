"""The contract of CSDs, on the kinds that every machine has."""

import pytest
from csd_contract import *  # noqa: F403 (tests and fixtures)

from jaxinf.csd import parse_csd


@pytest.fixture(params=["host", "emulated"])
def spec(request):
    return parse_csd(request.param)
