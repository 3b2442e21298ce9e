"""The bytes in memory during each call.

Invariant: stays add up, in any order; one without bytes changes nothing.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

__all__ = ["Stay", "occupancy"]


class Stay(NamedTuple):
    """Successive calls during which a tensor is in memory, or may be.

    Attributes:
      start: The first call.
      stop: The call after the last.
      num_bytes: The tensor's bytes; negative ones count as freed.
      tensor: The tensor, as the caller knows it; hashable.
    """

    start: int
    stop: int
    num_bytes: int
    tensor: Any = None


def occupancy(num_calls: int, stays: Iterable[Stay]) -> np.ndarray:
    """Returns the bytes of all stays during each call; int64, of shape (num_calls,)."""
    change = [0] * (num_calls + 1)
    for start, stop, num_bytes, _ in stays:
        change[start] += num_bytes
        change[stop] -= num_bytes
    return np.cumsum(change[:-1], dtype=np.int64)
