"""The transfer handler: subgroups stream through a fixed memory, reads beside writes.

    prefetch ──► load ──► ahead ─┐
                                 ├─► compute ──► write state by state ──► memory back
    submit ────► load ───────────┘      └► the submitter goes on

A worker does one unit of this at a time, whichever can be done. Some move bytes and
others compute, each up to a number: neither keeps the drive or the processors waiting.

Invariant: state passes only through buffers of the CSDs' budget, and its checksums are
taken as it passes. The first error stops everything: no later unit starts, and
everybody who waits gets that very exception.
"""

import contextlib
import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from jaxinf.csd import Csd, CsdBuffer
from jaxinf.engine import pace
from jaxinf.engine.chunks import ChunkTable
from jaxinf.engine.failure import Failure, closed_error
from jaxinf.engine.tasks import Task, TaskGroup
from jaxinf.engine.timeline import Timeline
from jaxinf.engine.units import Loads, Units
from jaxinf.errors import StoreError
from jaxinf.layout import Subgroup
from jaxinf.store import StoreDirectory

__all__ = ["TransferHandler"]

_LITTLE_BYTES = 1 << 20
"""Writes of less than this are done together: to hand one over takes as long."""


@dataclass(eq=False)
class _Held:
    """A subgroup that has memory.

    Attributes:
      task: whose loads it has or gets: a submitted one, or one to come.
      buffer: where.
      loaded: the states that are there as the drive has them.
      unchecked: those of them whose checksum is not known yet.
      to_write: the states that nobody has begun to write.
      num_writing: those that somebody is writing.
    """

    task: Task
    buffer: CsdBuffer
    loaded: Loads = ()
    unchecked: Loads = ()
    to_write: deque[int] = field(default_factory=deque)
    num_writing: int = 0

    @property
    def missing(self) -> Loads:
        """What the task loads and is not there."""
        return tuple(load for load in self.task.loads if load not in self.loaded)


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
        self._ahead: dict[Subgroup, _Held] = {}
        self._num_loading_ahead = 0
        self._loaded: deque[_Held] = deque()
        self._computed: deque[_Held] = deque()
        self._held: set[_Held] = set()
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
        group = TaskGroup(num_waiting=len(tasks))
        with self._done:
            self._check_done(not self._is_closing)
            for task in tasks:
                task.group = group
                self._queue.append(task)
                self._ahead_due.pop(task.layout.subgroup, None)
            self._num_unfinished += len(tasks)
            self._to_do.notify()
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
                self._done.wait_for(lambda: not group.num_running)

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
            self._wait_for(lambda: not self._num_unfinished or self._is_over())
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
                    if not (self._moving.is_reached and self._computing.is_reached):
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
        if not self._computing.is_reached:
            unit = self._pick_loaded()
        if unit is None and not self._moving.is_reached:
            unit = self._pick_computed() or self._pick_queued()
        return unit

    def _pick_loaded(self) -> _Unit | None:
        """Something to compute with: loaded for a task, or ahead of it."""
        held = self._loaded.popleft() if self._loaded else self._take_ahead()
        if held is None:
            return None
        held.task.group.num_running += 1
        return _Unit(self._computing, partial(self._compute, held))

    def _take_ahead(self) -> _Held | None:
        """What was loaded ahead and is all that a queued task wants."""
        if not self._ahead:
            return None
        for position, task in enumerate(self._queue):
            ahead = self._ahead.get(task.layout.subgroup)
            if ahead is not None and set(task.loads) <= set(ahead.loaded):
                return self._claim(position)
        return None

    def _claim(self, position: int) -> _Held:
        """A queued task gets what was loaded ahead for it, whatever that is."""
        task = self._queue[position]
        del self._queue[position]
        held = self._ahead.pop(task.layout.subgroup)
        self._num_busy[self._memory(task)] += 1
        held.task = task
        return held

    def _pick_computed(self) -> _Unit | None:
        """Something to write."""
        if not self._computed:
            return None
        held = self._computed[0]
        states, num_bytes = [], 0
        while held.to_write and (not states or num_bytes < _LITTLE_BYTES):
            states.append(held.to_write.popleft())
            num_bytes += held.task.layout.extents[states[-1]].num_bytes
        if not held.to_write:
            self._computed.popleft()
        held.num_writing += len(states)
        return _Unit(self._moving, partial(self._write, held, states))

    def _pick_queued(self) -> _Unit | None:
        """Something to load: for the first task that memory is there for, or ahead."""
        starved: dict[int, int] = {}
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
                if len(starved) == self._num_memories:
                    break
        for memory, position in starved.items():
            if not self._num_busy[memory]:
                return self._make_room(memory, position)
        return None if starved else self._pick_ahead()

    def _make_room(self, memory: int, position: int) -> _Unit | None:
        """Takes memory from prefetches, as a last way: no queued task waits for one."""
        held = [s for s, a in self._ahead.items() if self._memory(a.task) == memory]
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

    def _loading(self, held: _Held) -> _Unit:
        return _Unit(self._moving, partial(self._load_queued, held))

    def _pick_ahead(self) -> _Unit | None:
        full: set[int] = set()
        for task in self._ahead_due.values():
            memory = self._memory(task)
            if memory in full:
                continue
            buffer = self._acquire(task)
            if buffer is not None:
                del self._ahead_due[task.layout.subgroup]
                held = self._ahead[task.layout.subgroup] = self._hold(task, buffer)
                self._num_loading_ahead += 1
                return _Unit(self._moving, partial(self._load_ahead, held))
            full.add(memory)
            if len(full) == self._num_memories:
                break
        return None

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

    def _hold(self, task: Task, buffer: CsdBuffer) -> _Held:
        held = _Held(task, buffer)
        self._held.add(held)
        self._num_busy[self._memory(task)] += 1
        return held

    def _release(self, held: _Held) -> None:
        """The task is done."""
        self._held.remove(held)
        held.buffer.release()
        self._num_busy[self._memory(held.task)] -= 1
        self._num_unfinished -= 1
        if not self._num_unfinished:
            self._done.notify_all()

    # --- the units -----------------------------------------------------------------

    def _load_ahead(self, held: _Held) -> None:
        try:
            held.unchecked = self._units.load(held.task, held.buffer, held.missing)
            held.loaded = held.task.loads
        finally:
            with self._done:
                self._num_loading_ahead -= 1
                self._num_busy[self._memory(held.task)] -= 1
                self._done.notify_all()

    def _load_queued(self, held: _Held) -> None:
        unchecked = self._units.load(held.task, held.buffer, held.missing)
        with self._done:
            held.loaded += held.missing
            held.unchecked += unchecked
            if self._failure.error is None:
                self._loaded.append(held)

    def _compute(self, held: _Held) -> None:
        task, num_done = held.task, 0
        try:
            self._failure.check()
            self._units.compute(task, held.buffer, held.unchecked)
            num_done = 1
        finally:
            group = task.group
            with self._done:
                group.num_waiting -= num_done
                group.num_running -= 1
                if not (group.num_waiting and group.num_running):
                    self._done.notify_all()
        with self._done:
            held.to_write.extend(task.stores)
            if not task.stores:
                self._release(held)
            elif self._failure.error is None:
                self._computed.append(held)

    def _write(self, held: _Held, states: Sequence[int]) -> None:
        for state in states:
            self._units.write(held.task, held.buffer, state)
        with self._done:
            held.num_writing -= len(states)
            if not held.num_writing and not held.to_write:
                self._release(held)
