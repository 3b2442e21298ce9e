"""The queues of the mover, and the way of each piece through them.

    prefetch ──► due ──┐
                       ├─► load ──► prefetched ─┐ (when its task is submitted)
    submit ──► waiting ┘     └────────────► ready ──► compute ──► write ──► released
                                  ▲                                  │
                                 kept ◄──── if it stays in memory ───┘

Invariant: every submitted task is in one place at a time, and is computed and written
once, its states in order. No threads, locks or I/O.
"""

from collections import deque
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxinf.transfer.tasks import (
    Compute,
    Limits,
    Load,
    Loads,
    MemoryQueue,
    RequestSize,
    Resident,
    Task,
    TaskGroup,
    Unit,
    Write,
)


@dataclass(eq=False, slots=True)
class Drive:
    """A drive as the queues see it.

    Attributes:
      room: the memory of its buffers.
      is_host: whether the host computes what is on it.
      due: tasks to prefetch, each with its number, in order.
      to_write: pieces with states to write, in order.
      waiting: the length of these states.
      num_moving: number of its loads and writes under way.
    """

    room: MemoryQueue
    is_host: bool
    due: dict[Hashable, tuple[int, Task]] = field(default_factory=dict)
    to_write: deque[Resident] = field(default_factory=deque)
    waiting: RequestSize = field(default_factory=RequestSize)
    num_moving: int = 0


