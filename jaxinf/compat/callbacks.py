"""What JAX says when a callback fails.

Invariant: an exception that JAX's own error quotes is not logged by JAX, too.
"""

import logging
from typing import NoReturn

CALLBACK_LOGGER = "jax._src.callback"
"""Logs an exception of a callback, with a traceback."""

_TOLD = "is_told_by_jaxinf"


def raise_in_callback(error: BaseException) -> NoReturn:
    """Raises an exception that JAX's error quotes, so that JAX need not log it, too."""
    setattr(error, _TOLD, True)
    raise error.with_traceback(None)


def _is_news(record: logging.LogRecord) -> bool:
    error = record.exc_info[1] if record.exc_info else None
    return not getattr(error, _TOLD, False)


logging.getLogger(CALLBACK_LOGGER).addFilter(_is_news)
