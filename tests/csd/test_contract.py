"""The contract of CSDs, on the kinds that every machine has."""

import pytest
from csd_contract import *  # noqa: F403 (tests and fixtures)

from jaxinf.csd import parse_csd


@pytest.fixture(params=["host", "host:drive=1000GB/s,link=1000GB/s", "emulated"])
def spec(request):
    return parse_csd(request.param)
