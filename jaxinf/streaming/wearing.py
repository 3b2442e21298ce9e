"""The wear of drives by the steps of a run.

Invariant: bytes are those that the plan moves; times are medians of the last steps.
"""

import statistics
import warnings
from collections import deque

from jaxinf.streaming.plan.wear import Wear

__all__ = ["Wearing"]

_WINDOW, _LEAST = 9, 5


class Wearing:
    """Times of steps, and the bytes that they write.

    Args:
      endurance_tbw: Rated writes of all drives together, in TB; None for the common
        classes, of which no warning is given.
    """

    def __init__(self, endurance_tbw: float | None) -> None:
        self._endurance_tbw = endurance_tbw
        self._step_s: deque[float] = deque(maxlen=_WINDOW)
        self._written_bytes = 0
        self._is_told = False

    def add(self, step_s: float, written_bytes: int) -> None:
        """Takes a step; warns once if drives last less than a year."""
        self._step_s.append(step_s)
        self._written_bytes = written_bytes
        wear = self.wear
        if self._is_told or wear is None or len(self._step_s) < _LEAST:
            return
        if wear.warning is not None:
            self._is_told = True
            warnings.warn(wear.warning, stacklevel=4)

    @property
    def wear(self) -> Wear | None:
        """The wear by the last steps; None before the first."""
        if not self._step_s:
            return None
        step_s = statistics.median(self._step_s)
        return Wear(self._written_bytes, step_s, self._endurance_tbw)
