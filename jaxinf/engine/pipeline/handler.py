"""The transfer handler: worker threads, and callers that wait for them.

A worker executes one unit of work at a time, always the next one. There are limits for
workers that move bytes and for those that compute, so that neither drives nor
processors have to wait.

Invariant: the queues change under the lock, and work is done outside it. The first
error stops everything: no later unit starts, and all waiting callers get that very
exception.
"""

import contextlib
import threading
from collections.abc import Callable, Collection, Iterable, Sequence

from jaxinf.csd import Csd, CsdBuffer
from jaxinf.engine.chunks import ChunkTable
from jaxinf.engine.failure import Failure, closed_error
from jaxinf.engine.pipeline import drive_monitor
from jaxinf.engine.pipeline.executor import Executor
from jaxinf.engine.pipeline.queues import Queues
from jaxinf.engine.pipeline.scheduling import has_next, next_own, next_unit
from jaxinf.engine.pipeline.work import (
    Allocate,
    Compute,
    CsdTraits,
    Evict,
    Limits,
    Load,
    Resident,
    Task,
    TaskGroup,
    Work,
    Write,
)
from jaxinf.errors import StoreError
from jaxinf.layout import Subgroup
from jaxinf.store import StoreDirectory


class TransferHandler:
    """Worker threads that run tasks. Thread-safe.

    Args:
      directory: the store's files.
      chunks: the slots to read and write, and the checksums.
      csds: the store's CSDs, by number.
      num_workers: number of requests that move bytes at once.
      num_kernels: number of tasks that compute at once; CSDs may allow fewer.
      failure: receives a task's error; once it is set, no more work is done.
    """

    def __init__(
        self,
        directory: StoreDirectory,
        chunks: ChunkTable,
        csds: Sequence[Csd],
        *,
        num_workers: int,
        num_kernels: int,
        failure: Failure,
    ) -> None:
        self._path = directory.path
        self._chunks = chunks
        self._csds = csds
        self._failure = failure
        self._monitor = drive_monitor.DriveMonitor(
            directory.manifest.csds or [str(directory.path)]
        )
        self._executor = Executor(directory, chunks, csds, self._monitor)
        self._queues = Queues(_traits(csds), Limits(num_workers, num_kernels))
        lock = threading.RLock()
        self._to_do = threading.Condition(lock)  # for workers
        self._done = threading.Condition(lock)  # for callers
        self._is_closing = False
        failure.listen(self._stop)
        self._workers: list[threading.Thread] = []
        self._start_workers(num_workers + num_kernels)

    def _start_workers(self, num_threads: int) -> None:
        try:
            for _ in range(num_threads):
                name = f"jaxinf-{len(self._workers)}"
                worker = threading.Thread(target=self._work, name=name, daemon=True)
                worker.start()
                self._workers.append(worker)
        except RuntimeError as error:
            self.close()
            raise StoreError(
                f"{self._path}: expected to start {num_threads} worker threads, "
                f"found no room for another after {len(self._workers)} ({error}); "
                "raise the limit (ulimit -u, the cgroup's pids.max)"
            ) from error

    # --- for the engine ------------------------------------------------------------

    def run(self, tasks: Sequence[Task]) -> None:
        """Submits tasks and blocks until all have computed; they are written later.

        The tasks may be of several leaves. After the return, or an exception, no
        `compute` of these tasks runs any more, so the caller may free their arrays.

        Raises:
          BaseException: the first error of any task, the same object every time.
          StoreClosedError: the handler was closed before they had.
        """
        self._check_done(not self._is_closing)
        group = TaskGroup(num_waiting=len(tasks))
        try:
            with self._done:
                self._queues.submit(tasks, group)
            self._compute_own(group)
            if group.num_waiting:
                with self._done:
                    self._wait_for(
                        lambda: (
                            not group.num_waiting
                            or (self._is_over() and not group.num_running)
                        )
                    )
        except BaseException as error:  # an interrupt of the main thread
            self._failure.set(error)
            self._await_running(group)
            raise
        self._check_done(not group.num_waiting)

    def compute_elsewhere(self, num_tasks: int) -> None:
        """Sets how many tasks may wait for another processor at once; a thread each.

        No task may be under way.

        Raises:
          StoreError: the process can have no more threads.
        """
        with self._done:
            limits = self._queues.limits._replace(elsewhere=num_tasks)
            self._queues.limits = limits
        self._start_workers(sum(limits) - len(self._workers))

    def keep(self, subgroups: frozenset[Subgroup]) -> None:
        """Sets the subgroups that stay in memory when their tasks are written.

        Others leave it, except for those that have still to be written.
        """
        with self._done:
            _release(self._queues.keep(subgroups))

    def take_found_bytes(self) -> int:
        """Length of the subgroups that updates have found in memory since the last."""
        with self._done:
            found, self._queues.found_bytes = self._queues.found_bytes, 0
        return found

    def defer_writes(self, is_deferring: bool) -> None:
        """Sets whether subgroups that stay are written at the next `flush` alone."""
        with self._done:
            self._queues.is_deferring = is_deferring

    def write_at_once(self, states: frozenset[int]) -> None:
        """Sets states that are written in any case, by number."""
        with self._done:
            self._queues.at_once = states

    def flush(self) -> bool:
        """Writes what was deferred, and blocks until it is; whether it was anything.

        Raises:
          BaseException: as `run`.
        """
        with self._done:
            is_unwritten = self._queues.flush()
        if is_unwritten:
            self.drain()
        return is_unwritten

    def end_step(self, given_up: Collection[Subgroup] = ()) -> Collection[Subgroup]:
        """Counts what tasks have computed as newest; returns what stays in memory.

        Unused prefetches are dropped. No task may be under way.

        Args:
          given_up: subgroups whose states in memory are of a step that was given up.
        """
        queues = self._queues
        with self._done:
            queues.cancel_prefetches()
            self._done.wait_for(lambda: not queues.num_prefetching)
            _release(queues.end_step(given_up))
            return {subgroup for memory in queues.memories for subgroup in memory.kept}

    def prefetch(self, tasks: Sequence[Task]) -> None:
        """Loads the states of these tasks, in this order, as far as memory allows.

        Their `compute` is not called. A later task on the same subgroup uses the loaded
        states.

        Args:
          tasks: of a step that has not begun.
        """
        with self._done:
            self._queues.prefetch(tasks)
            self._to_do.notify()

    def hold_prefetches(self, is_holding: bool) -> None:
        """Lets no prefetch begin while `is_holding`; others use the drive meanwhile."""
        with self._to_do:
            self._queues.is_holding = is_holding
            self._wake_worker()

    def drain(self) -> None:
        """Blocks until every submitted task is written (not: durably).

        Raises:
          BaseException: as `run`.
        """
        queues = self._queues
        with self._done:
            queues.num_draining += 1
            self._to_do.notify()
            try:
                self._wait_for(lambda: not queues.num_unfinished or self._is_over())
            finally:
                queues.num_draining -= 1
            self._check_done(not queues.num_unfinished)
        self._monitor.end_round()

    def close(self) -> None:
        """Stops the workers, each after its present unit; idempotent."""
        with self._done:
            self._is_closing = True
            self._stop()
        for worker in self._workers:
            worker.join()
        with self._done:
            self._done.wait_for(lambda: not self._queues.submitting)
            residents = self._queues.residents
            while residents:
                residents.pop().buffer.release()

    # --- waiting -------------------------------------------------------------------

    def _wait_for(self, predicate: Callable[[], bool]) -> None:
        """Waits for a condition; from time to time, reports an overdue CSD."""
        while not self._done.wait_for(predicate, drive_monitor.OVERDUE_S):
            self._monitor.report_overdue()

    def _await_running(self, group: TaskGroup) -> None:
        """Waits until no worker computes for a group, despite interrupts."""
        while True:
            with contextlib.suppress(KeyboardInterrupt), self._done:
                self._queues.submitting.discard(group)
                self._done.notify_all()  # `close` may wait for the end
                self._done.wait_for(lambda: not group.num_running)
                return

    def _is_over(self) -> bool:
        return self._failure.error is not None or self._is_closing

    def _check_done(self, is_done: bool) -> None:
        self._failure.check()
        if not is_done:
            raise closed_error(self._path)

    def _stop(self) -> None:
        """Prevents the start of any more units, after a failure or at the end."""
        with self._done:
            self._queues.stop()
            self._to_do.notify_all()
            self._done.notify_all()

    # --- work ----------------------------------------------------------------------

    def _compute_own(self, group: TaskGroup) -> None:
        """Computes loaded tasks of host CSDs on the caller's thread."""
        while True:
            with self._done:
                unit = next_own(self._queues, group)
                if unit is not None:
                    self._queues.begin(unit)
                self._wake_worker()
            if unit is None:
                return
            try:
                self._perform(unit)
            except Exception as error:
                self._failure.set(error)

    def _work(self) -> None:
        """The main function of a worker thread."""
        while True:
            try:
                unit = self._await_work()
                if unit is None:
                    return
                self._perform(unit)
            except BaseException as error:
                self._failure.set(error)

    def _await_work(self) -> Work | None:
        """Blocks until there is work, and begins it; returns None when closed."""
        with self._to_do:
            while not self._is_closing:
                unit = _next_work(self._queues, self._csds)
                if unit is not None:
                    self._queues.begin(unit)
                    self._wake_worker()  # there may be more work
                    return unit
                self._to_do.wait()
        return None

    def _wake_worker(self) -> None:
        if has_next(self._queues):
            self._to_do.notify()

    def _perform(self, unit: Work) -> None:
        try:
            self._failure.check()
            unchecked = self._executor.perform(unit)
        except BaseException as error:
            self._failure.set(error)
            with self._done:
                self._queues.fail(unit)
                self._done.notify_all()
            raise
        with self._done:
            _release(self._queues.end(unit, unchecked))
            if self._is_awaited(unit):
                self._done.notify_all()

    def _is_awaited(self, unit: Work) -> bool:
        """Whether a thread may be waiting for the end of a unit."""
        queues = self._queues
        match unit:
            case Load():
                return unit.is_prefetch and not queues.num_prefetching
            case Compute(resident):
                is_last = not resident.task.group.num_running and not unit.is_own
                return is_last or self._is_closing or not queues.num_unfinished
            case Write():
                return not queues.num_unfinished


