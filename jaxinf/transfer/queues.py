"""The queues of the mover, and the way of each subgroup through them.

    prefetch ──► to_prefetch ─┐
                              ├─► load ──► prefetched ─┐ (when its task is submitted)
    submit ──► waiting ───────┘     └────────────► ready ──► compute ──► write ─┐
                                        ▲                                       │
                                     cached ◄──── if it stays in memory ────────┘

Invariant: every submitted task is in one place at a time, and is computed and written
once, its states in order. No threads, locks or I/O.
"""

from collections import deque
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxinf.transfer.tasks import (
    Compute,
    DriveMemory,
    Limits,
    Load,
    Loads,
    RequestSize,
    Resident,
    Task,
    TaskGroup,
    Unit,
    Write,
)


@dataclass(eq=False, slots=True)
class Drive:
    """A drive as the queues see it; its tasks and subgroups are in order."""

    memory: DriveMemory  # where its buffers are
    is_host: bool  # whether the host computes what is on it
    to_prefetch: dict[Hashable, tuple[int, Task]] = field(default_factory=dict)
    to_write: deque[Resident] = field(default_factory=deque)
    to_write_size: RequestSize = field(default_factory=RequestSize)  # of its states
    num_moving: int = 0  # loads and writes under way


class Queues:
    """Pending work, work under way, and limits. Not thread-safe.

    Args:
      drives: By number, the identity of their memory, and whether it is the host's.
      acquire: Lends memory for a task, or returns None if there is no room now.
    """

    def __init__(
        self,
        drives: Sequence[tuple[Hashable, bool]],
        acquire: Callable[[Task], Any],
        limits: Limits,
    ) -> None:
        memories = {identity: DriveMemory() for identity, _ in drives}
        self.memories = [*memories.values()]
        self.drives = [Drive(memories[key], is_host) for key, is_host in drives]
        self.limits = limits
        # Subgroups that lack states of their tasks; and loaded ones, whose tasks the
        # host, or another processor, may compute.
        self.to_load: deque[Resident] = deque()
        self.ready: dict[Resident, None] = {}
        self.remote: dict[Resident, None] = {}
        self.residents: set[Resident] = set()  # all subgroups in memory
        self.computing_groups: set[TaskGroup] = set()  # whose submitters compute
        # Units under way at workers; prefetches are among those that move.
        self.num_moving = self.num_computing = self.num_remote = 0
        self.num_prefetching = 0
        self.num_unfinished = 0  # submitted tasks that are not computed and written
        self.num_draining = 0  # threads that wait until there is none
        self.is_stopped = False  # no unit may begin
        self.holds_prefetches = False  # no prefetch may begin
        # Subgroups that stay in memory; and whether only a commit writes them, but for
        # the states that are written through.
        self.cached_keys: frozenset[Hashable] = frozenset()
        self.defers_writes = False
        self.written_through: frozenset[int] = frozenset()
        self.step = 0  # number of those that have ended
        self.hit_bytes = 0  # that updates have found in memory, until it is taken
        self._acquire = acquire
        self._num_tasks = 0

    # --- requests ------------------------------------------------------------------

    def submit(self, tasks: Sequence[Task], group: TaskGroup) -> None:
        """Queues tasks; those of subgroups in memory use what is there."""
        self.num_unfinished += len(tasks)
        for task in tasks:
            task.group = group
            drive, key = self.drives[task.layout.drive], task.layout.key
            memory = drive.memory
            drive.to_prefetch.pop(key, None)
            resident = memory.cached.pop(key, None)
            if resident is not None:
                resident.begin_task(task, self.step)
                if task.stores and not resident.missing:
                    self.hit_bytes += task.layout.num_bytes
            elif (resident := memory.prefetched.pop(key, None)) is not None:
                resident.task = task
            else:
                memory.waiting.append(self._numbered(task))
                continue
            memory.num_in_use += 1
            if not resident.is_loading:
                self.route(resident)

    def prefetch(self, tasks: Sequence[Task]) -> None:
        """Queues tasks to prefetch while no other task needs the memory."""
        for task in tasks:
            drive, key = self.drives[task.layout.drive], task.layout.key
            is_there = key in drive.memory.prefetched or key in drive.memory.cached
            if task.loads and not is_there:
                drive.to_prefetch[key] = self._numbered(task)

    def cancel_prefetches(self) -> None:
        """Cancels prefetches that have not begun; others go on."""
        for drive in self.drives:
            drive.to_prefetch.clear()

    def drop_prefetched(self, given_up: Collection[Hashable] = ()) -> None:
        """Ends a step: drops prefetches; results are newest, but for keys given up."""
        assert not self.num_prefetching
        if given_up:
            self.hit_bytes = 0
        for memory in self.memories:
            dropped = [*memory.prefetched.values()]
            for key in given_up:
                resident = memory.cached.get(key)
                if resident is not None and resident.give_up(self.step):
                    dropped.append(resident)
            for resident in dropped:
                self.drop(resident)
            memory.refused_bytes = None
        self.step += 1

    def cache_only(self, keys: frozenset[Hashable]) -> None:
        """Sets the subgroups that stay in memory; others leave once written."""
        self.cached_keys = keys
        for memory in self.memories:
            for key, resident in [*memory.cached.items()]:
                if key not in keys and not resident.unwritten:
                    self.drop(resident)

    def flush(self) -> bool:
        """Queues the writes that steps have deferred; returns whether there are any.

        No task may be under way.
        """
        cached = [one for memory in self.memories for one in memory.cached.values()]
        unwritten = [resident for resident in cached if resident.unwritten]
        for resident in unwritten:
            memory = self.drive_of(resident).memory
            del memory.cached[resident.task.layout.key]
            memory.num_in_use += 1
            self.num_unfinished += 1
            states, resident.unwritten = resident.unwritten, frozenset()
            resident.is_flushed = True
            self._queue_writes(resident, tuple(sorted(states)))
        return bool(unwritten)

    def stop(self) -> None:
        """Prevents the start of any more units, after a failure or at the end."""
        self.is_stopped = True
        self.cancel_prefetches()
        for drive in self.drives:
            drive.to_write.clear()
            drive.to_write_size = RequestSize()
            drive.memory.waiting.clear()
        self.to_load.clear()
        self.ready.clear()
        self.remote.clear()

    def release(self) -> None:
        """Frees all memory; nothing may be under way."""
        while self.residents:
            self.residents.pop().buffer.release()

    # --- units of work ---------------------------------------------------------------

    def begin(self, unit: Unit) -> None:
        """Takes what a unit moves or computes from its queue, and counts the unit."""
        match unit:
            case Load(number, items):
                self._count_moving(number, 1)
                self.num_prefetching += unit.is_prefetch
                for resident, _ in items:
                    resident.is_loading = True
                    if not unit.is_prefetch:
                        assert self.to_load.popleft() is resident
            case Compute(resident):
                del self._ready_queue(resident)[resident]
                resident.deferred = self._deferred_states(resident.task)
                self._count_computing(unit, 1)
            case Write(number, items):
                self._count_moving(number, 1)
                drive = self.drives[number]
                drive.memory.num_writes += 1
                for resident, states in items:
                    assert drive.to_write[0] is resident
                    resident.to_write = resident.to_write[len(states) :]
                    resident.num_writing += len(states)
                    num_bytes = resident.num_bytes(states)
                    drive.to_write_size.add(-num_bytes, -len(states))
                    if not resident.to_write:
                        drive.to_write.popleft()

    def fail(self, unit: Unit) -> None:
        """Notes that a unit is no longer under way."""
        match unit:
            case Load(number, items):
                self._count_moving(number, -1)
                self.num_prefetching -= unit.is_prefetch
                for resident, _ in items:
                    resident.is_loading = False
                    if unit.is_prefetch:
                        self.drives[number].memory.num_in_use -= 1
            case Compute():
                self._count_computing(unit, -1)
            case Write(number):
                self._count_moving(number, -1)
                self.drives[number].memory.num_writes -= 1

    def end(self, unit: Unit, unchecked: Sequence[Loads] = ()) -> None:
        """Notes that a unit is done; `unchecked` has a load's unverified states."""
        self.fail(unit)
        match unit:
            case Load(number, items):
                prefetched = self.drives[number].memory.prefetched
                for (resident, states), rest in zip(items, unchecked, strict=True):
                    resident.add_loaded(states, rest)
                    if prefetched.get(resident.task.layout.key) is not resident:
                        self.route(resident)
            case Compute(resident):
                self._end_compute(resident)
            case Write(_, items):
                for resident, states in items:
                    resident.num_writing -= len(states)
                    if not resident.num_writing and not resident.to_write:
                        self._end_task(resident)

    def _end_compute(self, resident: Resident) -> None:
        resident.task.group.num_waiting -= 1
        stores, deferred = resident.task.stores, resident.deferred
        if deferred:
            stores = tuple([state for state in stores if state not in deferred])
        resident.unwritten = resident.unwritten.difference(stores).union(deferred)
        if not stores:
            self._end_task(resident)
        elif not self.is_stopped:
            self._queue_writes(resident, stores)

    def _queue_writes(self, resident: Resident, states: tuple[int, ...]) -> None:
        drive, resident.to_write = self.drive_of(resident), states
        drive.to_write.append(resident)
        drive.to_write_size.add(resident.num_bytes(states), len(states))

    def _end_task(self, resident: Resident) -> None:
        """Takes a subgroup out of use: it stays in memory, or is released."""
        self.num_unfinished -= 1
        memory, key = self.drive_of(resident).memory, resident.task.layout.key
        memory.num_in_use -= 1
        memory.cached[key] = resident
        resident.end_task(self.step)
        stays = key in self.cached_keys or bool(resident.unwritten)
        if self.is_stopped or resident.is_empty or not stays:
            self.drop(resident)

    def route(self, resident: Resident) -> None:
        """Moves a submitted task's subgroup to its next queue."""
        if self.is_stopped:
            return
        if resident.missing:
            self.to_load.append(resident)
        else:
            self._ready_queue(resident)[resident] = None

    def _deferred_states(self, task: Task) -> tuple[int, ...]:
        if not self.defers_writes or task.layout.key not in self.cached_keys:
            return ()
        return tuple([n for n in task.stores if n not in self.written_through])

    # --- memory ----------------------------------------------------------------------

    def acquire(self, task: Task) -> Resident | None:
        """Returns the task's subgroup with memory of its own; notes a refusal."""
        memory = self.drives[task.layout.drive].memory
        buffer = self._acquire(task)
        if buffer is None:
            memory.refused_bytes = task.layout.num_bytes
            assert memory.num_in_use or memory.prefetched, task.layout
            return None
        resident = Resident(task, buffer)
        memory.num_in_use += 1
        self.residents.add(resident)
        return resident

    def drop(self, resident: Resident) -> None:
        """Releases a subgroup that is cached or prefetched, and needs no write."""
        assert self.is_stopped or not resident.unwritten, resident.task.layout
        memory, key = self.drive_of(resident).memory, resident.task.layout.key
        if memory.cached.pop(key, None) is None:
            del memory.prefetched[key]
        memory.refused_bytes = None
        self.residents.remove(resident)
        resident.buffer.release()

    def drive_of(self, resident: Resident) -> Drive:
        """Returns the drive that a subgroup is on."""
        return self.drives[resident.task.layout.drive]

    def _ready_queue(self, resident: Resident) -> dict[Resident, None]:
        return self.remote if resident.task.is_remote else self.ready

    def _count_moving(self, number: int, change: int) -> None:
        self.num_moving += change
        self.drives[number].num_moving += change

    def _count_computing(self, unit: Compute, change: int) -> None:
        group = unit.resident.task.group
        if unit.is_for_submitter:
            groups = self.computing_groups
            (groups.add if change > 0 else groups.discard)(group)
            return
        group.num_running += change
        if unit.resident.task.is_remote:
            self.num_remote += change
        else:
            self.num_computing += change

    def _numbered(self, task: Task) -> tuple[int, Task]:
        self._num_tasks += 1
        return self._num_tasks, task
