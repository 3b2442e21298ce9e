"""Gradients on their way to an action, which works on them while programs run.

    put ─► waits for room ─► the mover's queue, in order ─► action

Invariant: what waits is bounded in bytes; one gradient is always accepted.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from jaxinf.schedule.moves import Tensor
from jaxinf.streaming.move.mover import Mover
from jaxinf.streaming.program.graph import Piece
from jaxinf.streaming.program.shards import Gradient
from jaxinf.typing import Array

Handed: TypeAlias = tuple[Piece, Gradient]
"""A piece of a leaf and its gradient."""

Action: TypeAlias = Callable[[Sequence[Handed]], None]


@dataclass(eq=False, kw_only=True)
class _Waiting(Tensor):
    """A gradient, which an action takes in place of a drive."""

    piece: Piece
    take: Callable[["_Waiting"], None]

    def queue(self, part: int) -> int:
        return 0

    def write(self, part: int, bounce: Array) -> int:
        self.take(self)
        return 0


class Stage:
    """Passes gradients to an action, in their order, on a thread of a mover.

    Args:
      capacity_bytes: Bytes of gradients that may wait.
      short_bytes: Gradients up to this long are passed on together, if several wait.

    Attributes:
      waited_s: Time that gradients waited for room since the caller set it to 0.
    """

    def __init__(self, name: str, capacity_bytes: int, short_bytes: int = 0) -> None:
        self._capacity_bytes = max(1, capacity_bytes)
        self._short_bytes = short_bytes
        self._mover = Mover(
            [1],
            has_link=False,
            read_bytes=0,
            way_bytes=self._capacity_bytes,
            name=name,
            reuses=False,
        )
        self._waiting: deque[_Waiting] = deque()
        self._num_put = 0
        self._action: Action | None = None
        self.waited_s = 0.0

    def start(self, action: Action) -> None:
        """Passes gradients to an action from now on; none is under way."""
        self._action = action

    def put(self, piece: Piece, gradient: Gradient) -> None:
        """Takes a gradient; blocks while too many wait.

        Raises:
          BaseException: The exception that stopped the action.
        """
        began_s = time.perf_counter()
        tensor = _Waiting(
            self._num_put,
            num_parts=1,
            way_bytes=min(gradient.nbytes, self._capacity_bytes),
            value=gradient,
            piece=piece,
            take=self._take,
        )
        self._num_put += 1
        self._waiting.append(tensor)
        self._mover.evict(tensor, waits=True)
        self.waited_s += time.perf_counter() - began_s

    def end(self) -> None:
        """Waits until all that was put is done.

        Raises:
          BaseException: The exception that stopped the action.
        """
        for key in range(self._num_put):
            self._mover.release(key)
        self._num_put = 0

    def abandon(self) -> None:
        """Waits for what is under way; what waits is dropped."""
        self._action = None
        self._mover.reset()
        self._waiting.clear()
        self._num_put = 0

    def close(self) -> None:
        """Ends the thread; idempotent."""
        self.abandon()
        self._mover.close()

    def _take(self, tensor: _Waiting) -> None:
        """Passes a gradient on, or several short ones, unless it was; on the thread."""
        action = self._action
        if action is None or not self._waiting or tensor is not self._waiting[0]:
            return
        taken = [self._waiting.popleft()]
        while self._waiting and self._is_short(taken[-1], self._waiting[0]):
            taken.append(self._waiting.popleft())
        try:
            action([(one.piece, one.host) for one in taken])
        except BaseException:
            self._action = None  # it takes no more
            raise

    def _is_short(self, *waiting: _Waiting) -> bool:
        """Whether gradients that have found room are short."""
        found = [one.host for one in waiting]
        return all(one is not None and one.nbytes <= self._short_bytes for one in found)
