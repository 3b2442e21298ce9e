"""Chooses what is in memory, by next use.

Each function updates the bytes of calls that it is given, int64 of shape (num_calls,).
The capacity is the most that a call should have. A stay here lies between two uses of a
tensor, which has to be in memory again at its `stop`.

Invariant: no function raises the bytes of a call above the capacity.
"""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from jaxinf.schedule.occupancy import Stay

__all__ = ["Candidate", "evict", "fill", "prefetch", "reside"]


class Candidate(NamedTuple):
    """A tensor that may stay between steps.

    Attributes:
      tensor: The tensor, as the caller knows it.
      num_bytes: Memory for it.
      saved_bytes: Bytes that do not move in a step if it stays.
      apart: Calls between its first use and its last.
    """

    tensor: Any
    num_bytes: int
    saved_bytes: int
    apart: int


def reside(candidates: Iterable[Candidate], capacity: int) -> list[Any]:
    """Returns tensors that stay: those first that save most for a byte of memory.

    Of equal ones those that are used far apart stay, as others may be read once.

    Args:
      candidates: The tensors.
      capacity: Memory for them.
    """
    chosen = []
    for one in sorted(candidates, key=_rank):
        if one.num_bytes <= capacity:
            capacity -= one.num_bytes
            chosen.append(one.tensor)
    return chosen


def _rank(one: Candidate) -> tuple[float, int]:
    return -one.saved_bytes / one.num_bytes, -one.apart


def fill(occupied: np.ndarray, stays: Iterable[Stay], capacity: int) -> list[Stay]:
    """Adds stays, in the order given, if there is room; returns those added."""
    added = []
    for stay in stays:
        during = occupied[stay.start : stay.stop]
        if during.max(initial=0) + stay.num_bytes <= capacity:
            during += stay.num_bytes
            added.append(stay)
    return added


def evict(
    occupied: np.ndarray, stays: Iterable[Stay], capacity: int
) -> dict[Stay, int]:
    """Ends stays where the bytes exceed the capacity.

    The tensor that is needed last leaves first (Belady's rule), of several the largest,
    of equal ones the one given first. If all leave, the rest may still exceed.

    Returns:
      For each of `stays` that ends early, the first call without its tensor.
    """
    left: dict[Stay, int] = {}
    by_use = sorted(stays, key=lambda stay: (stay.stop, stay.num_bytes), reverse=True)
    for call in np.flatnonzero(occupied > capacity).tolist():
        for stay in by_use:
            if occupied[call] <= capacity:
                break
            if stay.start <= call < stay.stop and stay not in left:
                occupied[call : stay.stop] -= stay.num_bytes
                left[stay] = call
    return left


def prefetch(
    occupied: np.ndarray, left: Mapping[Stay, int], capacity: int
) -> dict[Stay, int]:
    """Lets tensors come back in the order of their use, as early as there is room.

    Each is away for one call at least, and none comes back before one used earlier.

    Args:
      left: The first call without each tensor, as from `evict`.

    Returns:
      For each, in that order, the first call with it again: at the latest its `stop`.
    """
    returned: dict[Stay, int] = {}
    back = 0
    for stay in sorted(left, key=lambda stay: stay.stop):
        earliest = max(back, left[stay] + 1)
        back = stay.stop
        while back > earliest and occupied[back - 1] + stay.num_bytes <= capacity:
            back -= 1
        occupied[back : stay.stop] += stay.num_bytes
        returned[stay] = back
    return returned
