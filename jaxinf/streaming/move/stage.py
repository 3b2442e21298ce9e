"""Gradients on their way to an action, which works on them while programs run.

    put ─► waits for room ─► a thread, in order ─► action

Invariant: what waits is bounded in bytes; one gradient is always accepted.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import (
    ALL_COMPLETED,
    FIRST_COMPLETED,
    Future,
    ThreadPoolExecutor,
    wait,
)
from typing import TypeAlias

from jaxinf.streaming.move.workers import Job, Workers
from jaxinf.streaming.program.graph import Piece
from jaxinf.streaming.program.shards import Gradient
from jaxinf.typing import Array

Handed: TypeAlias = tuple[Piece, Gradient]
"""A piece of a leaf and its gradient."""

Action: TypeAlias = Callable[[Sequence[Handed]], None]


class Stage:
    """Passes gradients to an action, in their order, on a thread.

    Args:
      capacity_bytes: Bytes of gradients that may wait.
      short_bytes: Gradients up to this long are passed on together, if several wait.

    Attributes:
      waited_s: Time that gradients waited for room since the caller set it to 0.
    """

    def __init__(self, name: str, capacity_bytes: int, short_bytes: int = 0) -> None:
        self._capacity_bytes = max(1, capacity_bytes)
        self._short_bytes = short_bytes
        self._workers = Workers([1], name)
        self._changed = self._workers.changed
        self._action: Action | None = None
        self.waited_s = 0.0
        self._clear()

    def _clear(self) -> None:
        self._waiting: deque[Handed] = deque()
        self._used_bytes = self._num_left = 0
        self._error: BaseException | None = None

    def start(self, action: Action) -> None:
        """Passes gradients to an action from now on; none is under way."""
        self._action = action

    def put(self, piece: Piece, gradient: Gradient) -> None:
        """Takes a gradient; blocks while too many wait.

        Raises:
          BaseException: The exception that stopped the action.
        """
        began_s = time.perf_counter()
        most = self._capacity_bytes - min(gradient.nbytes, self._capacity_bytes)
        self._await(lambda: self._used_bytes <= most)
        with self._changed:
            self._waiting.append((piece, gradient))
            self._used_bytes += gradient.nbytes
            self._num_left += 1
            self._workers.submit(0, Job(self._take, self._taken))
        self.waited_s += time.perf_counter() - began_s

    def end(self) -> None:
        """Waits until all that was put is done.

        Raises:
          BaseException: The exception that stopped the action.
        """
        self._await(lambda: not self._num_left)

    def abandon(self) -> None:
        """Waits for what is under way; what waits is dropped."""
        self._action = None
        self._workers.reset()
        self._clear()

    def close(self) -> None:
        """Ends the thread; idempotent."""
        self.abandon()
        self._workers.close()

    def _await(self, is_done: Callable[[], bool]) -> None:
        with self._changed:
            self._changed.wait_for(lambda: is_done() or self._error is not None)
            if self._error is not None:
                raise self._error

    def _take(self, bounce: Array) -> int:
        """Passes a gradient on, or several short ones, unless it was; on the thread."""
        del bounce
        action, taken = self._action, list[Handed]()
        with self._changed:
            while self._waiting and (not taken or self._are_short(taken[-1])):
                taken.append(self._waiting.popleft())
        if action is not None and taken:
            action(taken)
        return sum(gradient.nbytes for _, gradient in taken)

    def _are_short(self, last: Handed) -> bool:
        """Whether the next gradient goes with the last."""
        both = last, self._waiting[0]
        return all(gradient.nbytes <= self._short_bytes for _, gradient in both)

    def _taken(self, num_bytes: int | None, error: BaseException | None) -> None:
        self._num_left -= 1
        self._used_bytes -= num_bytes or 0
        if error is not None:
            self._error, self._action = self._error or error, None


class UnderWay:
    """Updates of several units at a time, so that a device's hide behind the host's.

    They begin in their order, and one that takes long holds up none behind it. Its
    calls come one after another.
    """

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
        """Waits for all; raises what one has raised."""
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
