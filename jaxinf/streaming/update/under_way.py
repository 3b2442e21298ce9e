"""Updates of several units at a time, so that a device's hide behind the host's.

Invariant: a fixed number are under way, and they begin in their order. The first error
is raised by the next call.
"""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait

__all__ = ["UnderWay"]


class UnderWay:
    """Actions that run beside each other. Its calls come one after another.

    Args:
      num_at_once: The most that are under way.
    """

    def __init__(self, num_at_once: int) -> None:
        self._num_at_once = num_at_once
        self._threads = ThreadPoolExecutor(num_at_once, "jaxinf-update")
        self._running: deque[Future[None]] = deque()

    def start(self, action: Callable[[], None]) -> None:
        """Starts an action; blocks while too many are under way.

        Raises:
          BaseException: An earlier action's.
        """
        if len(self._running) == self._num_at_once:
            self._running.popleft().result()
        self._running.append(self._threads.submit(action))

    def end(self) -> None:
        """Waits for all.

        Raises:
          BaseException: An action's.
        """
        while self._running:
            self._running.popleft().result()

    def abandon(self) -> None:
        """Waits for all; what they raise does not count, as the step is given up."""
        wait(self._running)
        self._running.clear()

    def close(self) -> None:
        """Waits for all, and ends the threads; idempotent."""
        self.abandon()
        self._threads.shutdown()
