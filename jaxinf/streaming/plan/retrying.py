"""Tells when a drive that was left may be tried again.

    left ─► probe ─► … 8 … 16 … 32 … steps ─► probe: faster? ─► worth the risk? ─► try

A probe is compared with the first one after the drive was left, because a drive is
faster between steps than beside them.

Invariant: probes after the first take at most 0.5 % of the time of steps. Tries lose at
most 1 %, if the drive is no slower than when it was left.
"""

from collections.abc import Mapping
from typing import NamedTuple

# Parts of the time that probes and tries may take.
_PROBES, _TRIES = 0.005, 0.01
# The fewest and the most steps from one probe to the next.
_FIRST_INTERVAL, _LAST_INTERVAL = 8, 256


class Moved(NamedTuple):
    """Bytes that were moved, and the time in which they were."""

    num_bytes: int = 0
    seconds: float = 0.0


class Retrying:
    """The probes of a drive that was left, and the time that they and tries take.

    Args:
      num_noticed: Number of steps in which a settled plan is found to be slow.
    """

    def __init__(self, num_tried: int, num_noticed: int) -> None:
        self._num_tried, self._num_noticed = num_tried, num_noticed
        self._over_s: float | None = None  # of a step beside the drive that was left
        self._is_again = False
        self._total_s = self._lost_s = self._probes_s = self._last_s = 0.0
        self._interval = self._num_since = 0
        self._first: dict[str, float] = {}

    def step(self, step_s: float) -> None:
        self._total_s += step_s
        self._num_since += 1

    def left(self, over_s: float) -> None:
        """Notes that the drive is left, since steps took so much longer with it."""
        self._over_s = over_s
        if self._is_again:
            self._lost_s += self._num_noticed * over_s
        self._interval = self._num_since = 0
        self._first = {}

    def taken(self) -> None:
        """Notes that values leave for the drive."""
        self._is_again = self._over_s is not None
        self._over_s = None

    @property
    def is_due(self) -> bool:
        """Whether to probe the drive now."""
        if self._over_s is None or self._num_since < self._interval:
            return False
        return self._probes_s + self._last_s <= _PROBES * self._total_s

    def probed(
        self, moved: Mapping[str, Moved], least: float
    ) -> Mapping[str, float] | None:
        """Takes a probe.

        Args:
          moved: What it has `"written"` and `"read"`; empty if the drive failed.
          least: The ratio from which on the drive counts as faster.

        Returns:
          Rates over those of the first probe if the drive is to be tried, else None.
        """
        assert self._over_s is not None, "only a drive that was left is probed"
        self._last_s = sum(one.seconds for one in moved.values())
        self._probes_s += self._last_s
        self._num_since = 0
        self._interval = min(max(2 * self._interval, _FIRST_INTERVAL), _LAST_INTERVAL)
        rates = {n: one.num_bytes / one.seconds for n, one in moved.items()}
        self._first = self._first or rates
        ratios = {n: rate / self._first[n] for n, rate in rates.items()}
        if max(ratios.values(), default=0.0) < least:
            return None
        risked_s = self._lost_s + self._num_tried * self._over_s
        if risked_s > _TRIES * self._total_s:
            self._interval = _FIRST_INTERVAL
            return None
        self._first = rates
        return ratios
