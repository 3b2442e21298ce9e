"""In which form a computation calls the host; the backend decides.

    buffer    a callback that waits for the update, with XLA's own buffers: on a CPU
    io        the same, with copies: on a CPU whose JAX has no `buffer_callback`
    start     a callback takes the gradient, another one fetches the result: elsewhere

Invariant: results have the same bits in all forms.
"""

import jax

from jaxinf import compat


def by_backend() -> str:
    """Returns the form on JAX's default backend."""
    if jax.default_backend() != "cpu":
        return "start"
    return "buffer" if compat.has_buffer_callback() else "io"


def waits_for_updates() -> bool:
    """Whether the call that brings a gradient also returns its result.

    On accelerators this would block the thread that enqueues their work.
    """
    return by_backend() != "start"


def shares_memory(*, is_local: bool) -> bool:
    """Whether a call hands over XLA's own buffers, so that arguments cost no copy.

    Args:
      is_local: whether the call is under ``shard_map``, so that XLA does not partition
        its computation.
    """
    return by_backend() == "buffer" and (is_local or jax.device_count() == 1)
