"""Chooses how many updates a JAX device computes, and again when steps deviate.

    rates ─► k ─► steps ─► as long as they were? ─ no ─► rates ─► k

Invariant: a choice changes between steps alone. The commit of a step records its own.
"""

import logging
import statistics
from collections import deque
from collections.abc import Callable

from jaxinf.engine import Assignment
from jaxinf.streaming.update.interval import UpdateRates, interval

_LOG = logging.getLogger("jaxinf")

# Steps whose median counts. Where each second one is longer, an even number has as many
# of both kinds at any time.
_WINDOW = 10
# It may be so many times what it was, or that part of it.
_CHANGED = 1.25
# The most steps of a choice before times that are not as before count again.
_MOST_PATIENCE = 80


class Choosing:
    """Gives each step its assignment. Used from one thread.

    Args:
      assign: Returns the assignment of every so many subgroups.
      every: So many; None to measure at once.
      measure: Measures the rates, and blocks; None to keep to the first choice.
    """

    def __init__(
        self,
        assign: Callable[[int], Assignment],
        every: int | None,
        measure: Callable[[], UpdateRates] | None = None,
    ) -> None:
        self._assign, self._measure = assign, measure
        self._is_due, self._patience = False, _WINDOW
        self._begin()
        if every is None:
            every = self._measured()
        self._assignment = assign(every)

    def assignment(self) -> Assignment:
        """Returns that of the next step; measures if that is due, and then blocks."""
        if self._is_due:
            self._is_due = False
            self._patience = min(2 * self._patience, _MOST_PATIENCE)
            self._begin()
            every = self._measured()
            if every != self._assignment.every:
                self._assignment = self._assign(every)
        return self._assignment

    def ended(self, step_s: float) -> None:
        """Takes the time of a step, in seconds."""
        self._num_steps += 1
        if self._num_steps == 1 or self._measure is None:  # memory and files were new
            return
        self._found.append(step_s)
        if len(self._found) < _WINDOW:
            return
        now_s = statistics.median(self._found)
        if self._usual_s is None:
            self._usual_s = now_s
        elif self._num_steps > self._patience:
            ratio = now_s / self._usual_s
            self._is_due = not 1 / _CHANGED < ratio < _CHANGED

    # --- inside --------------------------------------------------------------------

    def _begin(self) -> None:
        self._num_steps, self._usual_s = 0, None
        self._found: deque[float] = deque(maxlen=_WINDOW)

    def _measured(self) -> int:
        assert self._measure is not None, "a number is not measured"
        rates = self._measure()
        every = interval(rates)
        _LOG.info("device_updates=%s: %s", every or None, _reason(rates, every))
        return every


def _reason(rates: UpdateRates, every: int) -> str:
    """Says what the choice is made of."""
    found = ", ".join(
        f"{name} {1e9 * seconds:.3g} s" for name, seconds in rates._asdict().items()
    )
    if every:
        return f"for 1e9 params: {found}"
    if rates.drive >= rates.host:
        return f"drives are the bound, so the device cannot help; 1e9 params: {found}"
    return f"the device would save less than 5 % of updates; 1e9 params: {found}"
