"""Gradients on their way to an action, which works on them while programs run.

    put ─► waits for room ─► action, one after another in order ─► its work, on threads

Invariant: what waits is bounded in bytes; one gradient is always accepted.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TypeAlias

from jaxinf.streaming.move.jobs import Jobs
from jaxinf.streaming.program.graph import Piece
from jaxinf.streaming.program.shards import Gradient

Handed: TypeAlias = tuple[Piece, Gradient]
"""A piece of a leaf and its gradient."""

Work: TypeAlias = Callable[[], None]

Action: TypeAlias = Callable[[Sequence[Handed]], Work | None]
"""Returns work that may run beside the work of other gradients."""


class Stage:
    """Passes gradients to an action, in their order, on threads.

    Args:
      capacity_bytes: Bytes of gradients that may wait or be worked on.
      short_bytes: Gradients up to this long are passed on together, if several wait.
      num_threads: Number of works at a time. One that takes long holds up no other.

    Attributes:
      waited_s: Time that gradients waited for room since the caller set it to 0.
    """

    def __init__(
        self, name: str, capacity_bytes: int, short_bytes: int = 0, num_threads: int = 1
    ) -> None:
        self._capacity_bytes = max(1, capacity_bytes)
        self._short_bytes = short_bytes
        self._jobs = Jobs(name, num_threads)
        self._changed = self._jobs.changed
        self._in_order = threading.Lock()
        self.waited_s = 0.0
        self.abandon()

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
        with self._changed:
            self._await(lambda: self._used_bytes <= most)
            self._waiting.append((piece, gradient))
            self._used_bytes += gradient.nbytes
            self._num_left += 1
            self._jobs.submit(self._pass_on)
        self.waited_s += time.perf_counter() - began_s

    def end(self) -> None:
        """Waits until all that was put is done.

        Raises:
          BaseException: The exception that stopped the action.
        """
        with self._changed:
            self._await(lambda: not self._num_left)

    def abandon(self) -> None:
        """Waits for what is under way; what waits is dropped."""
        self._action: Action | None = None
        self._jobs.reset()
        self._waiting: deque[Handed] = deque()
        self._used_bytes = self._num_left = 0
        self._error: BaseException | None = None

    def close(self) -> None:
        """Ends the threads; idempotent."""
        self.abandon()
        self._jobs.close()

    def _await(self, is_done: Callable[[], bool]) -> None:
        self._changed.wait_for(lambda: is_done() or self._error is not None)
        if self._error is not None:
            raise self._error

    def _pass_on(self) -> None:
        """Works on the next gradients, unless others took them; on a thread."""
        work, num_bytes, num_taken = None, 0, 0
        try:
            with self._in_order:
                taken, action = self._next(), self._action
                num_bytes = sum(gradient.nbytes for _, gradient in taken)
                num_taken = len(taken)
                work = action(taken) if action is not None and taken else None
                del taken
            if work is not None:
                work()
        except BaseException as error:
            with self._changed:
                self._error, self._action = self._error or error, None
        with self._changed:
            self._used_bytes -= num_bytes
            self._num_left -= num_taken

    def _next(self) -> list[Handed]:
        """Takes a gradient, or several short ones."""
        with self._changed:
            taken = [self._waiting.popleft()] if self._waiting else []
            most = self._short_bytes
            while taken and self._waiting and taken[-1][1].nbytes <= most:
                if self._waiting[0][1].nbytes > most:
                    break
                taken.append(self._waiting.popleft())
            return taken
