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
    """A queue of jobs, or of items that wait for an action. Its name tells which.

    Attributes:
      num_threads: Number of threads, from the first job on.
      room_bytes: Memory for items, until the work on them is over.
      together_bytes: The most of several items that are taken together.
    """

    name: Hashable
    num_threads: int = 1
    room_bytes: int = _UNLIMITED
    together_bytes: int = _UNLIMITED


@dataclass(eq=False)
class _Line:
    """What waits in a queue: jobs, and items for those of them that act on some."""

    jobs: "SimpleQueue[Callable[[], None] | None]" = field(default_factory=SimpleQueue)
    items: deque[tuple[Any, int]] = field(default_factory=deque)
    item_bytes: int = 0
    in_order: threading.Lock = field(default_factory=threading.Lock)


Action: TypeAlias = Callable[[Sequence[Any]], Callable[[], None] | None]
"""Begins with items, in their order; returns what is left to do, beside later ones."""


class WorkQueues:
    """All queues of a step's jobs, and their threads, which start with the first job.

    After a job's error no other begins, and who waits gets that error, until `reset`.
    That drops the jobs of all queues, so a step is given up as a whole.

    The threads end when this is closed, or nobody refers to it. A process does not wait
    for them at its end, and a thread that outlives the main one may still use them,
    neither of which holds for those of `concurrent.futures`.

    Attributes:
      changed: The lock of those who use them; notified when a job has ended.
      error: The first error since `reset`.
    """

    def __init__(self) -> None:
        self._lines: dict[Hashable, _Line] = {}
        self._threads: list[tuple[threading.Thread, _Line]] = []
        self._num_left = 0
        self._is_dropping = self._is_closed = False
        self.error: BaseException | None = None
        self.changed = threading.Condition()

    def submit(self, job: Callable[[], None], queue: Queue) -> None:
        """Adds a job to a queue."""
        with self.changed:
            line = self._line(queue)
            self._num_left += 1
            line.jobs.put(partial(self._run, [job]))

    def put(self, item: Any, num_bytes: int, action: Action, queue: Queue) -> float:
        """Passes an item on; blocks while too many wait, and returns the seconds.

        One is always accepted. All that wait in a queue have the same action.

        Raises:
          BaseException: The first error of a job.
        """
        with self.changed:
            line, room_bytes = self._line(queue), max(1, queue.room_bytes)
            most = room_bytes - min(num_bytes, room_bytes)
            waited_s = self.wait_for(lambda: line.item_bytes <= most)
            line.items.append((item, num_bytes))
            line.item_bytes += num_bytes
            self.submit(partial(self._pass_on, line, queue, action), queue)
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
                raise StoreClosedError("jaxinf.stream: a step was given up")
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
            for line in self._lines.values():
                line.items.clear()
                line.item_bytes = 0

    def close(self) -> None:
        """Drops all jobs and ends the threads; idempotent."""
        self.reset()
        self._is_closed = True
        for _, line in self._threads:
            line.jobs.put(None)
        while self._threads:
            self._threads.pop()[0].join()

    def _line(self, queue: Queue) -> _Line:
        if self._is_closed:
            raise StoreClosedError("jaxinf.stream: closed; make the function anew")
        if queue.name not in self._lines:
            line = self._lines[queue.name] = _Line()
            for _ in range(queue.num_threads):
                what = {"args": (line.jobs,), "name": "jaxinf-stream", "daemon": True}
                thread = threading.Thread(target=serve, **what)
                thread.start()
                self._threads.append((thread, line))
                weakref.finalize(self, line.jobs.put, None).atexit = False
        return self._lines[queue.name]

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

    def _pass_on(self, line: _Line, queue: Queue, action: Action) -> None:
        """Works on the next items, unless another job took them; on a thread."""
        with line.in_order:
            taken, sizes = list[Any](), list[int]()
            while line.items and self.error is None:
                next_bytes = line.items[0][1]
                if sizes and (
                    max(sizes[-1], next_bytes) > _SHORT_BYTES
                    or sum(sizes) + next_bytes > queue.together_bytes
                ):
                    break
                item, num_bytes = line.items.popleft()
                taken.append(item)
                sizes.append(num_bytes)
                del item
            work = action(taken) if taken else None
            del taken
        if work is not None:
            work()
            del work
        with self.changed:
            line.item_bytes -= sum(sizes)
