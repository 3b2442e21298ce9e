"""Threads that move params, values and gradients beside the programs of a step.

Invariant: the jobs of a queue begin in the order in which they were submitted, and wait
for drives and devices alone. A source's memory is used again only after its copies to a
device have ended, also if a step is given up.
"""

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeAlias

import jax

from jaxinf.errors import StoreClosedError
from jaxinf.streaming.program.units import PINNED
from jaxinf.transfer import span
from jaxinf.typing import Array


@dataclass
class MoveCounts:
    """Traffic and times since the previous counts.

    Attributes:
      waited_s: Time that the caller waited for any move.
      num_got, num_ready: Number of tensors that the caller got, and of those that were
        on the device already.
      num_forwarded: Number of values that came back before a drive had them.
      num_out_bytes: Bytes copied from a device with memory of its own to the host.
    """

    num_written_bytes: int = 0
    num_read_bytes: int = 0
    waited_s: float = 0.0
    num_got: int = 0
    num_ready: int = 0
    num_forwarded: int = 0
    num_out_bytes: int = 0

    @property
    def hit_rate(self) -> float:
        """Share of the tensors that were on the device when the caller got them."""
        return self.num_ready / self.num_got if self.num_got else 1.0


class WorkQueues:
    """Queues of jobs, and their threads, which start with the first job of each.

    After a job's error no other begins, and who waits gets that error, until `reset`.
    The threads end when this is closed, or nobody refers to it. A process does not wait
    for them at its end, and a thread that outlives the main one may still use them,
    neither of which holds for those of `concurrent.futures`.

    Attributes:
      changed: The lock of those who use them; notified when a job has ended.
      error: The first error since `reset`.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._queues: dict[Hashable, SimpleQueue[Callable[[], None] | None]] = {}
        self._threads: list[tuple[threading.Thread, SimpleQueue[Any]]] = []
        self._num_left = 0
        self._is_dropping = self._is_closed = False
        self.error: BaseException | None = None
        self.changed = threading.Condition()

    def submit(
        self, job: Callable[[], None], queue: Hashable = "", num_threads: int = 1
    ) -> None:
        """Adds a job to a queue, which has so many threads from its first one on."""
        with self.changed:
            if self._is_closed:
                raise StoreClosedError(f"{self._name}: closed; make the function anew")
            if queue not in self._queues:
                self._start(queue, num_threads)
            self._num_left += 1
            self._queues[queue].put(partial(self._run, [job]))

    def wait_for(self, is_done: Callable[[], bool]) -> float:
        """Blocks until a condition holds, with the lock; returns the seconds.

        Raises:
          BaseException: The first error of a job.
        """
        began_s = time.perf_counter()
        with self.changed:
            self.changed.wait_for(lambda: self.error is not None or is_done())
            if self.error is not None:
                raise self.error
        return time.perf_counter() - began_s

    def end(self) -> None:
        """Blocks until all jobs have ended; raises as `wait_for`."""
        self.wait_for(lambda: not self._num_left)

    def fail(self, error: BaseException) -> None:
        with self.changed:
            self.error = self.error or error
            self.changed.notify_all()

    def reset(self) -> None:
        """Drops jobs that have not begun; blocks until all others have ended."""
        with self.changed:
            self._is_dropping = True
            self.changed.wait_for(lambda: not self._num_left)
            self._is_dropping, self.error = False, None

    def close(self) -> None:
        """Drops all jobs and ends the threads; idempotent."""
        self.reset()
        self._is_closed = True
        for _, queue in self._threads:
            queue.put(None)
        while self._threads:
            self._threads.pop()[0].join()

    def _start(self, queue: Hashable, num_threads: int) -> None:
        own: SimpleQueue[Any] = SimpleQueue()
        for _ in range(num_threads):
            what = {"args": (own,), "name": self._name, "daemon": True}
            thread = threading.Thread(target=_serve, **what)
            thread.start()
            self._threads.append((thread, own))
            weakref.finalize(self, own.put, None).atexit = False
        self._queues[queue] = own

    def _run(self, held: list[Callable[[], None]]) -> None:
        job = held.pop()
        try:
            if not self._is_dropping and self.error is None:
                job()
        except BaseException as error:
            self.fail(error)
        del job  # it holds values
        with self.changed:
            self._num_left -= 1
            self.changed.notify_all()


def _serve(queue: "SimpleQueue[Callable[[], None] | None]") -> None:
    """Runs jobs until there is None."""
    while (run := queue.get()) is not None:
        run()
        del run  # it refers to the jobs


Pairs: TypeAlias = Sequence[tuple[Array | jax.Array, Any]]
"""The arrays of a tensor on the host, and where each of them goes."""

Ended: TypeAlias = Callable[[Sequence[jax.Array]], None]
"""Takes the copies of a tensor, on a thread that has no lock."""


class Uploads:
    """Copies tensors in order to devices that have memory of their own, on threads.

    Args:
      jobs: Have a queue for them.
      is_registered: Whether the device copies from the host's memory as it is;
        otherwise each array is pinned on its way.
      pinned_bytes: Memory for what is pinned; one tensor at a time always has room.
    """

    def __init__(
        self, jobs: WorkQueues, *, is_registered: bool, pinned_bytes: int = 0
    ) -> None:
        self._jobs, self._pinned_bytes = jobs, pinned_bytes
        self._is_registered = is_registered
        self._waiting: deque[tuple[Pairs, Ended]] = deque()

    def start(self, pairs: Pairs, ended: Ended) -> None:
        """Starts to copy a tensor."""
        # A copy to new memory of the device waits for programs that were enqueued
        # before it. So all that waits is started at once, and two calls are under way
        # where nothing else limits them.
        with self._jobs.changed:
            self._waiting.append((pairs, ended))
            self._jobs.submit(self._copy, "uploads", 2 if self._is_registered else 1)

    def drop(self) -> None:
        """Drops what waits; its jobs were dropped."""
        self._waiting.clear()

    def _copy(self) -> None:
        """Copies what waits, by one call as far as pinned memory allows."""
        room_bytes, batch = self._pinned_bytes, deque[tuple[Pairs, Ended]]()
        with self._jobs.changed:
            while self._waiting:
                pageable = self._pageable(self._waiting[0][0])
                room_bytes -= sum(source.nbytes for source, _ in pageable)
                if batch and room_bytes < 0:
                    break
                batch.append(self._waiting.popleft())
        if not batch:  # another job had it
            return
        pairs = [pair for own, _ in batch for pair in own]
        with span("back"):
            begun = deque(self._begun(pairs))
            del pairs
            while batch:
                own, ended = batch.popleft()
                copies = [begun.popleft() for _ in own]
                try:
                    ended(jax.block_until_ready(copies))
                except BaseException as error:
                    self._jobs.fail(error)
                del own, ended, copies  # they hold memory

    def _begun(self, pairs: Pairs) -> list[jax.Array]:
        """Starts to copy by one call; what is not pinned is so once for all devices."""
        pageable = self._pageable(pairs)
        pinned = jax.device_put(
            [x for x, _ in pageable],
            [to.with_memory_kind(PINNED) for _, to in pageable],
        )
        there = {id(x): own for (x, _), own in zip(pageable, pinned, strict=True)}
        sources = [there.get(id(x), x) for x, _ in pairs]
        return jax.device_put(sources, [to for _, to in pairs])

    def _pageable(self, pairs: Pairs) -> Pairs:
        """Returns those that are pinned on their way, each once."""
        if self._is_registered:
            return ()
        found = {id(x): (x, to) for x, to in pairs if not isinstance(x, jax.Array)}
        return [*found.values()]
