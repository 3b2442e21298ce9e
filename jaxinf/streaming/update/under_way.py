"""Updates of several units at a time, so that a device's hide behind the host's.

Invariant: a fixed number are under way, and they begin in their order. One that takes
long holds up none behind it. An error is raised by a later call.
"""

from collections.abc import Callable
from concurrent.futures import (
    ALL_COMPLETED,
    FIRST_COMPLETED,
    Future,
    ThreadPoolExecutor,
    wait,
)


class UnderWay:
    """Actions that run beside each other. Its calls come one after another."""

    def __init__(self, num_at_once: int) -> None:
        self._num_at_once = num_at_once
        self._threads = ThreadPoolExecutor(num_at_once, "jaxinf-update")
        self._running: set[Future[None]] = set()

    def start(self, action: Callable[[], None]) -> None:
        """Starts an action; blocks while too many are under way.

        Raises:
          BaseException: An earlier action's.
        """
        if len(self._running) == self._num_at_once:
            self._await(FIRST_COMPLETED)
        self._running.add(self._threads.submit(action))

    def end(self) -> None:
        """Waits for all.

        Raises:
          BaseException: An action's.
        """
        self._await(ALL_COMPLETED)

    def abandon(self) -> None:
        """Waits for all; what they raise does not count, as the step is given up."""
        wait(self._running)
        self._running.clear()

    def close(self) -> None:
        """Waits for all, and ends the threads; idempotent."""
        self.abandon()
        self._threads.shutdown()

    def _await(self, until: str) -> None:
        done, self._running = wait(self._running, return_when=until)
        for one in done:
            one.result()
