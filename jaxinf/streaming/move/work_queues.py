"""Threads that move params, values and gradients beside the programs of a step.

Invariant: the jobs of a queue begin in the order in which they were submitted, and wait
for those of other queues alone. A source's memory is used again only after its copies
to a device have ended, also if a step is given up.
"""

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Any, Generic, TypeAlias, TypeVar

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
      num_out_bytes: Bytes copied from a device with memory of its own to the host.
    """

    num_written_bytes: int = 0
    num_read_bytes: int = 0
    waited_s: float = 0.0
    num_got: int = 0
    num_ready: int = 0
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

        Jobs may wait, too: for what those of other queues, or the caller, do.

        Raises:
          BaseException: The first error of a job.
          StoreClosedError: Jobs are dropped, of which the caller is one.
        """

        def ends() -> bool:
            return self.error is not None or self._is_dropping or is_done()

        began_s = time.perf_counter()
        with self.changed:
            self.changed.wait_for(ends)
            if self.error is not None:
                raise self.error
            if self._is_dropping:
                raise StoreClosedError(f"{self._name}: its jobs were dropped")
        return time.perf_counter() - began_s

    def end(self) -> None:
        """Blocks until all jobs have ended; raises as `wait_for`."""
        self.wait_for(lambda: not self._num_left)

    def reset(self) -> None:
        """Drops jobs that have not begun, or wait; blocks until all have ended."""
        with self.changed:
            self._is_dropping = True
            self.changed.notify_all()
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
            with self.changed:
                self.error = self.error or error
        del job  # it holds values
        with self.changed:
            self._num_left -= 1
            self.changed.notify_all()


def _serve(queue: "SimpleQueue[Callable[[], None] | None]") -> None:
    """Runs jobs until there is None."""
    while (run := queue.get()) is not None:
        run()
        del run  # it refers to the jobs


_T = TypeVar("_T")

Action: TypeAlias = Callable[[Sequence[_T]], Callable[[], None] | None]
"""Begins with items, in their order; returns what is left to do, beside later ones."""

# Items up to this long are taken together, if several wait.
_SHORT_BYTES = 1 << 20


class BoundedQueue(Generic[_T]):
    """Items that wait for an action on threads, bounded in bytes.

    Args:
      jobs: Have a queue of that name for them.
      room_bytes: Memory for items, until the work on them is over.
      together_bytes: The most of several items that are taken together.
    """

    def __init__(
        self,
        jobs: WorkQueues,
        name: str,
        *,
        num_threads: int,
        room_bytes: int = 1 << 62,
        together_bytes: int = 1 << 62,
    ) -> None:
        self._jobs, self._name, self._num_threads = jobs, name, num_threads
        self._room_bytes, self._held_bytes = max(1, room_bytes), 0
        self._together_bytes = together_bytes
        self._waiting: deque[tuple[_T, int]] = deque()
        self._in_order = threading.Lock()

    def put(self, item: _T, num_bytes: int, action: Action[_T]) -> float:
        """Passes an item on; blocks while too many wait, and returns the seconds.

        One is always accepted. All that wait have the same action.

        Raises:
          BaseException: The first error of a job.
        """
        most = self._room_bytes - min(num_bytes, self._room_bytes)
        waited_s = self._jobs.wait_for(lambda: self._held_bytes <= most)
        with self._jobs.changed:
            self._waiting.append((item, num_bytes))
            self._held_bytes += num_bytes
            job = partial(self._pass_on, action)
            self._jobs.submit(job, self._name, self._num_threads)
        return waited_s

    def drop(self) -> None:
        """Drops items that wait, and all jobs; blocks until what runs is over."""
        self._jobs.reset()
        self._waiting.clear()
        self._held_bytes = 0

    def _pass_on(self, action: Action[_T]) -> None:
        """Works on the next items, unless another job took them; on a thread."""
        with self._in_order:
            taken, sizes = list[_T](), list[int]()
            while self._waiting and self._jobs.error is None:
                next_bytes = self._waiting[0][1]
                if sizes and (
                    max(sizes[-1], next_bytes) > _SHORT_BYTES
                    or sum(sizes) + next_bytes > self._together_bytes
                ):
                    break
                item, num_bytes = self._waiting.popleft()
                taken.append(item)
                sizes.append(num_bytes)
                del item
            work = action(taken) if taken else None
            del taken
        if work is not None:
            work()
            del work
        with self._jobs.changed:
            self._held_bytes -= sum(sizes)


Pairs: TypeAlias = Sequence[tuple[Array | jax.Array, Any]]
"""The arrays of a tensor on the host, and where each of them goes."""

Ended: TypeAlias = Callable[[Sequence[jax.Array]], None]
"""Takes the copies of a tensor, on a thread that has no lock."""


class Uploads(BoundedQueue[tuple[Pairs, Ended]]):
    """Copies tensors in order to devices that have memory of their own.

    A copy to new memory of the device waits for programs that were enqueued before it.
    So all that waits is copied by one call, and two calls are under way.

    Args:
      pins: Whether arrays are pinned on their way, each once for all devices, since
        these do not copy from the host's memory as it is; one call is then under way.
      pinned_bytes: Memory for what is pinned; one tensor always has room.
    """

    def __init__(self, jobs: WorkQueues, *, pins: bool, pinned_bytes: int = 0) -> None:
        how = {"num_threads": 1, "together_bytes": pinned_bytes}
        super().__init__(jobs, "uploads", **(how if pins else {"num_threads": 2}))
        self._pins = pins

    def start(self, pairs: Pairs, ended: Ended) -> None:
        """Starts to copy a tensor."""
        sizes = {id(source): source.nbytes for source, _ in pairs}
        self.put((pairs, ended), sum(sizes.values()) * self._pins, self._copy)

    def _copy(self, batch: Sequence[tuple[Pairs, Ended]]) -> Callable[[], None]:
        return partial(self._copy_all, deque(batch))

    def _copy_all(self, left: deque[tuple[Pairs, Ended]]) -> None:
        with span("back"):
            begun = deque(self._begun([pair for own, _ in left for pair in own]))
            while left:
                own, ended = left.popleft()
                copies = [begun.popleft() for _ in own]
                ended(jax.block_until_ready(copies))
                del own, ended, copies  # they hold memory

    def _begun(self, pairs: Pairs) -> list[jax.Array]:
        sources, places = [x for x, _ in pairs], [to for _, to in pairs]
        if self._pins:
            once = {id(x): (x, to) for x, to in pairs}.values()
            ways = [to.with_memory_kind(PINNED) for _, to in once]
            pinned = jax.device_put([x for x, _ in once], ways)
            there = {id(x): own for (x, _), own in zip(once, pinned, strict=True)}
            sources = [there[id(x)] for x in sources]
        return jax.device_put(sources, places)
