"""Threads that move params, values and gradients beside the programs of a step.

Invariant: the jobs of a queue begin in the order in which they were submitted. Threads
refer to nothing but these, so whoever uses them is freed without being closed.
"""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from jaxinf.errors import StoreClosedError


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


class Dropped(Exception):
    """A job was dropped while it waited."""


class Workers:
    """Threads for some queues; they start with the first job.

    Attributes:
      changed: The lock of those who use them; notified when a job has ended.
    """

    def __init__(self, num_threads: Sequence[int], name: str) -> None:
        self._name, self._num_threads = name, num_threads
        self.changed = threading.Condition()
        self._jobs: list[deque[tuple[Callable[[], Any], Future[Any]]]] = [
            deque() for _ in num_threads
        ]
        self._num_running = 0
        self._threads: list[threading.Thread] = []
        self._is_resetting = self._is_closed = False

    def submit(self, queue: int, job: Callable[[], Any]) -> Future[Any]:
        """Adds a job to a queue; its future is cancelled if the job is dropped."""
        future: Future[Any] = Future()
        with self.changed:
            if self._is_closed:
                raise StoreClosedError(f"{self._name}: closed; make the function anew")
            if self._is_resetting:  # what ends a job may submit another
                future.cancel()
                return future
            if not self._threads:
                self._start()
            self._jobs[queue].append((job, future))
            self.changed.notify_all()
        return future

    def _start(self) -> None:
        for number, count in enumerate(self._num_threads):
            own = {"args": (number,), "name": self._name, "daemon": True}
            self._threads += [
                threading.Thread(target=self._run, **own) for _ in range(count)
            ]
        for thread in self._threads:
            thread.start()

    def wait(self, is_done: Callable[[], Any]) -> None:
        """Blocks a job until something is done; the caller has the lock.

        Raises:
          Dropped: All jobs were dropped.
        """
        self.changed.wait_for(lambda: self._is_resetting or is_done())
        if self._is_resetting:
            raise Dropped

    def reset(self) -> None:
        """Drops jobs that have not begun or that wait; blocks until none runs.

        Those that are submitted meanwhile are dropped, too.
        """
        with self.changed:
            self._is_resetting = True
            for jobs in self._jobs:
                for _, future in jobs:
                    future.cancel()
                jobs.clear()
            self.changed.notify_all()
            self.changed.wait_for(lambda: not self._num_running)
            self._is_resetting = False

    def close(self) -> None:
        """Drops all jobs and ends the threads; idempotent."""
        self.reset()
        with self.changed:
            self._is_closed = True
            self.changed.notify_all()
        for thread in self._threads:
            thread.join()
        self._threads = []

    def _run(self, queue: int) -> None:
        jobs = self._jobs[queue]
        while True:
            with self.changed:
                self.changed.wait_for(lambda: jobs or self._is_closed)
                if self._is_closed:
                    return
                self._num_running += 1
                job, future = jobs.popleft()
            try:
                future.set_result(job())
            except BaseException as error:
                future.set_exception(error)
                del error
            del job, future  # they hold a value
            with self.changed:
                self._num_running -= 1
                self.changed.notify_all()
