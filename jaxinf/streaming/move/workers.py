"""Threads that move values and gradients, and their queues of jobs.

Invariant: the jobs of a queue begin in the order in which they were submitted. Threads
refer to nothing but these, so whoever uses them is freed without being closed.
"""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import TypeAlias

from jaxinf.streaming.move.scratch import PART_BYTES
from jaxinf.transfer import BufferPool
from jaxinf.typing import Array

THREADS_PER_DRIVE = 2

Job: TypeAlias = Callable[[Array], None]
"""Work of a thread, which lends it page-aligned memory for a part; raises nothing."""


def writing_bytes(num_drives: int) -> int:
    """Memory of the threads of drives, beside that of the values."""
    return num_drives * THREADS_PER_DRIVE * PART_BYTES


class Workers:
    """Threads for some queues; they start with the first job.

    Attributes:
      changed: The lock; notified when a job has ended.
    """

    def __init__(self, num_threads: Sequence[int], name: str) -> None:
        self._name, self._num_threads = name, num_threads
        self.changed = threading.Condition()
        self._jobs: list[deque[Job]] = [deque() for _ in num_threads]
        self._num_running = 0
        self._threads: list[threading.Thread] = []
        self._is_resetting = self._is_closed = False

    def submit(self, queue: int, job: Job) -> None:
        """Adds a job to a queue; the caller has the lock."""
        if self._is_resetting:  # what ends a job may submit another
            return
        if not self._threads:
            for number, count in enumerate(self._num_threads):
                own = {"args": (number,), "name": self._name, "daemon": True}
                self._threads += [
                    threading.Thread(target=self._run, **own) for _ in range(count)
                ]
            for thread in self._threads:
                thread.start()
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

    def _run(self, queue: int) -> None:
        jobs = self._jobs[queue]
        with BufferPool(PART_BYTES).acquire(PART_BYTES) as bounce:
            while True:
                with self.changed:
                    self.changed.wait_for(lambda: jobs or self._is_closed)
                    if self._is_closed:
                        return
                    self._num_running += 1
                    job = jobs.popleft()
                job(bounce.array)
                del job  # it holds a value
                with self.changed:
                    self._num_running -= 1
                    self.changed.notify_all()
