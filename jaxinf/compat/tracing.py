"""Whether JAX traces, and what a trace depends on.

Invariant: nothing here is traced itself.
"""

from typing import Any

import jax
from jax._src.core import trace_state_clean
from jax.core import Tracer

CALLBACK_LOGGER = "jax._src.callback"
"""Logs an exception of a callback, which is then raised, with a traceback."""


def trace_context() -> Any:
    """The settings that a trace depends on, which compare as jit's cache does."""
    from jax._src import config

    return config.trace_context()


def is_tracing() -> bool:
    """Whether JAX is tracing a function, so that even constants become tracers."""
    return isinstance(jax.numpy.zeros(()), Tracer)


def is_in_transformation() -> bool:
    """Whether JAX traces a function or runs it by `jax.grad`, `jax.vmap` and so on."""
    return not trace_state_clean()
