"""A thread that works on gradients while programs run.

Invariant: what waits for it is bounded in bytes; one item is always accepted.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TypeAlias

from jaxinf.streaming.program.graph import Piece
from jaxinf.streaming.program.shards import Gradient

__all__ = ["Action", "Handed", "Stage"]

Handed: TypeAlias = tuple[Piece, Gradient]
"""A piece of a leaf and its gradient."""

Action: TypeAlias = Callable[[Sequence[Handed]], None]


class Stage:
    """Passes gradients to an action, in their order, on a thread of its own.

    Args:
      name: Of the thread.
      capacity_bytes: Bytes of gradients that may wait.
      short_bytes: Gradients up to this long are passed on together, if several wait.

    Attributes:
      waited_s: Time that gradients waited for room since the last reset.
    """

    def __init__(self, name: str, capacity_bytes: int, short_bytes: int = 0) -> None:
        self._name = name
        self._capacity_bytes = capacity_bytes
        self._short_bytes = short_bytes
        self._changed = threading.Condition()
        self._queue: deque[Handed] = deque()
        self._waiting_bytes = 0
        self._is_ending = False
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None
        self.waited_s = 0.0

    def start(self, action: Action) -> None:
        """Starts the thread; it does not run yet."""
        self._queue.clear()
        self._waiting_bytes, self._is_ending, self._error = 0, False, None
        self._thread = threading.Thread(
            target=self._run, args=(action,), name=self._name, daemon=True
        )
        self._thread.start()

    def put(self, piece: Piece, gradient: Gradient) -> None:
        """Takes a gradient; blocks while too many wait.

        Raises:
          BaseException: The exception that stopped the action.
        """
        with self._changed:
            began_s = time.perf_counter()
            self._changed.wait_for(
                lambda: (
                    self._error is not None
                    or not self._waiting_bytes
                    or self._waiting_bytes + gradient.nbytes <= self._capacity_bytes
                )
            )
            self.waited_s += time.perf_counter() - began_s
            if self._error is not None:
                raise self._error
            self._waiting_bytes += gradient.nbytes
            self._queue.append((piece, gradient))
            self._changed.notify_all()

    def end(self) -> None:
        """Waits until all that was put is done.

        Raises:
          BaseException: The exception that stopped the action.
        """
        self._join()
        if self._error is not None:
            raise self._error

    def abandon(self) -> None:
        """Ends the thread; what waits is dropped."""
        with self._changed:
            self._queue.clear()
        self._join()

    def _join(self) -> None:
        with self._changed:
            self._is_ending = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _run(self, action: Action) -> None:
        try:
            while taken := self._next():
                num_bytes = sum(gradient.nbytes for _, gradient in taken)
                action(taken)
                del taken
                with self._changed:
                    self._waiting_bytes -= num_bytes
                    self._changed.notify_all()
        except BaseException as error:
            with self._changed:
                self._error = error
                self._queue.clear()
                self._changed.notify_all()

    def _next(self) -> list[Handed]:
        """Returns the next gradient, or several short ones; none at the end. Blocks."""
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._is_ending)
            taken = [self._queue.popleft()] if self._queue else []
            while taken and self._queue and self._is_short(taken[-1], self._queue[0]):
                taken.append(self._queue.popleft())
            return taken

    def _is_short(self, *handed: Handed) -> bool:
        return all(gradient.nbytes <= self._short_bytes for _, gradient in handed)
