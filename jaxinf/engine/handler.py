"""The transfer handler: subgroups stream through a fixed memory, reads beside writes.

            prefetch ──► loaded ──┐
                                  ├─► compute ─► store ─► memory back
    submit ──► (load if needed) ──┘       └► the submitter goes on

Invariant: state passes only through buffers of the CSDs' budget, and its checksums are
taken as it passes. The first error stops everything: no later task starts, and
everybody who waits gets that very exception.
"""

import contextlib
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from jaxinf.csd import Csd, CsdBuffer
from jaxinf.engine import pace
from jaxinf.engine.chunks import ChunkTable
from jaxinf.engine.failure import Failure, closed_error
from jaxinf.engine.tasks import SubgroupLayout, Task, TaskGroup
from jaxinf.engine.timeline import Timeline
from jaxinf.errors import StoreError
from jaxinf.io import crc32c
from jaxinf.layout import Subgroup
from jaxinf.store import Slot, StoreDirectory

__all__ = ["TransferHandler"]


@dataclass(eq=False)
class _Prefetched:
    """A subgroup whose load has begun before its task came.

    Attributes:
      task: whose loads it does.
      buffer: where.
      is_loading, is_loaded: how far it is.
      unchecked: the states that it has loaded and whose checksum is not known yet.
    """

    task: Task
    buffer: CsdBuffer
    is_loading: bool = True
    is_loaded: bool = False
    unchecked: tuple[tuple[int, Slot], ...] = ()


@dataclass(eq=False)
class _Work:
    """What a worker does next: load ahead, or run a task.

    Attributes:
      task: what to run, or to load for.
      buffer: where.
      ahead: the prefetch that this is; None to run the task.
      loaded: the states that a prefetch has put into the buffer.
      unchecked: those of them whose checksum is not known yet.
    """

    task: Task
    buffer: CsdBuffer
    ahead: _Prefetched | None = None
    loaded: tuple[tuple[int, Slot], ...] = ()
    unchecked: tuple[tuple[int, Slot], ...] = ()


