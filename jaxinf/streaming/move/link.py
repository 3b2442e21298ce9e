"""Copies from the host to devices that have memory of their own.

Invariant: a source's memory is used again only after its copies have ended; also if a
step is given up.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import jax

from jaxinf.streaming.move.tensors import Crossing
from jaxinf.streaming.program.shards import PINNED
from jaxinf.typing import Array


def copied(
    batch: deque[Any], *, through_pinned: bool
) -> Iterator[tuple[Any, jax.Array | None, BaseException | None]]:
    """Copies tensors by one call; yields each with its copy, or its error. Blocks.

    It ends when all copies have, and keeps none that it has yielded.

    Args:
      through_pinned: Whether the device copies from pinned memory alone.
    """
    begun: deque[list[jax.Array]] = deque()
    failed: BaseException | None = None
    try:
        crossings = [one.crossing(_source(one)) for one in batch]
        begun.extend(_begun(crossings, through_pinned=through_pinned))
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
