"""Threads that move values, and their queues of jobs.

Invariant: the jobs of a queue begin in the order in which they were submitted. What
ends a job runs under the lock, one at a time.
"""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from jaxinf.io import BufferPool
from jaxinf.streaming.move.scratch import PART_BYTES
from jaxinf.typing import Array

THREADS_PER_DRIVE = 2


def writing_bytes(num_drives: int) -> int:
    """Memory of the threads of drives, beside that of the values."""
    return num_drives * THREADS_PER_DRIVE * PART_BYTES


class Job(NamedTuple):
    """Work of a thread.

    Attributes:
      move: Called with page-aligned memory for a part; what it returns is for `ended`.
      ended: Called under the lock with that, or with None and the exception.
    """

    move: Callable[[Array], Any]
    ended: Callable[[Any, BaseException | None], None]


class Workers:
    """Threads for some queues; they start with the first job.

    Attributes:
      changed: The lock; notified when a job has ended.
    """

    def __init__(
        self, num_threads: Sequence[int], name: str = "jaxinf-activations"
    ) -> None:
        self._name = name
        self.changed = threading.Condition()
        self._num_threads = num_threads
        self._jobs: list[deque[Job]] = [deque() for _ in num_threads]
        self._num_running = 0
        self._threads: list[threading.Thread] = []
        self._is_resetting = False
        self._is_closed = False

    def submit(self, queue: int, job: Job) -> None:
        """Adds a job to a queue; the caller has the lock."""
        if self._is_resetting:  # what ends a job may submit another
            return
        if not self._threads:
            self._start()
        self._jobs[queue].append(job)
        self.changed.notify_all()

    def reset(self) -> None:
        """Drops jobs that have not begun; blocks until none runs.

        Those that are submitted meanwhile are dropped, too.
        """
        with self.changed:
            self._is_resetting = True
            for jobs in self._jobs:
                jobs.clear()
            self.changed.wait_for(lambda: not self._num_running)
            self._is_resetting = False

    def close(self) -> None:
        """Ends the threads; idempotent."""
        with self.changed:
            self._is_closed = True
            self.changed.notify_all()
        for thread in self._threads:
            thread.join()
        self._threads = []

    def _start(self) -> None:
        for queue, count in enumerate(self._num_threads):
            for _ in range(count):
                thread = threading.Thread(
                    target=self._run,
                    args=(queue,),
                    name=self._name,
                    daemon=True,
                )
                self._threads.append(thread)
                thread.start()

    def _run(self, queue: int) -> None:
        with BufferPool(PART_BYTES).acquire(PART_BYTES) as bounce:
            while (job := self._next(queue)) is not None:
                moved, error = _moved(job, bounce.array)
                with self.changed:
                    self._num_running -= 1
                    job.ended(moved, error)
                    del job, moved, error  # they hold the value
                    self.changed.notify_all()

    def _next(self, queue: int) -> Job | None:
        """The next job of a queue; blocks until there is one. None at the end."""
        jobs = self._jobs[queue]
        with self.changed:
            self.changed.wait_for(lambda: jobs or self._is_closed)
            if self._is_closed:
                return None
            self._num_running += 1
            return jobs.popleft()


def _moved(job: Job, bounce: Array) -> tuple[Any, BaseException | None]:
    try:
        return job.move(bounce), None
    except BaseException as error:
        return None, error
