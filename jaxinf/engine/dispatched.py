"""Waits for computations that JAX has dispatched.

Invariant: nothing here holds a lock of a store, since the computations call into it.
"""

import contextlib
import threading
import time

import jax

from jaxinf import compat
from jaxinf.errors import StoreError

_PAUSE_S = 0.01


def check_thread(what: str) -> None:
    """Refuses to wait on a thread of JAX's, whose computation would wait for itself."""
    if _is_thread_of_jax():
        raise StoreError(
            f"{what}: expected a thread of the program's, found one that Python did "
            "not start, as JAX's callbacks have: it would wait for the computation "
            "that it is part of; do it after the computation"
        )


def _is_thread_of_jax() -> bool:
    # JAX's callbacks run on threads that Python has not started.
    return isinstance(threading.current_thread(), threading._DummyThread)  # pyright: ignore


def wait_for_dispatched() -> None:
    """Blocks until every computation that may still call a store has ended.

    Waits for the computations of all live arrays, and for those that this thread has
    dispatched; a callback does not wait, since it is part of one. Errors are not
    raised, since a store keeps its own. Ctrl-C ends the wait for arrays.
    """
    if not compat.has_backend() or _is_thread_of_jax():
        return  # asking for its arrays would start a backend
    while not all(map(_is_ready, jax.live_arrays())):
        time.sleep(_PAUSE_S)
    wait_for_callbacks()


def wait_for_callbacks() -> None:
    """Blocks until all callbacks that this thread has dispatched have run."""
    if compat.has_backend() and not _is_thread_of_jax():
        with contextlib.suppress(Exception):
            jax.effects_barrier()


def _is_ready(array: jax.Array) -> bool:
    try:
        return array.is_deleted() or array.is_ready()  # pyright: ignore
    except RuntimeError:  # deleted since, by a donation
        return True
