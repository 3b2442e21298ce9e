"""Copies from the host to devices that have memory of their own.

    waiting ─► one call for all ─► … ─► each has landed
               what comes meanwhile waits for the next call

Invariant: a source's memory is used again only after its copies have ended; also if a
step is given up.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, TypeAlias

import jax

from jaxinf.streaming.program.shards import PINNED
from jaxinf.typing import Array

Crossing: TypeAlias = list[tuple[Array | jax.Array, Any]]
"""Arrays on the host, and where each of them goes."""


class Link:
    """What waits for its copy, and the calls that copy it.

    Args:
      pinned_bytes: Memory of the host for pinned copies of what is in other memory;
        one tensor at a time always has room.
      is_registered: Whether the device copies from all memory without these. Two calls
        are then under way at a time, as a copy to new memory of the device waits for
        programs that were enqueued before it.

    Attributes:
      waiting: The tensors whose copy nobody has begun, in order; under a lock.
      num_calls: Number of calls whose copies may be under way together.
    """

    def __init__(self, pinned_bytes: int, *, is_registered: bool = False) -> None:
        self._pinned_bytes, self._is_registered = pinned_bytes, is_registered
        self.waiting: deque[Any] = deque()
        self.num_calls = 2 if is_registered else 1

    def take(self) -> deque[Any]:
        """Returns the tensors of the next call, and removes them; under the lock."""
        found: deque[Any] = deque()
        room_bytes = self._pinned_bytes
        while self.waiting:
            first = self.waiting[0]
            is_pinned = self._is_registered or first.host is not None
            room_bytes -= 0 if is_pinned else first.host_bytes
            if found and room_bytes < 0:
                break
            found.append(self.waiting.popleft())
        return found

    def cross(
        self, batch: deque[Any]
    ) -> Iterator[tuple[Any, jax.Array | None, BaseException | None]]:
        """Copies tensors by one call; yields each with its copy, or its error. Blocks.

        It ends when all copies have, and keeps none that it has yielded.
        """
        begun: deque[list[jax.Array]] = deque()
        failed: BaseException | None = None
        try:
            crossings = [one.crossing(_source(one)) for one in batch]
            begun.extend(_begun(crossings, through_pinned=not self._is_registered))
            del crossings
        except BaseException as error:
            failed = error
        while batch:
            tensor, copy, own = batch.popleft(), None, failed
            try:
                if failed is None:
                    copy = jax.block_until_ready(tensor.landed(begun.popleft()))
            except BaseException as error:
                own = error
            yield tensor, copy, own
            del tensor, copy, own


def _source(tensor: Any) -> Array | jax.Array:
    return tensor.memory.array if tensor.host is None else tensor.host


def _begun(
    crossings: Sequence[Crossing], *, through_pinned: bool
) -> list[list[jax.Array]]:
    """Starts to copy all arrays by one call."""
    pairs = [pair for crossing in crossings for pair in crossing]
    sources = [source for source, _ in pairs]
    if through_pinned:
        sources = _pinned(pairs)
    arrays = iter(jax.device_put(sources, [to for _, to in pairs]))
    return [list(islice(arrays, len(crossing))) for crossing in crossings]


def _pinned(pairs: Crossing) -> list[Array | jax.Array]:
    """Starts to copy what is not pinned: once for all devices, or not on a CPU."""
    pageable = {id(x): (x, to) for x, to in pairs if not isinstance(x, jax.Array)}
    pinned = jax.device_put(
        [x for x, _ in pageable.values()],
        [to.with_memory_kind(PINNED) for _, to in pageable.values()],
    )
    there = dict(zip(pageable, pinned, strict=True))
    return [there.get(id(x), x) for x, _ in pairs]
