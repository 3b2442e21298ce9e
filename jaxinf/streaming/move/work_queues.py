"""Threads that move params, values and gradients beside the programs of a step.

Invariant: the jobs of a queue begin in the order in which they were submitted, and wait
for those of other queues alone. A source's memory is used again only after its copies
to a device have ended, also if a step is given up.
"""

import threading
import time
import weakref
from collections import Counter, defaultdict, deque
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

_UNLIMITED = 1 << 62
# Items up to this long are taken together, if several wait.
_SHORT_BYTES = 1 << 20


@dataclass(frozen=True)
class Queue:
    """A queue of jobs, or of items that wait for an action. Its name tells which.

    Attributes:
      num_threads: Its threads, from the first job on.
      room_bytes: Memory for items, until the work on them is over.
      together_bytes: The most of several items that are taken together.
    """

    name: Hashable = ""
    num_threads: int = 1
    room_bytes: int = _UNLIMITED
    together_bytes: int = _UNLIMITED


Action: TypeAlias = Callable[[Sequence[Any]], Callable[[], None] | None]
"""Begins with items, in their order; returns what is left to do, beside later ones."""


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
        self._jobs: dict[Hashable, SimpleQueue[Callable[[], None] | None]] = {}
        self._threads: list[tuple[threading.Thread, SimpleQueue[Any]]] = []
        self._num_left = 0
        self._items: defaultdict[Hashable, deque[tuple[Any, int]]] = defaultdict(deque)
        self._item_bytes = Counter[Hashable]()
        self._in_order: dict[Hashable, threading.Lock] = {}
        self._is_dropping = self._is_closed = False
        self.error: BaseException | None = None
        self.changed = threading.Condition()

    def submit(self, job: Callable[[], None], queue: Queue) -> None:
        """Adds a job to a queue."""
        with self.changed:
            if self._is_closed:
                raise StoreClosedError(f"{self._name}: closed; make the function anew")
            if queue.name not in self._jobs:
                self._start(queue)
            self._num_left += 1
            self._jobs[queue.name].put(partial(self._run, [job]))

    def put(self, item: Any, num_bytes: int, action: Action, queue: Queue) -> float:
        """Passes an item on; blocks while too many wait, and returns the seconds.

        One is always accepted. All that wait in a queue have the same action.

        Raises:
          BaseException: The first error of a job.
        """
        room_bytes, name = max(1, queue.room_bytes), queue.name
        most = room_bytes - min(num_bytes, room_bytes)
        waited_s = self.wait_for(lambda: self._item_bytes[name] <= most)
        with self.changed:
            self._items[name].append((item, num_bytes))
            self._item_bytes[name] += num_bytes
            self.submit(partial(self._pass_on, queue, action), queue)
        return waited_s

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
        """Drops items, and jobs that have not begun, or wait; blocks until all end."""
        with self.changed:
            self._is_dropping = True
            self.changed.notify_all()
            self.changed.wait_for(lambda: not self._num_left)
            self._is_dropping, self.error = False, None
            self._items.clear()
            self._item_bytes.clear()

    def close(self) -> None:
        """Drops all jobs and ends the threads; idempotent."""
        self.reset()
        self._is_closed = True
        for _, queue in self._threads:
            queue.put(None)
        while self._threads:
            self._threads.pop()[0].join()

    def _start(self, queue: Queue) -> None:
        own: SimpleQueue[Any] = SimpleQueue()
        for _ in range(queue.num_threads):
            what = {"args": (own,), "name": self._name, "daemon": True}
            thread = threading.Thread(target=_serve, **what)
            thread.start()
            self._threads.append((thread, own))
            weakref.finalize(self, own.put, None).atexit = False
        self._jobs[queue.name], self._in_order[queue.name] = own, threading.Lock()

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

    def _pass_on(self, queue: Queue, action: Action) -> None:
        """Works on the next items, unless another job took them; on a thread."""
        waiting = self._items[queue.name]
        with self._in_order[queue.name]:
            taken, sizes = list[Any](), list[int]()
            while waiting and self.error is None:
                next_bytes = waiting[0][1]
                if sizes and (
                    max(sizes[-1], next_bytes) > _SHORT_BYTES
                    or sum(sizes) + next_bytes > queue.together_bytes
                ):
                    break
                item, num_bytes = waiting.popleft()
                taken.append(item)
                sizes.append(num_bytes)
                del item
            work = action(taken) if taken else None
            del taken
        if work is not None:
            work()
            del work
        with self.changed:
            self._item_bytes[queue.name] -= sum(sizes)


def _serve(queue: "SimpleQueue[Callable[[], None] | None]") -> None:
    """Runs jobs until there is None."""
    while (run := queue.get()) is not None:
        run()
        del run  # it refers to the jobs


# --- copies to devices that have memory of their own ----------------------------------


Pairs: TypeAlias = Sequence[tuple[Array | jax.Array, Any]]
"""The arrays of a tensor on the host, and where each of them goes."""

Ended: TypeAlias = Callable[[Sequence[jax.Array]], None]
"""Takes the copies of a tensor, on a thread that has no lock."""


def start_upload(
    jobs: WorkQueues, pairs: Pairs, ended: Ended, *, pinned_bytes: int | None
) -> None:
    """Starts to copy a tensor; copies end in the order in which they were started.

    A copy to new memory of the device waits for programs that were enqueued before it.
    So all that waits is copied by one call, and two calls are under way.

    Args:
      pinned_bytes: Memory for what is pinned, in which one tensor always has room, of
        devices that do not copy from the host's memory as it is: each array is pinned
        once for all of them, and one call is under way. None if nothing is pinned.
    """
    queue, num_bytes = Queue("uploads", num_threads=2), 0
    if pinned_bytes is not None:
        queue = Queue("uploads", together_bytes=pinned_bytes)
        num_bytes = sum({id(one): one.nbytes for one, _ in pairs}.values())

    def begin(taken: Sequence[tuple[Pairs, Ended]]) -> Callable[[], None]:
        return partial(_copy_all, deque(taken), pins=pinned_bytes is not None)

    jobs.put((pairs, ended), num_bytes, begin, queue)


def _copy_all(left: deque[tuple[Pairs, Ended]], *, pins: bool) -> None:
    with span("back"):
        begun = deque(_begun([pair for own, _ in left for pair in own], pins=pins))
        while left:
            own, ended = left.popleft()
            copies = [begun.popleft() for _ in own]
            ended(jax.block_until_ready(copies))
            del own, ended, copies  # they hold memory


def _begun(pairs: Pairs, *, pins: bool) -> list[jax.Array]:
    sources, places = [x for x, _ in pairs], [to for _, to in pairs]
    if pins:
        once = {id(x): (x, to) for x, to in pairs}.values()
        ways = [to.with_memory_kind(PINNED) for _, to in once]
        pinned = jax.device_put([x for x, _ in once], ways)
        there = {id(x): own for (x, _), own in zip(once, pinned, strict=True)}
        sources = [there[id(x)] for x in sources]
    return jax.device_put(sources, places)
