"""The wear of drives by what is written in every step.

Invariant: a prediction is for a drive of 1 TB of its class, or for the endurance given.
"""

import statistics
import warnings
from collections import deque
from dataclasses import dataclass

from jaxinf.terminal import format_bytes

ENDURANCE_TBW = {"consumer": 600.0, "1 DWPD": 1825.0, "3 DWPD": 5475.0}
"""Rated writes of common classes, in TB for each TB of capacity, over five years."""

_DAY_S = 86_400.0
_YEAR_DAYS = 365.25
# The rating is for small random writes, which the drive's own moves multiply by 2.5.
# Long sequential ones are hardly multiplied (SSDTrain, 2408.10013, section III-D).
_RATED_AMPLIFICATION = 2.5
# Steps whose median counts, and the fewest of them before a warning.
_WINDOW, _LEAST = 9, 5


@dataclass(frozen=True)
class Wear:
    """What a run writes, and how long a drive lasts.

    Attributes:
      endurance_tbw: Rated writes of all drives together, in TB; None for the classes.
    """

    step_bytes: int
    step_s: float
    endurance_tbw: float | None = None

    @property
    def day_bytes(self) -> float:
        return self.step_bytes * _DAY_S / self.step_s

    def years(self, endurance_tbw: float) -> float:
        """Life of a drive under its rating: endurance x time of a step / its bytes."""
        if not self.step_bytes:
            return float("inf")
        return endurance_tbw * 1e12 / self.day_bytes / _YEAR_DAYS

    @property
    def warning(self) -> str | None:
        """A warning if the drive lasts less than a year; only for a given endurance."""
        if self.endurance_tbw is None or self.years(self.endurance_tbw) >= 1:
            return None
        months = 12 * self.years(self.endurance_tbw)
        return (
            f"{format_bytes(int(self.day_bytes))} written a day wear a drive of "
            f"{self.endurance_tbw:g} TBW out in {months:.1f} "
            "months by its rating; give the step more memory, or use another drive"
        )

    def __str__(self) -> str:
        if self.endurance_tbw is None:
            ratings = ENDURANCE_TBW.items()
        else:
            ratings = {f"{self.endurance_tbw:g} TBW": self.endurance_tbw}.items()
        lives = ", ".join(f"{name} {self.years(tbw):.2g}" for name, tbw in ratings)
        return (
            f"{format_bytes(self.step_bytes)} written a step, "
            f"{format_bytes(int(self.day_bytes))} a day; years by rating: {lives} "
            f"(x {_RATED_AMPLIFICATION} if long sequential writes are not amplified)"
        )


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
