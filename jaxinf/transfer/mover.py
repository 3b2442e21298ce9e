"""The mover: worker threads, and callers that wait for them.

A worker executes one unit of work at a time, always the next one. Workers that move
bytes and workers that compute have limits of their own, so that neither drives nor
processors have to wait.

Invariant: the queues change under the lock, and work is done outside it. The first
error stops everything: no later unit starts, and all waiting callers get that very
exception.
"""

import contextlib
import threading
from collections.abc import Callable, Collection, Hashable, Sequence
from types import TracebackType

from jaxinf.errors import StoreClosedError, StoreError
from jaxinf.transfer.queues import Queues
from jaxinf.transfer.scheduling import next_for_submitter, next_unit
from jaxinf.transfer.tasks import (
    Compute,
    Load,
    Loads,
    Task,
    TaskGroup,
    Unit,
    Write,
    idle,
)


class Failure:
    """The first error of any thread, at which all threads stop. Thread-safe."""

    def __init__(self) -> None:
        # Makes a note for the error, if any, before anyone sees it.
        self.note: Callable[[], str | None] = lambda: None
        self._lock = threading.Lock()
        self.error: BaseException | None = None  # the same object every time
        self._traceback: TracebackType | None = None
        self._listeners: list[Callable[[], None]] = []

    def fail(self, error: BaseException) -> None:
        """Keeps the error if it is the first, and then calls the listeners."""
        with self._lock:
            if self.error is not None:
                return
            note = self.note()
            if note is not None:
                error.add_note(note)
            listeners = list(self._listeners)
            self.error, self._traceback = error, error.__traceback__
        for listener in listeners:
            listener()

    def raise_error(self) -> None:
        """Raises the error, if there is one."""
        if self.error is not None:
            raise self.error.with_traceback(self._traceback)

    def listen(self, listener: Callable[[], None]) -> None:
        """Registers a listener, which the failing thread calls after `error` is set."""
        with self._lock:
            self._listeners.append(listener)


