"""Marks tests of what is known to be wrong: the fix removes one line."""

import pytest

from jaxinf.errors import JaxinfError

__all__ = ["NO_ERROR", "REFUSED", "wrong"]

NO_ERROR = pytest.fail.Exception
"""What `pytest.raises` and `pytest.warns` raise where nothing was raised."""

REFUSED = (JaxinfError, ValueError, TypeError)
"""Errors that refuse a call; the message, which a test matches, says more."""


def wrong(reason, raises=AssertionError):
    """Expects a test to fail, by such an exception, for a reason in one sentence."""
    return pytest.mark.xfail(strict=True, raises=raises, reason=reason)
