"""In which form a computation calls the host: the variable JAXINF_CALLBACK.

    buffer    a callback that waits for the update, with XLA's own buffers; on a CPU
    io        the same, with copies
    start     a callback takes the gradient, another one fetches the result
    stream    the same by handlers of XLA, with copies on the stream of a GPU

Invariant: results have the same bits in all forms.
"""

import os

import jax

from jaxinf import compat
from jaxinf.native.stream_calls import driver_is_given

__all__ = ["copies_on_stream", "shares_memory", "waits_for_updates"]


def waits_for_updates() -> bool:
    """Whether the call that brings a gradient also returns its result.

    On accelerators this would block the thread that enqueues their work.
    """
    by_default = "io" if jax.default_backend() == "cpu" else "start"
    return _way(by_default) not in ("start", "stream")


def copies_on_stream() -> bool:
    """Whether updates are started and fetched on the device's stream."""
    return _way("io") == "stream"


def shares_memory(*, is_local: bool) -> bool:
    """Whether a call hands over XLA's own buffers, so that arguments cost no copy.

    Args:
      is_local: whether the call is under ``shard_map``, so that XLA does not partition
        its computation.
    """
    is_alone = is_local or jax.device_count() == 1
    can_share = jax.default_backend() == "cpu" and is_alone
    can_share = can_share and compat.has_buffer_callback()
    return _way("buffer" if can_share else "io") == "buffer"


def _way(default: str) -> str:
    """Returns the kind of call: the value of JAXINF_CALLBACK, or the default."""
    way = os.environ.get("JAXINF_CALLBACK") or default
    known = ("buffer", "io", "start", "stream")
    if way not in known:
        raise ValueError(
            f"JAXINF_CALLBACK: expected one of {', '.join(known)}, found {way!r}"
        )
    if way == "buffer" and not compat.has_buffer_callback():
        raise ValueError(
            "JAXINF_CALLBACK: expected io or start, as this JAX "
            f"({jax.__version__}) has no buffer_callback, found 'buffer'"
        )
    if way == "stream" and not (jax.default_backend() == "gpu" or driver_is_given()):
        raise ValueError(
            "JAXINF_CALLBACK: expected start or io, as only CUDA has streams, found "
            f"'stream' on {jax.default_backend()}"
        )
    if way == "buffer" and jax.default_backend() != "cpu":
        raise ValueError(
            "JAXINF_CALLBACK: expected io or start, as NumPy cannot read the buffers "
            f"of an accelerator ({jax.default_backend()}), found 'buffer'"
        )
    return way
