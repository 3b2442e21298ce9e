"""Servers, their queues, and a virtual clock.

    task ──► queue of its server ──► served, one at a time ──► its end, in order of time

Invariant: deterministic. Of what ends at the same time, what was started first ends
first.
"""

from collections import defaultdict
from collections.abc import Callable
from heapq import heappop, heappush
from typing import Generic, TypeVar

E = TypeVar("E")


class Clock(Generic[E]):
    """Servers that serve one task after another, and the time.

    Attributes:
      busy_s: Time that each server has taken for its tasks so far.
    """

    __slots__ = ("_ends", "_free_s", "_num_started", "busy_s", "now_s")

    def __init__(self) -> None:
        self.now_s = 0.0
        self.busy_s: defaultdict[str, float] = defaultdict(float)
        self._free_s: defaultdict[str, float] = defaultdict(float)
        self._ends: list[tuple[float, int, E]] = []
        self._num_started = 0

    def start(
        self, server: str, seconds: float, event: E, ready_s: float = 0.0
    ) -> float:
        """Puts a task into a server's queue; returns when it begins.

        Args:
          event: What `end` returns when the task has ended.
          ready_s: When the task can begin at the earliest.
        """
        begin_s = max(self._free_s[server], self.now_s, ready_s)
        self._free_s[server] = end_s = begin_s + seconds
        self.busy_s[server] += seconds
        heappush(self._ends, (end_s, self._num_started, event))
        self._num_started += 1
        return begin_s

    def free_s(self, server: str) -> float:
        """Returns when a server has served all that waits for it."""
        return self._free_s[server]

    def end(self) -> E:
        """Goes on to the next end of a task; returns its event.

        Raises:
          IndexError: No task is under way.
        """
        end_s, _, event = heappop(self._ends)
        self.now_s = max(self.now_s, end_s)
        return event

    def at(self, at_s: float, event: E) -> None:
        """Puts an event that no server brings about among the ends of tasks."""
        heappush(self._ends, (at_s, self._num_started, event))
        self._num_started += 1

    def run_until(self: "Clock[Callable[[], object]]", at_s: float) -> None:
        """Calls the events of all that ends up to a time, and goes on to it."""
        while self.is_due(at_s):
            self.end()()
        self.now_s = max(self.now_s, at_s)

    def is_due(self, at_s: float) -> bool:
        """Whether a task ends at a time or before it."""
        return bool(self._ends) and self._ends[0][0] <= at_s
