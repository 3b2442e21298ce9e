"""Threads that move params, values and gradients beside the programs of a step.

    read for programs ─► copy to the device      values out, and back
    write and read each drive's files            update units near storage

Invariant: the jobs of a queue begin in the order in which they were submitted, and wait
for those of other queues alone.
"""

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeAlias

from jaxinf.errors import StoreClosedError
from jaxinf.processes import serve

_UNLIMITED = 1 << 62
# Items up to this long are taken together, if several wait.
_SHORT_BYTES = 1 << 20


@dataclass(frozen=True)
class Queue:
    """The name and limits of a queue of jobs, or of items that threads work on.

    Items have `room_bytes` of memory until the work on them is over; several items that
    are taken together have at most `batch_bytes`.
    """

    name: Hashable
    num_threads: int = 1
    room_bytes: int = _UNLIMITED
    batch_bytes: int = _UNLIMITED


@dataclass(eq=False)
class _Waiting:
    jobs: "SimpleQueue[Callable[[], None] | None]" = field(default_factory=SimpleQueue)
    items: deque[tuple[Any, int]] = field(default_factory=deque)
    item_bytes: int = 0
    order_lock: threading.Lock = field(default_factory=threading.Lock)


BeginWork: TypeAlias = Callable[[Sequence[Any]], Callable[[], None] | None]
"""Begins the work on items, one batch after another; returns the rest of the work,
which may run beside that on later batches."""


class WorkQueues:
    """All queues of a step's jobs; a queue's threads start with its first job.

    After a job fails, no other begins, and every waiter gets the job's error, until
    `reset` drops the jobs of all queues. So a step is given up as a whole: first this
    is reset, then what its jobs have moved.

    The threads end when this is closed or nobody refers to it. Unlike the threads of
    `concurrent.futures`, they do not delay the end of the process, and a thread that
    outlives the main one may still submit jobs.

    Attributes:
      changed: The lock that all users share; notified when a job has ended.
      error: The first error since `reset`.
    """

    def __init__(self) -> None:
        self._waiting: dict[Hashable, _Waiting] = {}
        self._threads: list[tuple[threading.Thread, _Waiting]] = []
        self._num_unfinished = 0
        self._is_dropping = self._is_closed = False
        self.error: BaseException | None = None
        self.changed = threading.Condition()

    def submit(self, job: Callable[[], None], queue: Queue) -> None:
        with self.changed:
            waiting = self._waiting_in(queue)
            self._num_unfinished += 1
            waiting.jobs.put(partial(self._run, [job]))

    def submit_item(
        self, item: Any, num_bytes: int, begin_work: BeginWork, queue: Queue
    ) -> float:
        """Submits an item; blocks while the queue has no room, and returns the seconds.

        An empty queue accepts an item of any size. All items of a queue have the same
        `begin_work`. Raises as `wait_for`.
        """
        with self.changed:
            waiting, room_bytes = self._waiting_in(queue), max(1, queue.room_bytes)
            limit_bytes = room_bytes - min(num_bytes, room_bytes)
            waited_s = self.wait_for(lambda: waiting.item_bytes <= limit_bytes)
            waiting.items.append((item, num_bytes))
            waiting.item_bytes += num_bytes
            self.submit(partial(self._work, waiting, queue, begin_work), queue)
        return waited_s

    def wait_for(self, is_done: Callable[[], bool]) -> float:
        """Blocks until a condition holds, read under the lock; returns the seconds.

        Jobs may call this, too, to wait for jobs of other queues or for the caller.

        Raises:
          BaseException: The first error of a job.
          StoreClosedError: `reset` drops the job that waits.
        """

        def is_over() -> bool:
            return self.error is not None or self._is_dropping or is_done()

        began_s = time.perf_counter()
        with self.changed:
            self.changed.wait_for(is_over)
            if self.error is not None:
                raise self.error
            if self._is_dropping:
                raise StoreClosedError("jaxinf.stream: a step was given up")
        return time.perf_counter() - began_s

    def wait_all(self) -> None:
        """Blocks until all jobs have ended; raises as `wait_for`."""
        self.wait_for(lambda: not self._num_unfinished)

    def reset(self) -> None:
        """Drops items and jobs that wait; blocks until jobs under way have ended."""
        with self.changed:
            self._is_dropping = True
            self.changed.notify_all()
            self.changed.wait_for(lambda: not self._num_unfinished)
            self._is_dropping, self.error = False, None
            for waiting in self._waiting.values():
                waiting.items.clear()
                waiting.item_bytes = 0

    def close(self) -> None:
        self.reset()
        self._is_closed = True
        for _, waiting in self._threads:
            waiting.jobs.put(None)
        while self._threads:
            self._threads.pop()[0].join()

    def _waiting_in(self, queue: Queue) -> _Waiting:
        if self._is_closed:
            raise StoreClosedError("jaxinf.stream: closed; make the function anew")
        if queue.name not in self._waiting:
            waiting = self._waiting[queue.name] = _Waiting()
            for _ in range(queue.num_threads):
                thread = threading.Thread(
                    target=serve,
                    args=(waiting.jobs,),
                    name="jaxinf-stream",
                    daemon=True,
                )
                thread.start()
                self._threads.append((thread, waiting))
                weakref.finalize(self, waiting.jobs.put, None).atexit = False
        return self._waiting[queue.name]

    def _run(self, only_job: list[Callable[[], None]]) -> None:
        job = only_job.pop()  # so that the queue holds it no longer
        try:
            if not self._is_dropping and self.error is None:
                job()
        except BaseException as error:
            with self.changed:
                self.error = self.error or error
        del job  # it holds values
        with self.changed:
            self._num_unfinished -= 1
            self.changed.notify_all()

    def _work(self, waiting: _Waiting, queue: Queue, begin_work: BeginWork) -> None:
        """Works on the next items, unless another job took them; on a thread."""
        with waiting.order_lock:
            batch, sizes = list[Any](), list[int]()
            while waiting.items and self.error is None:
                next_bytes = waiting.items[0][1]
                if sizes and (
                    max(sizes[-1], next_bytes) > _SHORT_BYTES
                    or sum(sizes) + next_bytes > queue.batch_bytes
                ):
                    break
                item, num_bytes = waiting.items.popleft()
                batch.append(item)
                sizes.append(num_bytes)
                del item
            finish_work = begin_work(batch) if batch else None
            del batch
        if finish_work is not None:
            finish_work()
            del finish_work
        with self.changed:
            waiting.item_bytes -= sum(sizes)