class Queues:
    """Pending work, work under way, and limits. Not thread-safe.

    Args:
      drives: by number, the identity of their memory, and whether it is the host's.
      acquire: lends memory for a task, or returns None if there is no room now.
      limits: limits for units under way.

    Attributes:
      incomplete: pieces in memory that lack states to be loaded.
      ready: loaded pieces whose tasks may compute.
      elsewhere: ready pieces that another processor than the host's computes.
      residents: all pieces in memory.
      submitting: groups of which the submitter computes a task.
      num_moving, num_computing, num_elsewhere: numbers of units under way at workers.
      num_prefetching: number of these that are loads of prefetches.
      num_unfinished: number of submitted tasks that are not computed and written.
      num_draining: number of threads that wait until that is 0.
      is_stopped: whether no more units may begin.
      is_holding: whether no more prefetches may begin.
      staying: keys of pieces that stay in memory when they are written.
      is_deferring: whether these are not written, as the step does not commit.
      at_once: states that are written in any case.
      step: counts the steps that have ended.
      found_bytes: buffers of pieces whose updates have found them in memory since that
        was set to 0.
    """

    def __init__(
        self,
        drives: Sequence[tuple[Hashable, bool]],
        acquire: Callable[[Task], Any],
        limits: Limits,
    ) -> None:
        rooms = {memory: MemoryQueue() for memory, _ in drives}
        self.rooms = [*rooms.values()]
        self.drives = [Drive(rooms[memory], is_host) for memory, is_host in drives]
        self.limits = limits
        self.incomplete: deque[Resident] = deque()
        self.ready: dict[Resident, None] = {}
        self.elsewhere: dict[Resident, None] = {}
        self.submitting: set[TaskGroup] = set()
        self.residents: set[Resident] = set()
        self.num_moving = self.num_computing = self.num_prefetching = 0
        self.num_elsewhere = 0
        self.num_unfinished = self.num_draining = 0
        self.is_stopped = self.is_holding = self.is_deferring = False
        self.staying: frozenset[Hashable] = frozenset()
        self.at_once: frozenset[int] = frozenset()
        self.step = self.found_bytes = 0
        self._acquire = acquire
        self._num_seen = 0

    # --- requests ------------------------------------------------------------------

    def submit(self, tasks: Sequence[Task], group: TaskGroup) -> None:
        """Queues tasks; those that are in memory take that over."""
        self.num_unfinished += len(tasks)
        for task in tasks:
            task.group = group
            drive, key = self.drives[task.piece.drive], task.piece.key
            room = drive.room
            drive.due.pop(key, None)
            resident = room.kept.pop(key, None)
            if resident is not None:
                resident.begin_task(task, self.step)
                if task.stores and not resident.missing:
                    self.found_bytes += task.piece.num_bytes
            elif (resident := room.prefetched.pop(key, None)) is not None:
                resident.task = task
            else:
                room.waiting.append(self._numbered(task))
                continue
            room.num_in_use += 1
            if not resident.is_loading:
                self.route(resident)

    def prefetch(self, tasks: Sequence[Task]) -> None:
        """Queues tasks to prefetch while no other task needs the memory."""
        for task in tasks:
            drive, key = self.drives[task.piece.drive], task.piece.key
            is_there = key in drive.room.prefetched or key in drive.room.kept
            if task.loads and not is_there:
                drive.due[key] = self._numbered(task)

    def cancel_prefetches(self) -> None:
        """Cancels prefetches that have not begun; others go on."""
        for drive in self.drives:
            drive.due.clear()

    def end_step(self, given_up: Collection[Hashable] = ()) -> None:
        """Drops prefetched pieces; the results of tasks count from now on.

        Args:
          given_up: keys of pieces whose last task does not count.
        """
        assert not self.num_prefetching
        if given_up:
            self.found_bytes = 0
        for room in self.rooms:
            dropped = [*room.prefetched.values()]
            for key in given_up:
                resident = room.kept.get(key)
                if resident is not None and resident.give_up(self.step):
                    dropped.append(resident)
            for resident in dropped:
                self.forget(resident)
            room.refused_bytes = None
        self.step += 1

    def keep(self, staying: frozenset[Hashable]) -> None:
        """Sets the pieces that stay in memory; others leave, once they are written."""
        self.staying = staying
        for room in self.rooms:
            for key, resident in [*room.kept.items()]:
                if key not in staying and not resident.unwritten:
                    self.forget(resident)

    def flush(self) -> bool:
        """Queues all states to write that steps have deferred; whether there are any.

        No task may be under way.
        """
        waiting = [r for room in self.rooms for r in room.kept.values() if r.unwritten]
        for resident in waiting:
            room = self.drive_of(resident).room
            del room.kept[resident.task.piece.key]
            room.num_in_use += 1
            self.num_unfinished += 1
            states, resident.unwritten = resident.unwritten, frozenset()
            resident.is_flushed = True
            self._to_write(resident, tuple(sorted(states)))
        return bool(waiting)

    def stop(self) -> None:
        """Prevents the start of any more units, after a failure or at the end."""
        self.is_stopped = True
        self.cancel_prefetches()
        for drive in self.drives:
            drive.to_write.clear()
            drive.waiting = RequestSize()
            drive.room.waiting.clear()
        self.incomplete.clear()
        self.ready.clear()
        self.elsewhere.clear()

    def release(self) -> None:
        """Frees all memory; nothing may be under way."""
        while self.residents:
            self.residents.pop().buffer.release()

    # --- units of work ---------------------------------------------------------------

    def begin(self, unit: Unit) -> None:
        """Notes that a unit is under way."""
        match unit:
            case Load(number, items):
                self._count_moving(number, 1)
                self.num_prefetching += unit.is_prefetch
                for resident, _ in items:
                    resident.is_loading = True
                    if not unit.is_prefetch:
                        assert self.incomplete.popleft() is resident
            case Compute(resident):
                del self._ready_of(resident)[resident]
                resident.deferred = self._deferred(resident.task)
                self._count_computing(unit, 1)
            case Write(number, items):
                self._count_moving(number, 1)
                drive = self.drives[number]
                drive.room.num_writes += 1
                for resident, states in items:
                    assert drive.to_write[0] is resident
                    resident.to_write = resident.to_write[len(states) :]
                    resident.num_writing += len(states)
                    drive.waiting.add(-resident.num_bytes(states), -len(states))
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
                        self.drives[number].room.num_in_use -= 1
            case Compute():
                self._count_computing(unit, -1)
            case Write(number):
                self._count_moving(number, -1)
                self.drives[number].room.num_writes -= 1

    def end(self, unit: Unit, unchecked: Sequence[Loads] = ()) -> None:
        """Notes that a unit is done.

        Args:
          unchecked: for a load, the states of each piece without verification.
        """
        self.fail(unit)
        match unit:
            case Load(number, items):
                prefetched = self.drives[number].room.prefetched
                for (resident, states), left in zip(items, unchecked, strict=True):
                    resident.add_loaded(states, left)
                    if prefetched.get(resident.task.piece.key) is not resident:
                        self.route(resident)
            case Compute(resident):
                self._computed(resident)
            case Write(_, items):
                for resident, states in items:
                    resident.num_writing -= len(states)
                    if not resident.num_writing and not resident.to_write:
                        self._finished(resident)

    def _computed(self, resident: Resident) -> None:
        resident.task.group.num_waiting -= 1
        stores, deferred = resident.task.stores, resident.deferred
        if deferred:
            stores = tuple([state for state in stores if state not in deferred])
        resident.unwritten = resident.unwritten.difference(stores).union(deferred)
        if not stores:
            self._finished(resident)
        elif not self.is_stopped:
            self._to_write(resident, stores)

    def _to_write(self, resident: Resident, states: tuple[int, ...]) -> None:
        drive, resident.to_write = self.drive_of(resident), states
        drive.to_write.append(resident)
        drive.waiting.add(resident.num_bytes(states), len(states))

    def _finished(self, resident: Resident) -> None:
        """Takes a piece out of use: it stays in memory, or is released."""
        self.num_unfinished -= 1
        room, key = self.drive_of(resident).room, resident.task.piece.key
        room.num_in_use -= 1
        room.kept[key] = resident
        resident.end_task(self.step)
        is_needed = key in self.staying or bool(resident.unwritten)
        if self.is_stopped or resident.is_empty or not is_needed:
            self.forget(resident)

    def route(self, resident: Resident) -> None:
        """Moves a submitted task's piece to its next queue."""
        if self.is_stopped:
            return
        if resident.missing:
            self.incomplete.append(resident)
        else:
            self._ready_of(resident)[resident] = None

    def _deferred(self, task: Task) -> tuple[int, ...]:
        if not self.is_deferring or task.piece.key not in self.staying:
            return ()
        return tuple([state for state in task.stores if state not in self.at_once])

    # --- inside ----------------------------------------------------------------------

    def acquire(self, task: Task) -> Resident | None:
        """Returns the task's piece with memory of its own; notes a refusal."""
        room = self.drives[task.piece.drive].room
        buffer = self._acquire(task)
        if buffer is None:
            room.refused_bytes = task.piece.num_bytes
            assert room.num_in_use or room.prefetched, task.piece
            return None
        resident = Resident(task, buffer)
        room.num_in_use += 1
        self.residents.add(resident)
        return resident

    def forget(self, resident: Resident) -> None:
        """Releases a piece that is kept or prefetched, and needs no write."""
        assert self.is_stopped or not resident.unwritten, resident.task.piece
        room, key = self.drive_of(resident).room, resident.task.piece.key
        if room.kept.pop(key, None) is None:
            del room.prefetched[key]
        room.refused_bytes = None
        self.residents.remove(resident)
        resident.buffer.release()

    def drive_of(self, resident: Resident) -> Drive:
        """Returns the drive that a piece is on."""
        return self.drives[resident.task.piece.drive]

    def _ready_of(self, resident: Resident) -> dict[Resident, None]:
        return self.elsewhere if resident.task.is_elsewhere else self.ready

    def _count_moving(self, number: int, change: int) -> None:
        self.num_moving += change
        self.drives[number].num_moving += change

    def _count_computing(self, unit: Compute, change: int) -> None:
        group = unit.resident.task.group
        if unit.is_own:
            (self.submitting.add if change > 0 else self.submitting.discard)(group)
            return
        group.num_running += change
        if unit.resident.task.is_elsewhere:
            self.num_elsewhere += change
        else:
            self.num_computing += change

    def _numbered(self, task: Task) -> tuple[int, Task]:
        self._num_seen += 1
        return self._num_seen, task
