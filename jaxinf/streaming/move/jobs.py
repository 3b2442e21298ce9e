"""Threads that move params, values and gradients beside the programs of a step.

Invariant: the jobs of a queue begin in the order in which they were submitted, and wait
for drives and devices alone. A source's memory is used again only after its copies to a
device have ended, also if a step is given up.
"""

import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, TypeAlias

import jax

from jaxinf.errors import StoreClosedError
from jaxinf.streaming.program.shards import PINNED
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


_Job: TypeAlias = tuple[Callable[[], Any], Future[Any]]


class Jobs:
    """A queue of jobs, and its threads, which start with the first job.

    The threads end when this is closed, or nobody refers to it. A process does not wait
    for them at its end, and a thread that outlives the main one may still use them,
    neither of which holds for those of `concurrent.futures`.

    Attributes:
      changed: The lock of those who use them; notified when a job has ended.
    """

    def __init__(self, name: str, num_threads: int = 1) -> None:
        self._name, self._num_threads = name, num_threads
        self._queue: SimpleQueue[_Job | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._moves = set[Future[Any]]()
        self._is_closed = False
        self.changed = threading.Condition()

    def submit(
        self,
        job: Callable[[], Any],
        ended: Callable[[Future[Any]], None] = lambda move: None,
    ) -> None:
        """Adds a job; at its end `ended` is called, with a cancelled future if the job
        was dropped."""
        if self._is_closed:
            raise StoreClosedError(f"{self._name}: closed; make the function anew")
        move: Future[Any] = Future()
        with self.changed:
            if not self._threads:
                self._start()
            self._moves.add(move)
            self._queue.put((job, move))
        move.add_done_callback(ended)
        move.add_done_callback(self._ended)  # the last

    def reset(self) -> None:
        """Drops jobs that have not begun; blocks until all others have ended.

        Its user sees to it that the end of a job submits no other.
        """
        with self.changed:
            for move in [*self._moves]:
                move.cancel()
            self.changed.wait_for(lambda: not self._moves)

    def close(self) -> None:
        """Drops all jobs and ends the threads; idempotent."""
        self._is_closed = True
        self.reset()
        for _ in self._threads:
            self._queue.put(None)
        while self._threads:
            self._threads.pop().join()

    def _start(self) -> None:
        for _ in range(self._num_threads):
            what = {"args": (self._queue,), "name": self._name, "daemon": True}
            thread = threading.Thread(target=_serve, **what)
            thread.start()
            self._threads.append(thread)
            weakref.finalize(self, self._queue.put, None).atexit = False

    def _ended(self, move: Future[Any]) -> None:
        with self.changed:
            self._moves.discard(move)
            self.changed.notify_all()


def _serve(queue: "SimpleQueue[_Job | None]") -> None:
    """Runs jobs until there is None."""
    while (found := queue.get()) is not None:
        job, move = found
        if move.set_running_or_notify_cancel():
            try:
                move.set_result(job())
            except BaseException as error:
                move.set_exception(error)
        del found, job, move  # they hold values


Pairs: TypeAlias = Sequence[tuple[Array | jax.Array, Any]]
"""The arrays of a tensor on the host, and where each of them goes."""

Ended: TypeAlias = Callable[[Sequence[jax.Array]], None]
"""Takes the copies of a tensor, on a thread that has no lock."""


class Uploads:
    """Copies tensors in order to devices that have memory of their own, on threads.

    Args:
      failed: Takes an error, on a thread.
      is_registered: Whether the device copies from the host's memory as it is;
        otherwise each array is pinned on its way.
      pinned_bytes: Memory for what is pinned; one tensor at a time always has room.
    """

    def __init__(
        self,
        failed: Callable[[BaseException], None],
        *,
        is_registered: bool,
        pinned_bytes: int = 0,
    ) -> None:
        self._failed, self._pinned_bytes = failed, pinned_bytes
        self._is_registered = is_registered
        # A copy to new memory of the device waits for programs that were enqueued
        # before it. So all that waits is started at once, and two calls are under way
        # where nothing else limits them.
        self._jobs = Jobs("jaxinf-uploads", 2 if is_registered else 1)
        self._waiting: deque[tuple[Pairs, Ended, object]] = deque()

    def start(self, pairs: Pairs, ended: Ended, what: object) -> None:
        """Starts to copy a tensor."""
        with self._jobs.changed:
            self._waiting.append((pairs, ended, what))
            self._jobs.submit(self._copy)

    def drop(self) -> None:
        """Drops what has not begun; blocks until the rest has ended."""
        self._jobs.reset()
        self._waiting.clear()

    def close(self) -> None:
        self._jobs.close()

    def _copy(self) -> None:
        """Copies what waits, by one call as far as pinned memory allows."""
        room_bytes, batch = self._pinned_bytes, deque[tuple[Pairs, Ended, object]]()
        with self._jobs.changed:
            while self._waiting:
                pageable = self._pageable(self._waiting[0][0])
                room_bytes -= sum(source.nbytes for source, _ in pageable)
                if batch and room_bytes < 0:
                    break
                batch.append(self._waiting.popleft())
        if not batch:  # another job had it
            return
        pairs = [pair for own, _, _ in batch for pair in own]
        num_bytes = sum(source.nbytes for source, _ in pairs)
        with span("back", batch[0][2], num_bytes=num_bytes):
            try:
                begun = deque(self._begun(pairs))
            except BaseException as error:
                self._failed(error)
                return
            del pairs
            while batch:
                own, ended, _ = batch.popleft()
                copies = [begun.popleft() for _ in own]
                try:
                    ended(jax.block_until_ready(copies))
                except BaseException as error:
                    self._failed(error)
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