def _traits(csds: Sequence[Csd]) -> list[CsdTraits]:
    numbers: dict[int, int] = {}
    return [
        CsdTraits(numbers.setdefault(id(csd.memory), len(numbers)), csd.is_host)
        for csd in csds
    ]


# --- memory ------------------------------------------------------------------------


def _next_work(queues: Queues, csds: Sequence[Csd]) -> Work | None:
    """Returns the next unit of work, with memory for it.

    Raises:
      CsdError: a CSD lends no memory.
    """
    while True:
        unit = next_unit(queues)
        match unit:
            case Allocate(tasks):
                load = queues.allocate(unit, _acquire(tasks, csds))
                if load is not None:
                    return load
            case Evict(resident):
                queues.evict(resident)
                _release((resident,))
            case _:
                return unit


def _release(residents: Iterable[Resident]) -> None:
    """Releases the memory of subgroups that are in no queue."""
    for resident in residents:
        resident.buffer.release()


def _acquire(tasks: Sequence[Task], csds: Sequence[Csd]) -> list[CsdBuffer]:
    """Acquires buffers for the first of the tasks, as many as fit."""
    buffers: list[CsdBuffer] = []
    try:
        for task in tasks:
            buffer = csds[task.csd].acquire(task.layout.num_bytes)
            if buffer is None:
                break
            buffers.append(buffer)
    except BaseException:
        for buffer in buffers:
            buffer.release()
        raise
    return buffers
