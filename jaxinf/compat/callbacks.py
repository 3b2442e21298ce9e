"""How a computation calls the host or a handler, and what JAX says when that fails.

Invariant: an exception that JAX's own error quotes is not logged by JAX, too.
"""

import ctypes
import functools
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import jax
import numpy as np
from jax.experimental import io_callback

try:
    from jax.experimental.buffer_callback import buffer_callback
except ImportError:
    buffer_callback = None

__all__ = [
    "CALLBACK_LOGGER",
    "call_handler",
    "call_with_buffers",
    "call_with_copies",
    "handler_headers",
    "has_buffer_callback",
    "is_in_callback",
    "raise_in_callback",
    "register_handler",
]

CALLBACK_LOGGER = "jax._src.callback"
"""Logs an exception of a callback, with a traceback."""

# Modules with a function on the stack of a thread that runs a callback.
_CALLBACK_MODULES = frozenset(
    {"jax._src.callback", "jax._src.buffer_callback", "jaxinf.optimizer.callback"}
)

_TOLD = "is_told_by_jaxinf"


def raise_in_callback(error: BaseException) -> NoReturn:
    """Raises an exception that JAX's error quotes, so that JAX need not log it, too."""
    setattr(error, _TOLD, True)
    raise error.with_traceback(None)


def _is_news(record: logging.LogRecord) -> bool:
    error = record.exc_info[1] if record.exc_info else None
    return not getattr(error, _TOLD, False)


logging.getLogger(CALLBACK_LOGGER).addFilter(_is_news)


def has_buffer_callback() -> bool:
    """Whether this JAX can hand over its own buffers."""
    return buffer_callback is not None


def call_with_buffers(
    function: Callable[..., None],
    avals: Any,
    *arguments: Any,
) -> Any:
    """Calls ``function(context, outs, *arguments)`` with XLA's buffers; traceable.

    Args:
      function: fills `outs`; runs on the host, once.
      avals: shapes and dtypes of the results.
      arguments: arrays.
    """
    assert buffer_callback is not None, "has_buffer_callback was not asked"
    return buffer_callback(function, avals, has_side_effect=True)(*arguments)


def call_with_copies(
    function: Callable[..., Any],
    avals: Any,
    *arguments: Any,
) -> Any:
    """Calls ``function(*arguments)``, which returns the results; traceable."""
    return io_callback(function, avals, *arguments)


def handler_headers() -> Path:
    """Returns the folder of the headers for XLA's handlers."""
    return Path(jax.ffi.include_dir())


@functools.cache
def register_handler(name: str, address: int, platform: str) -> None:
    """Makes machine code known to XLA as a handler for a platform, such as CUDA."""
    capsule = jax.ffi.pycapsule(ctypes.c_void_p(address))
    jax.ffi.register_ffi_target(name, capsule, platform=platform)


def call_handler(
    name: str, avals: Sequence[Any], arguments: Sequence[Any], **numbers: int
) -> Sequence[Any]:
    """Calls a registered handler; traceable.

    Args:
      name: the name it is registered with.
      avals: shapes and dtypes of the results.
      arguments: arrays.
      numbers: its int64 attributes.
    """
    call = jax.ffi.ffi_call(name, list(avals), has_side_effect=True)
    return call(*arguments, **{key: np.int64(n) for key, n in numbers.items()})


def is_in_callback(frame: FrameType | None) -> bool:
    """Whether a thread runs a callback, judged by its innermost frame."""
    while frame is not None:
        if frame.f_globals.get("__name__") in _CALLBACK_MODULES:
            return True
        frame = frame.f_back
    return False