class TransferHandler:
    """Worker threads that run tasks. Thread-safe.

    Args:
      directory: where the chunk files are.
      chunks: which slots to read and write, and the checksums.
      csds: the store's CSDs, by number.
      num_workers: threads; each carries a task from load to store.
      failure: what a task's error is put into; once it is set, nothing more is done.
      timeline: where the workers note what they do.
    """

    def __init__(
        self,
        directory: StoreDirectory,
        chunks: ChunkTable,
        csds: Sequence[Csd],
        *,
        num_workers: int,
        failure: Failure,
        timeline: Timeline | None = None,
    ) -> None:
        self._directory = directory
        self._chunks = chunks
        self._csds = csds
        self._num_memories = len({id(csd.memory) for csd in csds})
        self._failure = failure
        self._timeline = timeline or Timeline()
        self._pace = pace.Pace(directory.manifest.csds or [str(directory.path)])
        self._changed = threading.Condition()
        self._queue: deque[Task] = deque()
        self._ahead_due: dict[Subgroup, Task] = {}
        self._ahead: dict[Subgroup, _Prefetched] = {}
        self._num_unfinished = 0
        self._num_running: Counter[int] = Counter()  # by memory
        self._is_closing = False
        failure.listen(self._stop)
        self._workers: list[threading.Thread] = []
        try:
            for number in range(num_workers):
                self._start(f"jaxinf-{number}")
        except RuntimeError as error:
            self.close()
            raise StoreError(
                f"{directory.path}: expected to start {num_workers} worker threads, "
                f"found no room for another after {len(self._workers)} ({error}); "
                "raise the limit (ulimit -u, the cgroup's pids.max), or give fewer "
                "num_workers"
            ) from error

    def _start(self, name: str) -> None:
        worker = threading.Thread(target=self._work, name=name, daemon=True)
        worker.start()
        self._workers.append(worker)

    # --- for the engine ------------------------------------------------------------

    def run(self, tasks: Sequence[Task]) -> None:
        """Submits tasks and blocks until all have computed; stores go on behind.

        On return, by an exception too, no task's `compute` is running nor will be: what
        it works on may go.

        Raises:
          BaseException: the first error of any task, the same object every time.
          StoreClosedError: the handler was closed before they had.
        """
        group = TaskGroup(num_waiting=len(tasks))
        with self._changed:
            self._check_done(not self._is_closing)
            for task in tasks:
                task.group = group
                self._queue.append(task)
            self._num_unfinished += len(tasks)
            self._changed.notify_all()
            try:
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

    def _await_running(self, group: TaskGroup) -> None:
        """Waits until no task of a group computes, however often it is interrupted."""
        while group.num_running:
            with contextlib.suppress(KeyboardInterrupt):
                self._changed.wait_for(lambda: not group.num_running)

    def prefetch(self, tasks: Sequence[Task]) -> None:
        """Loads what these tasks will load, in this order, as far as memory reaches.

        Their `compute` is not called. A later task on the same subgroup finds there
        what it would load. Earlier prefetches that nobody used are dropped.
        """
        with self._changed:
            self._drop_ahead()
            self._ahead_due.update({t.layout.subgroup: t for t in tasks if t.loads})
            self._changed.notify_all()

    def drain(self) -> None:
        """Blocks until every submitted task has stored (not: durably).

        Raises:
          BaseException: as `run`.
        """
        with self._changed:
            self._wait_for(lambda: not self._num_unfinished or self._is_over())
            self._check_done(not self._num_unfinished)
        self._pace.end_round()

    def close(self) -> None:
        """Stops the workers, each after the task it has in hand; idempotent."""
        with self._changed:
            self._is_closing = True
            self._queue.clear()
            self._changed.notify_all()
        for worker in self._workers:
            worker.join()
        with self._changed:
            self._drop_ahead()

    def _wait_for(self, predicate: Callable[[], bool]) -> None:
        """Waits until it holds; says from time to time which CSD it waits for."""
        while not self._changed.wait_for(predicate, pace.OVERDUE_S):
            self._pace.report_overdue()

    def _is_over(self) -> bool:
        return self._failure.error is not None or self._is_closing

    def _check_done(self, is_done: bool) -> None:
        self._failure.check()
        if not is_done:
            raise closed_error(self._directory.path)

    # --- the workers ---------------------------------------------------------------

    def _work(self) -> None:
        while True:
            try:
                with self._changed:
                    work = self._next_work()
                    if work is None:
                        return
                    memory = self._memory(work.task)
                    self._num_running[memory] += 1
                    work.task.group.num_running += 1
            except BaseException as error:  # of a CSD's `acquire`
                self._failure.set(error)
                continue
            try:
                self._perform(work)
            except BaseException as error:
                self._failure.set(error)
            finally:
                with self._changed:
                    self._num_running[memory] -= 1
                    self._changed.notify_all()

    def _next_work(self) -> _Work | None:
        while not self._is_closing:
            if self._failure.error is None:
                work = self._pick_task() or self._pick_ahead()
                if work is not None:
                    return work
            self._changed.wait()
        return None

    def _pick_task(self) -> _Work | None:
        """The first task that can go on: its state is loaded, or there is memory."""
        starved: dict[int, int] = {}
        for position, task in enumerate(self._queue):
            self._ahead_due.pop(task.layout.subgroup, None)
            ahead = self._ahead.get(task.layout.subgroup)
            if ahead is not None:
                if not ahead.is_loaded:
                    continue  # a worker is loading it right now
                del self._ahead[task.layout.subgroup]
                del self._queue[position]
                return _Work(
                    task,
                    ahead.buffer,
                    loaded=ahead.task.loads,
                    unchecked=ahead.unchecked,
                )
            memory = self._memory(task)
            if memory not in starved:  # who has waited longest for memory comes first
                buffer = self._acquire(task)
                if buffer is not None:
                    del self._queue[position]
                    return _Work(task, buffer)
                starved[memory] = position
        for memory, position in starved.items():
            if not self._num_running[memory]:
                work = self._make_room(memory, position)
                if work is not None:
                    return work
        return None

    def _make_room(self, memory: int, position: int) -> _Work | None:
        """Takes memory from prefetches, as a last way: no queued task waits for one."""
        task = self._queue[position]
        held = [s for s, a in self._ahead.items() if self._memory(a.task) == memory]
        while held:
            self._ahead.pop(held.pop()).buffer.release()
            buffer = self._acquire(task)
            if buffer is not None:
                del self._queue[position]
                return _Work(task, buffer)
        return None

    def _memory(self, task: Task) -> int:
        """What stands for the memory that a task's buffer is taken from."""
        return id(self._csds[task.layout.subgroup.csd].memory)

    def _acquire(self, task: Task) -> CsdBuffer | None:
        return self._csds[task.layout.subgroup.csd].acquire(task.layout.num_bytes)

    def _pick_ahead(self) -> _Work | None:
        if self._queue or not self._ahead_due:
            return None
        full: set[int] = set()
        for task in self._ahead_due.values():
            memory = self._memory(task)
            if memory in full:
                continue
            buffer = self._acquire(task)
            if buffer is not None:
                del self._ahead_due[task.layout.subgroup]
                ahead = _Prefetched(task, buffer)
                self._ahead[task.layout.subgroup] = ahead
                return _Work(task, buffer, ahead=ahead)
            full.add(memory)
            if len(full) == self._num_memories:
                break
        return None

    def _drop_ahead(self) -> None:
        self._ahead_due.clear()
        self._changed.wait_for(
            lambda: not any(a.is_loading for a in self._ahead.values())
        )
        for ahead in self._ahead.values():
            ahead.buffer.release()
        self._ahead.clear()

    def _perform(self, work: _Work) -> None:
        csd = self._csds[work.task.layout.subgroup.csd]
        if work.ahead is not None:
            try:
                work.ahead.unchecked = self._load(csd, work)
                work.ahead.is_loaded = True
            finally:
                work.ahead.is_loading = False
            return
        try:
            self._compute(csd, work)
            self._failure.check()
            self._store(csd, work.task, work.buffer)
        finally:
            work.buffer.release()
        with self._changed:
            self._num_unfinished -= 1

    def _compute(self, csd: Csd, work: _Work) -> None:
        group = work.task.group
        num_done = 0
        try:
            unchecked = work.unchecked + self._load(csd, work)
            if not work.task.runs_kernel:
                self._check_on_host(csd, work, unchecked)
                unchecked = ()
            self._failure.check()
            with self._busy("update", work.task.layout):
                checksums = work.task.compute(csd, work.buffer) or {}
            self._check_told(work.task, unchecked, checksums)
            num_done = 1
        finally:
            with self._changed:
                group.num_waiting -= num_done
                group.num_running -= 1
                self._changed.notify_all()

    def _load(self, csd: Csd, work: _Work) -> tuple[tuple[int, Slot], ...]:
        """Reads what is not there yet; those of it that only the update can check."""
        layout = work.task.layout
        unchecked: list[tuple[int, Slot]] = []
        for state, slot in work.task.loads:
            if (state, slot) in work.loaded:
                continue
            file = self._directory.chunk_file(slot, *layout.place(state))
            with self._busy("read", layout, layout.extents[state].num_bytes):
                csd.read(work.buffer, layout.extents[state], file)
            if self._chunks.is_checked(layout, state):
                with self._timeline.span("checksum"):
                    checksum = csd.checksum(work.buffer, layout.extents[state])
                if checksum is None:
                    unchecked.append((state, slot))
                else:
                    self._chunks.loaded(layout, state, slot, checksum)
        return tuple(unchecked)

    @contextlib.contextmanager
    def _busy(
        self, kind: str, layout: SubgroupLayout, num_bytes: int = 0
    ) -> Iterator[None]:
        """Time of a CSD, which may move bytes of its drive in it."""
        csd = layout.subgroup.csd
        with self._pace.request(csd, kind, num_bytes), self._timeline.span(kind):
            yield

    def _check_on_host(
        self, csd: Csd, work: _Work, states: Sequence[tuple[int, Slot]]
    ) -> None:
        """Takes checksums of what the host is about to read itself."""
        layout = work.task.layout
        for state, slot in states:
            with self._timeline.span("checksum"):
                checksum = crc32c(csd.view(work.buffer, layout.extents[state]))
            self._chunks.loaded(layout, state, slot, checksum)

    def _check_told(
        self,
        task: Task,
        states: Sequence[tuple[int, Slot]],
        checksums: Mapping[int, int],
    ) -> None:
        """Compares what a kernel says that it read, before anything comes of it."""
        for state, slot in states:
            if state in checksums:
                self._chunks.loaded(task.layout, state, slot, checksums[state])
            else:  # read ahead, and not used after all
                assert (state, slot) not in task.loads

    def _store(self, csd: Csd, task: Task, buffer: CsdBuffer) -> None:
        layout = task.layout
        for state in task.stores:
            with self._timeline.span("checksum"):
                checksum = csd.checksum(buffer, layout.extents[state])
                if checksum is None:  # no kernel has passed over it
                    checksum = crc32c(csd.view(buffer, layout.extents[state]))
            self._chunks.stored(layout, state, checksum)
            file = self._chunks.prepare_write(layout, state)
            with self._busy("write", layout, layout.extents[state].num_bytes):
                csd.write(buffer, layout.extents[state], file)

    def _stop(self) -> None:
        """After a failure: what has not begun never will."""
        with self._changed:
            self._queue.clear()
            self._ahead_due.clear()
            self._changed.notify_all()
