"""The transfer handler: subgroups stream through a fixed memory, reads beside writes.

    prefetch ──► load ──► ahead ─┐
                                 ├─► compute ──► write ──► memory back
    submit ────► load ───────────┘      └► the submitter goes on

A worker does one unit of this at a time, whichever can be done. Some move bytes and
others compute, each up to a number: neither keeps the drive or the processors waiting.
What is short is moved together, and the submitter computes what it finds loaded: to
hand a small subgroup from thread to thread takes longer than the rest.

Invariant: state passes only through buffers of the CSDs' budget, and its checksums are
taken as it passes. The first error stops everything: no later unit starts, and
everybody who waits gets that very exception.
"""

import contextlib
import threading
from collections import Counter, deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial

from jaxinf.csd import Csd, CsdBuffer
from jaxinf.engine import pace
from jaxinf.engine.chunks import ChunkTable
from jaxinf.engine.failure import Failure, closed_error
from jaxinf.engine.held import Batch, Held, WriteQueue, Writes
from jaxinf.engine.tasks import Task, TaskGroup
from jaxinf.engine.timeline import Timeline
from jaxinf.engine.units import Load, Units, Write
from jaxinf.errors import StoreError
from jaxinf.layout import Subgroup
from jaxinf.store import StoreDirectory

__all__ = ["TransferHandler"]

_LOOK_AHEAD = 64
"""Prefetches of other CSDs after which no more is looked for to be moved together."""


@dataclass
class _Limit:
    """How many units of a kind may be under way.

    Attributes:
      most: that many.
      num: are.
    """

    most: int
    num: int = 0

    @property
    def is_reached(self) -> bool:
        return self.num >= self.most


@dataclass(frozen=True)
class _Unit:
    """What a worker does next.

    Attributes:
      limit: that it counts for.
      perform: does it.
    """

    limit: _Limit
    perform: Callable[[], None]