class Mover:
    """Worker threads that run tasks. Thread-safe.

    Methods that wait for tasks raise the first error of any task, the same object every
    time, and `StoreClosedError` if the mover was closed before the tasks' end.

    Args:
      perform: Executes a unit, and blocks meanwhile; for a load it returns the states
        of each subgroup that are not verified yet.
      failure: Receives a task's error; once it is set, no more work is done.

    Raises:
      StoreError: The process can have no more threads.
    """

    def __init__(
        self,
        name: object,
        queues: Queues,
        perform: Callable[[Unit], Sequence[Loads]],
        failure: Failure,
    ) -> None:
        self._name, self._queues = name, queues
        self._perform, self._failure = perform, failure
        lock = threading.RLock()
        self._to_do = threading.Condition(lock)  # for workers
        self._done = threading.Condition(lock)  # for callers
        self._is_closing = False
        self._workers: list[threading.Thread] = []
        failure.listen(self._stop)
        self._start_workers()

    def _start_workers(self) -> None:
        limits = self._queues.limits
        num_wanted = limits.moving + limits.computing + limits.remote
        try:
            while len(self._workers) < num_wanted:
                name = f"jaxinf-{len(self._workers)}"
                worker = threading.Thread(target=self._work, name=name, daemon=True)
                worker.start()
                self._workers.append(worker)
        except RuntimeError as error:
            self.close()
            raise StoreError(
                f"{self._name}: expected to start {num_wanted} worker threads, found "
                f"no room for another after {len(self._workers)} ({error}); raise the "
                "limit (ulimit -u, the cgroup's pids.max)"
            ) from error

    # --- tasks -----------------------------------------------------------------------

    def run(self, tasks: Sequence[Task]) -> None:
        """Submits tasks and blocks until all have computed; they are written later.

        The tasks may be of several leaves. After the return, or an exception, no
        `compute` of these tasks runs any more, and none refers to the caller's arrays.
        """
        self._check_done(not self._is_closing)
        group = TaskGroup(num_waiting=len(tasks))
        try:
            with self._done:
                self._queues.submit(tasks, group)
            self._compute_for_submitter(group)
            if group.num_waiting:
                with self._done:
                    self._done.wait_for(
                        lambda: (
                            not group.num_waiting
                            or (self._is_over() and not group.num_running)
                        )
                    )
        except BaseException as error:  # an interrupt of the main thread
            self._failure.fail(error)
            self._await_running(group)
            raise
        finally:
            for task in tasks:  # a subgroup that stays in memory has its last task
                task.compute = idle
        self._check_done(not group.num_waiting)

    def set_remote_limit(self, num_tasks: int) -> None:
        """Sets how many remote tasks may compute at once; starts a thread for each.

        No task may be under way. StoreError if there can be no more threads.
        """
        with self._done:
            self._queues.limits.remote = num_tasks
        self._start_workers()

    def drain(self) -> None:
        """Blocks until every submitted task is written (not: durably)."""
        queues = self._queues
        with self._done:
            queues.num_draining += 1
            self._to_do.notify()
            try:
                self._done.wait_for(
                    lambda: not queues.num_unfinished or self._is_over()
                )
            finally:
                queues.num_draining -= 1
            self._check_done(not queues.num_unfinished)

    # --- between steps ---------------------------------------------------------------

    def cache_only(self, keys: frozenset[Hashable]) -> None:
        """Sets the subgroups that stay in memory; others leave once written."""
        with self._done:
            self._queues.cache_only(keys)

    def take_hit_bytes(self) -> int:
        """Returns the bytes that updates have found in memory since the last call."""
        with self._done:
            hit_bytes, self._queues.hit_bytes = self._queues.hit_bytes, 0
        return hit_bytes

    def defer_writes(self, defers_writes: bool) -> None:
        """Sets whether only the next `flush` writes subgroups that stay in memory."""
        with self._done:
            self._queues.defers_writes = defers_writes

    def write_through(self, states: frozenset[int]) -> None:
        """Sets states, by number, whose writes are never deferred."""
        with self._done:
            self._queues.written_through = states

    def flush(self) -> bool:
        """Writes deferred states; blocks, and returns whether there were any."""
        with self._done:
            is_unwritten = self._queues.flush()
        if is_unwritten:
            self.drain()
        return is_unwritten

    def drop_prefetched(
        self, given_up: Collection[Hashable] = ()
    ) -> Collection[Hashable]:
        """As `Queues.drop_prefetched`, between steps; returns the keys that stay."""
        queues = self._queues
        with self._done:
            queues.cancel_prefetches()
            self._done.wait_for(lambda: not queues.num_prefetching)
            queues.drop_prefetched(given_up)
            return {key for memory in queues.memories for key in memory.cached}

    def prefetch(self, tasks: Sequence[Task]) -> None:
        """Loads the states of these tasks, in this order, as far as memory allows.

        Their `compute` is not called; later tasks on the same subgroups use what is
        loaded. The step of these tasks must not have begun.
        """
        with self._done:
            self._queues.prefetch(tasks)
            self._to_do.notify()

    def hold_prefetches(self, holds_prefetches: bool) -> None:
        """Sets whether prefetches must not begin, since a caller uses the drives."""
        with self._to_do:
            self._queues.holds_prefetches = holds_prefetches
            self._to_do.notify()

    def close(self) -> None:
        """Stops the workers, each after its present unit; idempotent."""
        with self._done:
            self._is_closing = True
            self._stop()
        for worker in self._workers:
            worker.join()
        with self._done:
            self._done.wait_for(lambda: not self._queues.computing_groups)
            self._queues.release()

    # --- waiting -------------------------------------------------------------------

    def _await_running(self, group: TaskGroup) -> None:
        """Waits until no worker computes for a group, despite interrupts."""
        while True:
            with contextlib.suppress(KeyboardInterrupt), self._done:
                self._queues.computing_groups.discard(group)
                self._done.notify_all()  # `close` may wait for the end
                self._done.wait_for(lambda: not group.num_running)
                return

    def _is_over(self) -> bool:
        return self._failure.error is not None or self._is_closing

    def _check_done(self, is_done: bool) -> None:
        self._failure.raise_error()
        if not is_done:
            raise StoreClosedError(
                f"{self._name}: the store is closed; open it again with "
                "jaxinf.open_store to go on at its last committed step"
            )

    def _stop(self) -> None:
        with self._done:
            self._queues.stop()
            self._to_do.notify_all()
            self._done.notify_all()

    # --- work ----------------------------------------------------------------------

    def _compute_for_submitter(self, group: TaskGroup) -> None:
        while True:
            with self._done:
                unit = next_for_submitter(self._queues, group)
                self._to_do.notify()
            if unit is None:
                return
            try:
                self._run_unit(unit)
            except Exception as error:
                self._failure.fail(error)

    def _work(self) -> None:
        while True:
            try:
                unit = self._await_work()
                if unit is None:
                    return
                self._run_unit(unit)
            except BaseException as error:
                self._failure.fail(error)

    def _await_work(self) -> Unit | None:
        """Blocks until there is work, and begins it; returns None once closed."""
        with self._to_do:
            while not self._is_closing:
                unit = next_unit(self._queues)
                if unit is not None:
                    self._to_do.notify()  # there may be more work
                    return unit
                self._to_do.wait()
        return None

    def _run_unit(self, unit: Unit) -> None:
        try:
            self._failure.raise_error()
            unchecked = self._perform(unit)
        except BaseException as error:
            self._failure.fail(error)
            with self._done:
                self._queues.fail(unit)
                self._done.notify_all()
            raise
        with self._done:
            self._queues.end(unit, unchecked)
            if self._is_awaited(unit):
                self._done.notify_all()

    def _is_awaited(self, unit: Unit) -> bool:
        queues = self._queues
        match unit:
            case Load():
                return unit.is_prefetch and not queues.num_prefetching
            case Compute(resident):
                group = resident.task.group
                is_last = not group.num_running and not unit.is_for_submitter
                return is_last or self._is_closing or not queues.num_unfinished
            case Write():
                return not queues.num_unfinished
