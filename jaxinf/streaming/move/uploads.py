"""Copies from the host to devices that have memory of their own.

Invariant: a source's memory is used again only after its copies have ended; also if a
step is given up.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax

from jaxinf.streaming.move.workers import Workers
from jaxinf.streaming.program.shards import PINNED
from jaxinf.transfer import span
from jaxinf.typing import Array

Pairs: TypeAlias = Sequence[tuple[Array | jax.Array, Any]]
"""The arrays of a tensor on the host, and where each of them goes."""

Ended: TypeAlias = Callable[[Sequence[jax.Array], BaseException | None], None]


class Uploads:
    """Copies tensors in order, on threads.

    Args:
      is_registered: Whether the device copies from the host's memory as it is;
        otherwise each array is pinned on its way.
      pinned_bytes: Memory for what is pinned; one tensor at a time always has room.
    """

    def __init__(self, *, is_registered: bool, pinned_bytes: int = 0) -> None:
        self._is_registered, self._pinned_bytes = is_registered, pinned_bytes
        # A copy to new memory of the device waits for programs that were enqueued
        # before it. So all that waits is started at once, and two calls are under way
        # where nothing else limits them.
        self._workers = Workers([2 if is_registered else 1], "jaxinf-uploads")
        self._waiting: deque[tuple[Pairs, Ended, object]] = deque()

    def start(self, pairs: Pairs, ended: Ended, what: object) -> None:
        """Starts to copy a tensor.

        Args:
          ended: Takes the copies, or the error, on a thread; has no lock.
        """
        with self._workers.changed:
            self._waiting.append((pairs, ended, what))
            self._workers.submit(0, self._copy)

    def drop(self) -> None:
        """Drops what has not begun; blocks until the rest has ended."""
        self._workers.reset()
        self._waiting.clear()

    def close(self) -> None:
        self._workers.close()

    def _copy(self) -> None:
        if not (batch := self._next()):
            return
        pairs = [pair for own, _, _ in batch for pair in own]
        num_bytes = sum(source.nbytes for source, _ in pairs)
        with span("back", batch[0][2], num_bytes=num_bytes):
            failed: BaseException | None = None
            try:
                begun = deque(self._begun(pairs))
            except BaseException as error:
                failed, begun = error, deque()
            del pairs
            while batch:
                own, ended, _ = batch.popleft()
                copies = [begun.popleft() for _ in own if failed is None]
                error = failed or _error_of(copies)
                ended(copies, error)
                del own, ended, copies, error

    def _next(self) -> deque[tuple[Pairs, Ended, object]]:
        """Removes and returns what is copied together, as pinned memory allows."""
        found: deque[tuple[Pairs, Ended, object]] = deque()
        room_bytes = self._pinned_bytes
        with self._workers.changed:
            while self._waiting:
                pairs = self._waiting[0][0]
                room_bytes -= 0 if self._is_registered else _pageable_bytes(pairs)
                if found and room_bytes < 0:
                    break
                found.append(self._waiting.popleft())
        return found

    def _begun(self, pairs: Pairs) -> list[jax.Array]:
        """Starts to copy by one call; what is not pinned is so once for all devices."""
        pageable = {}
        if not self._is_registered:
            arrays = ((x, to) for x, to in pairs if not isinstance(x, jax.Array))
            pageable = {id(x): (x, to) for x, to in arrays}
        pinned = jax.device_put(
            [x for x, _ in pageable.values()],
            [to.with_memory_kind(PINNED) for _, to in pageable.values()],
        )
        there = dict(zip(pageable, pinned, strict=True))
        sources = [there.get(id(x), x) for x, _ in pairs]
        return jax.device_put(sources, [to for _, to in pairs])


def _error_of(copies: Sequence[jax.Array]) -> BaseException | None:
    """Waits for copies."""
    try:
        jax.block_until_ready(copies)
    except BaseException as error:
        return error
    return None


def _pageable_bytes(pairs: Pairs) -> int:
    arrays = {id(x): x for x, _ in pairs if not isinstance(x, jax.Array)}
    return sum(array.nbytes for array in arrays.values())