class TransferHandler:
    """Worker threads that run tasks. Thread-safe.

    Args:
      directory: where the chunk files are.
      chunks: which slots to read and write, and the checksums.
      csds: the store's CSDs, by number.
      num_workers: requests that move bytes at once.
      num_kernels: tasks that compute at once; CSDs may let fewer.
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
        num_kernels: int,
        failure: Failure,
        timeline: Timeline | None = None,
    ) -> None:
        self._path = directory.path
        self._csds = csds
        self._num_memories = len({id(csd.memory) for csd in csds})
        self._failure = failure
        self._pace = pace.Pace(directory.manifest.csds or [str(directory.path)])
        self._units = Units(directory, chunks, csds, self._pace, timeline or Timeline())
        guard = threading.RLock()
        self._to_do = threading.Condition(guard)  # workers wait for it
        self._done = threading.Condition(guard)  # everybody else
        self._moving, self._computing = _Limit(num_workers), _Limit(num_kernels)
        self._queue: deque[Task] = deque()  # submitted; nobody has begun with them
        self._ahead_due: dict[Subgroup, Task] = {}
        self._ahead: dict[Subgroup, Held] = {}
        self._num_loading_ahead = 0
        self._loaded: deque[Held] = deque()
        self._computed = WriteQueue([id(csd.memory) for csd in csds])
        self._starved: Collection[int] = ()  # memories without room at the last look
        self._submitting: set[TaskGroup] = set()  # whose submitters compute
        self._num_draining = 0
        self._held: set[Held] = set()
        self._num_busy: Counter[int] = Counter()  # of what is held, by memory
        self._num_unfinished = 0
        self._is_closing = False
        failure.listen(self._stop)
        self._workers: list[threading.Thread] = []
        num_threads = num_workers + num_kernels
        try:
            for number in range(num_threads):
                self._start(f"jaxinf-{number}")
        except RuntimeError as error:
            self.close()
            raise StoreError(
                f"{directory.path}: expected to start {num_threads} worker threads, "
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
        self._check_done(not self._is_closing)
        group = TaskGroup(num_waiting=len(tasks))
        try:
            with self._done:
                for task in tasks:
                    task.group = group
                    self._queue.append(task)
                    self._ahead_due.pop(task.layout.subgroup, None)
                self._num_unfinished += len(tasks)
            self._compute_loaded(group)
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

    def _compute_loaded(self, group: TaskGroup) -> None:
        """The submitter computes what it finds loaded on the host; workers the rest."""
        while True:
            with self._done:
                held = None
                if not self._is_over() and self._may_compute:
                    held = self._take_ahead(group)
                if group.num_waiting > (held is not None):
                    self._to_do.notify()
                if held is None:
                    return
                self._submitting.add(group)
            try:
                self._compute(held)
            except Exception as error:
                self._failure.set(error)
            with self._done:
                self._submitting.discard(group)
                if self._is_closing:
                    self._done.notify_all()
                is_room = not held.task.stores and bool(self._ahead_due)
                is_due = self._due_csd() is not None
                if is_room or is_due or self._loaded or self._queue:
                    self._to_do.notify()

    def _await_running(self, group: TaskGroup) -> None:
        """Waits until no worker computes for a group, however often interrupted."""
        while True:
            with contextlib.suppress(KeyboardInterrupt), self._done:
                self._submitting.discard(group)
                self._done.notify_all()  # `close` may wait for that
                self._done.wait_for(lambda: not group.num_running)
                return

    def prefetch(self, tasks: Sequence[Task]) -> None:
        """Loads what these tasks will load, in this order, as far as memory reaches.

        Their `compute` is not called. A later task on the same subgroup finds there
        what it would load. Earlier prefetches that nobody used are dropped.
        """
        with self._done:
            self._drop_ahead()
            self._ahead_due.update({t.layout.subgroup: t for t in tasks if t.loads})
            self._to_do.notify()

    def drain(self) -> None:
        """Blocks until every submitted task has stored (not: durably).

        Raises:
          BaseException: as `run`.
        """
        with self._done:
            self._num_draining += 1
            self._to_do.notify()
            try:
                self._wait_for(lambda: not self._num_unfinished or self._is_over())
            finally:
                self._num_draining -= 1
            self._check_done(not self._num_unfinished)
        self._pace.end_round()

    def close(self) -> None:
        """Stops the workers, each after the unit it has in hand; idempotent."""
        with self._done:
            self._is_closing = True
            self._queue.clear()
            self._to_do.notify_all()
            self._done.notify_all()
        for worker in self._workers:
            worker.join()
        with self._done:
            self._done.wait_for(lambda: not self._submitting)
            self._ahead_due.clear()
            self._ahead.clear()
            while self._held:
                self._held.pop().buffer.release()

    def _wait_for(self, predicate: Callable[[], bool]) -> None:
        """Waits until it holds; says from time to time which CSD it waits for."""
        while not self._done.wait_for(predicate, pace.OVERDUE_S):
            self._pace.report_overdue()

    def _is_over(self) -> bool:
        return self._failure.error is not None or self._is_closing

    def _check_done(self, is_done: bool) -> None:
        self._failure.check()
        if not is_done:
            raise closed_error(self._path)

    def _stop(self) -> None:
        """After a failure: what has not begun never will."""
        with self._done:
            self._queue.clear()
            self._ahead_due.clear()
            self._loaded.clear()
            self._computed.clear()
            self._to_do.notify_all()
            self._done.notify_all()

    # --- what to do next -----------------------------------------------------------

    def _work(self) -> None:
        while True:
            try:
                with self._to_do:
                    unit = self._next()
                    if unit is None:
                        return
                    unit.limit.num += 1
                    if self._may_compute or not self._moving.is_reached:
                        self._to_do.notify()  # there may be more
            except BaseException as error:  # of a CSD's `acquire`
                self._failure.set(error)
                continue
            try:
                unit.perform()
            except BaseException as error:
                self._failure.set(error)
            with self._to_do:
                unit.limit.num -= 1

    def _next(self) -> _Unit | None:
        """Blocks until there is something to do; None once the handler is closing."""
        while not self._is_closing:
            if self._failure.error is None:
                unit = self._pick()
                if unit is not None:
                    return unit
            self._to_do.wait()
        return None

    def _pick(self) -> _Unit | None:
        unit = None
        if self._may_compute:
            unit = self._pick_loaded()
        if unit is None and not self._moving.is_reached:
            unit = self._pick_computed() or self._pick_queued() or self._pick_computed()
        return unit

    @property
    def _may_compute(self) -> bool:
        return self._computing.num + len(self._submitting) < self._computing.most

    def _pick_loaded(self) -> _Unit | None:
        """Something to compute with: loaded for a task, or ahead of it."""
        held = self._loaded.popleft() if self._loaded else self._take_ahead()
        if held is None:
            return None
        held.task.group.num_running += 1
        return _Unit(self._computing, partial(self._compute_counted, held))

    def _take_ahead(self, submitted: TaskGroup | None = None) -> Held | None:
        """What was loaded ahead and is all that a queued task wants.

        Args:
          submitted: only for tasks of this group, which their submitter may compute.
        """
        if not self._ahead:
            return None
        for position, task in enumerate(self._queue):
            ahead = self._ahead.get(task.layout.subgroup)
            if ahead is None:
                continue
            if submitted is not None and not (
                task.group is submitted and self._csds[task.layout.subgroup.csd].is_host
            ):
                continue
            if ahead.loaded and set(task.loads) <= set(ahead.loaded):
                return self._claim(position)
        return None

    def _claim(self, position: int) -> Held:
        """A queued task gets what was loaded ahead for it, whatever that is."""
        task = self._queue[position]
        del self._queue[position]
        held = self._ahead.pop(task.layout.subgroup)
        self._num_busy[self._memory(task)] += 1
        held.task = task
        return held

    def _due_csd(self) -> int | None:
        return self._computed.due_csd(self._starved, is_awaited=self._num_draining > 0)

    def _pick_computed(self) -> _Unit | None:
        """Something to write."""
        csd = self._due_csd()
        if csd is None:
            return None
        return _Unit(self._moving, partial(self._write, self._computed.take(csd)))

    def _pick_queued(self) -> _Unit | None:
        """Something to load: for the first task that memory is there for, or ahead."""
        starved: dict[int, int] = {}
        self._starved = starved
        for position, task in enumerate(self._queue):
            ahead = self._ahead.get(task.layout.subgroup)
            if ahead is not None:
                if not ahead.loaded or set(task.loads) <= set(ahead.loaded):
                    continue  # being loaded, or waits to compute
                return self._loading(self._claim(position))
            memory = self._memory(task)
            if memory not in starved:  # who has waited longest for memory comes first
                buffer = self._acquire(task)
                if buffer is not None:
                    return self._begin(position, buffer)
                starved[memory] = position
        for memory, position in starved.items():
            if not self._num_busy[memory]:
                return self._make_room(memory, position)
        return None if starved else self._pick_ahead()

    def _make_room(self, memory: int, position: int) -> _Unit | None:
        """Takes memory from prefetches that no queued task waits for, as a last way."""
        queued = {task.layout.subgroup for task in self._queue}
        held = [
            subgroup
            for subgroup, ahead in self._ahead.items()
            if subgroup not in queued and self._memory(ahead.task) == memory
        ]
        while held:
            given_up = self._ahead.pop(held.pop())
            self._held.remove(given_up)
            given_up.buffer.release()
            buffer = self._acquire(self._queue[position])
            if buffer is not None:
                return self._begin(position, buffer)
        return None

    def _begin(self, position: int, buffer: CsdBuffer) -> _Unit:
        task = self._queue[position]
        del self._queue[position]
        return self._loading(self._hold(task, buffer))

    def _loading(self, held: Held) -> _Unit:
        return _Unit(self._moving, partial(self._load_queued, held))

    def _pick_ahead(self) -> _Unit | None:
        """A long subgroup to come, or short ones of one CSD together."""
        full: set[int] = set()
        found: list[Held] = []
        batch, num_others = Batch(), 0
        for task in self._ahead_due.values():
            memory = self._memory(task)
            if memory in full:
                continue
            if found and task.layout.subgroup.csd != found[0].csd:
                num_others += 1
                if num_others >= _LOOK_AHEAD:
                    break
                continue
            buffer = self._acquire(task)
            if buffer is None:
                full.add(memory)
                if found or len(full) == self._num_memories:
                    break
                continue
            found.append(held := self._hold(task, buffer))
            states = [state for state, _ in task.loads]
            batch.add(held.num_bytes(states), len(states))
            if batch.is_full:
                break
        self._starved = full
        if not found:
            return None
        for held in found:
            del self._ahead_due[held.task.layout.subgroup]
            self._ahead[held.task.layout.subgroup] = held
        self._num_loading_ahead += 1
        return _Unit(self._moving, partial(self._load_ahead, found))

    def _drop_ahead(self) -> None:
        self._ahead_due.clear()
        self._done.wait_for(lambda: not self._num_loading_ahead)
        for held in self._ahead.values():
            self._held.remove(held)
            held.buffer.release()
        self._ahead.clear()

    # --- memory --------------------------------------------------------------------

    def _memory(self, task: Task) -> int:
        """What stands for the memory that a task's buffer is taken from."""
        return id(self._csds[task.layout.subgroup.csd].memory)

    def _acquire(self, task: Task) -> CsdBuffer | None:
        return self._csds[task.layout.subgroup.csd].acquire(task.layout.num_bytes)

    def _hold(self, task: Task, buffer: CsdBuffer) -> Held:
        held = Held(task, buffer)
        self._held.add(held)
        self._num_busy[self._memory(task)] += 1
        return held

    def _release(self, held: Held) -> None:
        """The task is done."""
        self._held.remove(held)
        held.buffer.release()
        self._num_busy[self._memory(held.task)] -= 1
        self._num_unfinished -= 1
        if not self._num_unfinished:
            self._done.notify_all()

    # --- the units -----------------------------------------------------------------

    def _load_ahead(self, batch: Sequence[Held]) -> None:
        try:
            self._load(batch)
        finally:
            with self._done:
                self._num_loading_ahead -= 1
                for held in batch:
                    self._num_busy[self._memory(held.task)] -= 1
                if not self._num_loading_ahead:
                    self._done.notify_all()

    def _load_queued(self, held: Held) -> None:
        self._load([held])
        with self._done:
            if self._failure.error is None:
                self._loaded.append(held)

    def _load(self, batch: Sequence[Held]) -> None:
        loads = [Load(held.task, held.buffer, held.missing) for held in batch]
        unchecked = self._units.load(loads)
        with self._done:
            for held, load, left in zip(batch, loads, unchecked, strict=True):
                held.loaded += load.states
                held.unchecked += left

    def _compute_counted(self, held: Held) -> None:
        """A worker's: whoever waits for the group knows that it is at it."""
        try:
            self._compute(held)
        finally:
            group = held.task.group
            with self._done:
                group.num_running -= 1
                if not group.num_running:
                    self._done.notify_all()

    def _compute(self, held: Held) -> None:
        task = held.task
        self._failure.check()
        self._units.compute(task, held.buffer, held.unchecked)
        with self._done:
            task.group.num_waiting -= 1
            if not task.stores:
                self._release(held)
            elif self._failure.error is None:
                self._computed.add(held)

    def _write(self, writes: Writes) -> None:
        self._units.write(
            [Write(held.task, held.buffer, states) for held, states in writes]
        )
        with self._done:
            for held in self._computed.written(writes):
                self._release(held)
