"""The queues of the pipeline, and their transitions.

    prefetch ──► due ──┐
                       ├─► load ──► prefetched ─┐ (when its task is submitted)
    submit ──► waiting ┘     └────────────► ready ──► compute ──► write ──► released
                                  ▲                                  │
                                 kept ◄──── if it stays in memory ───┘

Invariant: every submitted task is in one place at a time, and is computed and written
  once. Plain data, without threads, locks or I/O.
"""

from collections import deque
from collections.abc import Collection, Sequence

from jaxinf.csd import CsdBuffer
from jaxinf.engine.pipeline.work import (
    Allocate,
    Compute,
    CsdTraits,
    Limits,
    Load,
    Loads,
    Memory,
    NumberedTask,
    Resident,
    Task,
    TaskGroup,
    Work,
    Write,
)
from jaxinf.engine.pipeline.write_queue import WriteQueue
from jaxinf.layout import Subgroup


class Queues:
    """Pending work, work under way, and limits. Not thread-safe.

    Args:
      limits: limits for units under way.

    Attributes:
      due: tasks to prefetch, by CSD, in order.
      incomplete: subgroups in memory that lack states to be loaded.
      ready: loaded subgroups whose tasks may compute.
      elsewhere: those of them that another processor than the host's computes.
      num_moving, num_computing, num_elsewhere: numbers of units under way at workers.
      num_prefetching: number of these that are loads of prefetches.
      num_unfinished: number of submitted tasks that are not computed and written.
      num_draining: number of threads that wait until that is 0.
      is_stopped: whether no more units may begin.
      is_holding: whether no more prefetches may begin.
      staying: subgroups that stay in memory when they are written.
      is_deferring: whether these are not written, as the step does not commit.
      step: counts the steps that have ended.
      found_bytes: buffers of subgroups whose updates have found them in memory since
        that was set to 0.
    """

    def __init__(self, csds: Sequence[CsdTraits], limits: Limits) -> None:
        self.csds = csds
        self.limits = limits
        num_memories = max((csd.memory for csd in csds), default=-1) + 1
        self.memories = [Memory() for _ in range(num_memories)]
        self.due: list[dict[Subgroup, NumberedTask]] = [{} for _ in csds]
        self.incomplete: deque[Resident] = deque()
        self.ready: dict[Resident, None] = {}
        self.elsewhere: dict[Resident, None] = {}
        self.writes = WriteQueue([csd.memory for csd in csds])
        self.submitting: set[TaskGroup] = set()
        self.residents: set[Resident] = set()
        self.num_moving = self.num_computing = self.num_prefetching = 0
        self.num_elsewhere = 0
        self.num_moving_at = [0] * len(csds)
        self.num_unfinished = self.num_draining = 0
        self.is_stopped = self.is_holding = False
        self.staying: frozenset[Subgroup] = frozenset()
        self.is_deferring = False
        self.step = self.found_bytes = 0
        self.at_once: frozenset[int] = frozenset()
        self._num_seen = 0

    def memory_of(self, task: Task) -> Memory:
        return self.memories[self.csds[task.csd].memory]

    def is_busy(self, csd: int) -> bool:
        """Whether no more workers may move bytes of a CSD, as others need some."""
        others = len(self.csds) - 1
        return self.num_moving_at[csd] >= max(1, self.limits.moving - others)

    def is_starved(self, csd: int) -> bool:
        """Whether the CSD's memory refused a subgroup and has had no room since."""
        return self.memories[self.csds[csd].memory].refused_bytes is not None

    # --- requests ------------------------------------------------------------------

    def submit(self, tasks: Sequence[Task], group: TaskGroup) -> None:
        """Queues tasks; those that are in memory take that over."""
        self.num_unfinished += len(tasks)
        for task in tasks:
            task.group = group
            memory, subgroup = self.memory_of(task), task.layout.subgroup
            self.due[subgroup.csd].pop(subgroup, None)
            resident = memory.kept.pop(subgroup, None)
            if resident is not None:
                resident.begin_task(task, self.step)
                if task.stores and not resident.missing:
                    self.found_bytes += task.layout.num_bytes
            elif (resident := memory.prefetched.pop(subgroup, None)) is not None:
                resident.task = task
            else:
                memory.waiting.append(self._numbered(task))
                continue
            memory.num_in_use += 1
            if not resident.is_loading:
                self._route(resident)

    def prefetch(self, tasks: Sequence[Task]) -> None:
        """Queues tasks to prefetch while no other task needs the memory."""
        for task in tasks:
            subgroup, memory = task.layout.subgroup, self.memory_of(task)
            is_there = subgroup in memory.prefetched or subgroup in memory.kept
            if task.loads and not is_there:
                self.due[subgroup.csd][subgroup] = self._numbered(task)

    def cancel_prefetches(self) -> None:
        """Cancels prefetches that have not begun; others go on."""
        for due in self.due:
            due.clear()

    def end_step(self, given_up: Collection[Subgroup] = ()) -> Sequence[Resident]:
        """Forgets prefetched subgroups; what tasks have computed counts from now on.

        Args:
          given_up: subgroups whose last task does not count.

        Returns:
          The subgroups to release.
        """
        assert not self.num_prefetching
        self.step += 1
        dropped = [one for m in self.memories for one in m.prefetched.values()]
        dropped += [
            memory.kept[subgroup]
            for memory in self.memories
            for subgroup in given_up
            if subgroup in memory.kept
        ]
        for resident in dropped:
            self.evict(resident)
        for memory in self.memories:
            memory.refused_bytes = None
        return dropped

    def keep(self, staying: frozenset[Subgroup]) -> Sequence[Resident]:
        """Sets the subgroups that stay in memory; returns others, to be released."""
        self.staying = staying
        dropped = [
            resident
            for memory in self.memories
            for subgroup, resident in memory.kept.items()
            if subgroup not in staying and not resident.unwritten
        ]
        for resident in dropped:
            self.evict(resident)
        return dropped

    def stop(self) -> None:
        """Prevents the start of any more units, after a failure or at the end."""
        self.is_stopped = True
        self.cancel_prefetches()
        for memory in self.memories:
            memory.waiting.clear()
        self.incomplete.clear()
        self.ready.clear()
        self.elsewhere.clear()
        self.writes.clear()

    # --- memory --------------------------------------------------------------------

    def allocate(self, wanted: Allocate, buffers: Sequence[CsdBuffer]) -> Load | None:
        """Gives buffers to the first tasks; returns the load into them."""
        memory = self.memory_of(wanted.tasks[0])
        if len(buffers) < len(wanted.tasks):
            refused = wanted.tasks[len(buffers)]
            memory.refused_bytes = refused.layout.num_bytes
            assert memory.num_in_use or memory.prefetched or buffers, refused.layout
        pairs = zip(wanted.tasks, buffers, strict=False)
        residents = [Resident(task, buffer) for task, buffer in pairs]
        memory.num_in_use += len(residents)
        self.residents.update(residents)
        for resident in residents:
            subgroup = resident.task.layout.subgroup
            if wanted.is_prefetch:
                del self.due[subgroup.csd][subgroup]
                memory.prefetched[subgroup] = resident
            else:
                _, task = memory.waiting.popleft()
                assert task is resident.task
                if not task.loads:
                    self._route(resident)
        items = tuple([(r, r.task.loads) for r in residents if r.task.loads])
        return Load(items, wanted.is_prefetch) if items else None

    def evict(self, resident: Resident) -> None:
        """Takes a subgroup without a task out of memory."""
        memory, subgroup = self.memory_of(resident.task), resident.task.layout.subgroup
        if memory.kept.pop(subgroup, None) is None:
            del memory.prefetched[subgroup]
        memory.refused_bytes = None
        self.residents.remove(resident)

    # --- units of work -------------------------------------------------------------

    def begin(self, unit: Work) -> None:
        match unit:
            case Load(items):
                self.num_moving += 1
                self.num_moving_at[items[0][0].task.csd] += 1
                self.num_prefetching += unit.is_prefetch
                if self.incomplete and self.incomplete[0] is items[0][0]:
                    self.incomplete.popleft()
                for resident, _ in items:
                    resident.is_loading = True
            case Compute(resident):
                del self._ready_of(resident)[resident]
                resident.deferred = self._deferred(resident.task)
                if unit.is_own:
                    self.submitting.add(resident.task.group)
                else:
                    self._count_computing(resident, 1)
            case Write():
                self.num_moving += 1
                self.num_moving_at[unit.csd] += 1
                self.writes.begin(unit)

    def fail(self, unit: Work) -> None:
        match unit:
            case Load(items):
                self.num_moving -= 1
                self.num_moving_at[items[0][0].task.csd] -= 1
                self.num_prefetching -= unit.is_prefetch
                for resident, _ in items:
                    resident.is_loading = False
                    if unit.is_prefetch:
                        self.memory_of(resident.task).num_in_use -= 1
            case Compute(resident):
                if unit.is_own:
                    self.submitting.discard(resident.task.group)
                else:
                    self._count_computing(resident, -1)
            case Write():
                self.num_moving -= 1
                self.num_moving_at[unit.csd] -= 1

    def _ready_of(self, resident: Resident) -> dict[Resident, None]:
        return self.elsewhere if resident.task.is_elsewhere else self.ready

    def _count_computing(self, resident: Resident, change: int) -> None:
        resident.task.group.num_running += change
        if resident.task.is_elsewhere:
            self.num_elsewhere += change
        else:
            self.num_computing += change

    def end(self, unit: Work, unchecked: Sequence[Loads] = ()) -> Sequence[Resident]:
        """Notes the end of a unit; returns the subgroups to release.

        Args:
          unchecked: for a load, the states of each subgroup without verification.
        """
        self.fail(unit)
        match unit:
            case Load():
                self._loaded(unit, unchecked)
                return ()
            case Compute(resident):
                released = self._computed(resident)
            case Write():
                released = self.writes.end(unit)
        self.num_unfinished -= len(released)
        return [resident for resident in released if not self._stays(resident)]

    def _stays(self, resident: Resident) -> bool:
        """Takes a subgroup out of use: it stays in memory, or has to be released."""
        memory, subgroup = self.memory_of(resident.task), resident.task.layout.subgroup
        memory.num_in_use -= 1
        has_moved = resident.task.loads or resident.task.stores
        if subgroup in self.staying and has_moved and not self.is_stopped:
            resident.end_task(self.step)
            memory.kept[subgroup] = resident
            return True
        memory.refused_bytes = None
        self.residents.remove(resident)
        return False

    def _loaded(self, load: Load, unchecked: Sequence[Loads]) -> None:
        for (resident, states), left in zip(load.items, unchecked, strict=True):
            resident.add_loaded(states, left)
            memory = self.memory_of(resident.task)
            subgroup = resident.task.layout.subgroup
            if memory.prefetched.get(subgroup) is not resident:
                self._route(resident)

    def _computed(self, resident: Resident) -> Sequence[Resident]:
        resident.task.group.num_waiting -= 1
        stores, deferred = resident.task.stores, resident.deferred
        if deferred:
            stores = tuple([state for state in stores if state not in deferred])
        resident.unwritten = resident.unwritten.difference(stores).union(deferred)
        if not stores:
            return (resident,)
        if not self.is_stopped:
            self.writes.add(resident, stores)
        return ()

    def _deferred(self, task: Task) -> tuple[int, ...]:
        if not self.is_deferring or task.layout.subgroup not in self.staying:
            return ()
        return tuple([state for state in task.stores if state not in self.at_once])

    def flush(self) -> bool:
        """Queues all states to write that steps have deferred; whether there are any.

        No task may be under way.
        """
        waiting = [
            (memory, resident)
            for memory in self.memories
            for resident in memory.kept.values()
            if resident.unwritten
        ]
        for memory, resident in waiting:
            del memory.kept[resident.task.layout.subgroup]
            memory.num_in_use += 1
            self.num_unfinished += 1
            states, resident.unwritten = resident.unwritten, frozenset()
            resident.is_flushed = True
            self.writes.add(resident, tuple(sorted(states)))
        return bool(waiting)

    def _route(self, resident: Resident) -> None:
        """Moves a submitted task's subgroup to its next queue."""
        if self.is_stopped:
            return
        if resident.missing:
            self.incomplete.append(resident)
        else:
            self._ready_of(resident)[resident] = None

    def _numbered(self, task: Task) -> NumberedTask:
        self._num_seen += 1
        return self._num_seen, task
