"""Buffers of the host that a step reads tensors into, on their way to the JAX device.

    buffer, which the device reads in place        a device with the host's memory
    registered buffer ─► device                    … with memory of its own
    buffer ─► pinned_host ─► device                … that registers none

Invariant: a source's memory is used again only after its copies have ended, also if a
step is given up.
"""

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

import jax

from jaxinf import compat
from jaxinf.streaming.move.work_queues import Queue, WorkQueues
from jaxinf.streaming.program.meshes import default_device
from jaxinf.streaming.program.units import PINNED
from jaxinf.transfer import PAGE_BYTES, BufferPool, span
from jaxinf.typing import Array

Pairs: TypeAlias = Sequence[tuple[Array | jax.Array, Any]]
"""The arrays of a tensor on the host, and where each of them goes."""

Ended: TypeAlias = Callable[[Sequence[jax.Array]], None]
"""Takes the copies of a tensor, on a thread that has no lock."""


class HostBuffers(BufferPool):
    """A pool of buffers, and the copies from them to a device with memory of its own.

    Args:
      content: What they hold, which names the queue of copies.
      has_link: Whether the device, that of this thread, has memory of its own.
      pinned_bytes: Memory beside this for what is pinned on its way to such a device,
        if it cannot copy from the buffers; one tensor always has room.
    """

    def __init__(
        self,
        jobs: WorkQueues,
        content: str,
        num_bytes: int,
        *,
        has_link: bool,
        pinned_bytes: int,
    ) -> None:
        self.device = default_device()
        registry = compat.memory_registry(self.device) if has_link else None
        super().__init__(max(num_bytes, PAGE_BYTES), registry=registry)
        self._jobs, self._pins = jobs, registry is None
        # Two calls are under way, or one, if what it copies is pinned.
        limits = {"together_bytes": pinned_bytes} if self._pins else {"num_threads": 2}
        self._queue = Queue(f"{content} to the device", **limits)

    def start_copy(self, pairs: Pairs, ended: Ended) -> None:
        """Starts to copy a tensor; copies end in the order in which they were started.

        A copy to new memory of the device waits for programs that were enqueued before
        it. So all that waits is copied by one call.
        """
        sizes = {id(source): source.nbytes for source, _ in pairs}
        num_bytes = sum(sizes.values()) if self._pins else 0
        self._jobs.put((pairs, ended), num_bytes, self._begin, self._queue)

    def _begin(self, taken: Sequence[tuple[Pairs, Ended]]) -> Callable[[], None]:
        return partial(self._copy, deque(taken))

    def _copy(self, left: deque[tuple[Pairs, Ended]]) -> None:
        with span("back"):
            copies = deque(self._begun([pair for own, _ in left for pair in own]))
            while left:
                own, ended = left.popleft()
                ended(jax.block_until_ready([copies.popleft() for _ in own]))
                del own, ended  # they hold memory

    def _begun(self, pairs: Pairs) -> Sequence[jax.Array]:
        sources, places = [source for source, _ in pairs], [to for _, to in pairs]
        if self._pins:  # each once for all devices
            once = {id(source): (source, to) for source, to in pairs}.values()
            ways = [to.with_memory_kind(PINNED) for _, to in once]
            pinned = jax.device_put([source for source, _ in once], ways)
            there = {id(x): own for (x, _), own in zip(once, pinned, strict=True)}
            sources = [there[id(source)] for source in sources]
        return jax.device_put(sources, places)
