"""Host buffers that a step reads tensors into, on their way to the JAX device.

    buffer, which the device reads in place        a device with the host's memory
    registered buffer ─► device                    … with memory of its own
    buffer ─► pinned_host ─► device                … that registers none

Invariant: a buffer is read into again only after the copies from it have ended, also if
a step is given up.
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

Transfers: TypeAlias = Sequence[tuple[Array | jax.Array, Any]]
"""The arrays of a tensor on the host, each with the sharding that it is copied to."""

OnCopied: TypeAlias = Callable[[Sequence[jax.Array]], None]
"""Takes the copies of a tensor, on a thread that has no lock."""


class HostBuffers(BufferPool):
    """A pool of buffers, and the copies from them to a device with memory of its own.

    Args:
      content: What the buffers hold, which names the queue of copies.
      has_link: Whether the device, that of this thread, has memory of its own.
      pinned_bytes: Further memory for what is pinned on its way to a device that cannot
        copy from the buffers; one tensor always has room.
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
        limits = {"batch_bytes": pinned_bytes} if self._pins else {"num_threads": 2}
        self._queue = Queue(f"{content} to the device", **limits)

    def start_copy(self, transfers: Transfers, on_copied: OnCopied) -> None:
        """Starts to copy a tensor; copies end in the order in which they were started.

        A copy to new memory of the device waits for programs that were enqueued before
        it. So one call copies all tensors that wait.
        """
        sizes = {id(source): source.nbytes for source, _ in transfers}
        num_bytes = sum(sizes.values()) if self._pins else 0
        self._jobs.submit_item(
            (transfers, on_copied),
            num_bytes,
            lambda tensors: partial(self._copy, deque(tensors)),
            self._queue,
        )

    def _copy(self, tensors: deque[tuple[Transfers, OnCopied]]) -> None:
        with span("back"):
            copies = deque(self._copies([pair for x, _ in tensors for pair in x]))
            while tensors:
                transfers, on_copied = tensors.popleft()
                on_copied(jax.block_until_ready([copies.popleft() for _ in transfers]))
                del transfers, on_copied  # they hold memory

    def _copies(self, transfers: Transfers) -> Sequence[jax.Array]:
        sources = [source for source, _ in transfers]
        if self._pins:  # each source once for all devices
            unique = {id(source): (source, to) for source, to in transfers}.values()
            pinned = jax.device_put(
                [source for source, _ in unique],
                [to.with_memory_kind(PINNED) for _, to in unique],
            )
            pinned_of = {
                id(x): copy for (x, _), copy in zip(unique, pinned, strict=True)
            }
            sources = [pinned_of[id(source)] for source in sources]
        return jax.device_put(sources, [to for _, to in transfers])
