"""Chooses the next unit of work, and gives it memory.

    compute a loaded task, elsewhere or here  >  write what is long enough, or blocks
      memory  >  load for submitted tasks  >  prefetch

Invariant: submitted tasks get memory in order, and before prefetches.
"""

from jaxinf.transfer.queues import Drive, MemoryQueue, Queues
from jaxinf.transfer.tasks import (
    Compute,
    Load,
    Loads,
    RequestSize,
    Resident,
    TaskGroup,
    Unit,
    Write,
)


def next_unit(queues: Queues) -> Unit | None:
    """Begins the best unit of work, and returns it; None if there is none now."""
    while not queues.is_stopped:
        resident = _to_compute(queues)
        unit: Unit | None = None if resident is None else Compute(resident)
        if unit is None and queues.num_moving < queues.limits.moving:
            unit = _write(queues) or _load(queues)
            if unit is None and (_admit(queues) or _evict(queues)):
                continue
            unit = unit or _prefetch(queues)
        if unit is not None:
            queues.begin(unit)
        return unit
    return None


def next_own(queues: Queues, group: TaskGroup) -> Compute | None:
    """Begins a task of the group for its submitter to compute, if there is one.

    Handing a small piece to another thread takes longer than computing it.
    """
    if queues.ready and not queues.is_stopped and _may_compute(queues):
        for resident in queues.ready:
            if resident.task.group is group and queues.drive_of(resident).is_host:
                unit = Compute(resident, is_own=True)
                queues.begin(unit)
                return unit
    return None


# --- computations --------------------------------------------------------------------


def _to_compute(queues: Queues) -> Resident | None:
    if queues.elsewhere and queues.num_elsewhere < queues.limits.elsewhere:
        return next(iter(queues.elsewhere))
    if queues.ready and _may_compute(queues):
        return next(iter(queues.ready))
    return None


def _may_compute(queues: Queues) -> bool:
    num_computing = queues.num_computing + len(queues.submitting)
    return num_computing < queues.limits.computing


# --- writes --------------------------------------------------------------------------


def _write(queues: Queues) -> Write | None:
    """Returns a write of a long state of a drive, or of short ones together."""
    number = _drive_to_write(queues)
    if number is None:
        return None
    batch = RequestSize()
    items: list[tuple[Resident, tuple[int, ...]]] = []
    for resident in queues.drives[number].to_write:
        num_taken = 0
        for state in resident.to_write:
            if batch.is_full:
                break
            batch.add(resident.num_bytes((state,)))
            num_taken += 1
        items.append((resident, resident.to_write[:num_taken]))
        if batch.is_full:
            break
    return Write(number, tuple(items))


def _drive_to_write(queues: Queues) -> int | None:
    """Returns the drive with the most bytes to write, of those with enough.

    Few are enough if someone waits for them, or for memory that no other write frees.
    """

    def is_due(drive: Drive) -> bool:
        waiting, room = drive.waiting, drive.room
        is_starved = room.refused_bytes is not None and not room.num_writes
        is_enough = waiting.is_full or queues.num_draining or is_starved
        return bool(waiting.num_states and is_enough) and _may_move(queues, drive)

    drives = queues.drives
    due = (number for number, drive in enumerate(drives) if is_due(drive))
    return max(due, key=lambda number: drives[number].waiting.num_bytes, default=None)


def _may_move(queues: Queues, drive: Drive) -> bool:
    """Whether a worker may move bytes of a drive; the others keep a worker each."""
    others = len(queues.drives) - 1
    return drive.num_moving < max(1, queues.limits.moving - others)


# --- loads ---------------------------------------------------------------------------


def _load(queues: Queues) -> Load | None:
    """Returns a load for submitted tasks of one drive, for short ones together."""
    if not queues.incomplete:
        return None
    number, batch = queues.incomplete[0].task.piece.drive, RequestSize()
    items: list[tuple[Resident, Loads]] = []
    for resident in queues.incomplete:
        if batch.is_full or resident.task.piece.drive != number:
            break
        missing = resident.missing
        batch.add(resident.num_bytes([state for state, _ in missing]), len(missing))
        items.append((resident, missing))
    return Load(number, tuple(items), is_prefetch=False)


def _admit(queues: Queues) -> bool:
    """Gives memory to the next waiting tasks, enough for a load, until it is refused.

    Returns:
      Whether anything has changed: a refusal is a reason to write.
    """
    room, batch = _first_waiting(queues), RequestSize()
    if room is None:
        return False
    while room.waiting and not batch.is_full:
        resident = queues.acquire(room.waiting[0][1])
        if resident is None:
            break
        room.waiting.popleft()
        queues.route(resident)
        loads = resident.task.loads
        num_bytes = resident.num_bytes([state for state, _ in loads])
        batch.add(num_bytes, max(1, len(loads)))
    return True


def _first_waiting(queues: Queues) -> MemoryQueue | None:
    """Returns the memory whose first waiting task is the next, and may fit."""

    def may_fit(room: MemoryQueue) -> bool:
        refused_bytes = room.refused_bytes
        num_bytes = room.waiting[0][1].piece.num_bytes
        return refused_bytes is None or num_bytes < refused_bytes

    fitting = (room for room in queues.rooms if room.waiting and may_fit(room))
    return min(fitting, key=lambda room: room.waiting[0][0], default=None)


def _evict(queues: Queues) -> bool:
    """Drops a prefetched piece if no memory will be freed otherwise."""
    for room in queues.rooms:
        if room.waiting and room.prefetched and not room.num_in_use:
            queues.forget(next(reversed(room.prefetched.values())))
            return True
    return False


# --- prefetches ----------------------------------------------------------------------


def _prefetch(queues: Queues) -> Load | None:
    """Returns a prefetch of one long piece, or of short ones of a drive, in order."""
    while (number := _drive_to_prefetch(queues)) is not None:
        drive, batch = queues.drives[number], RequestSize()
        items: list[tuple[Resident, Loads]] = []
        while drive.due and not batch.is_full:
            key, (_, task) = next(iter(drive.due.items()))
            resident = queues.acquire(task)
            if resident is None:
                break
            del drive.due[key]
            drive.room.prefetched[key] = resident
            num_bytes = resident.num_bytes([state for state, _ in task.loads])
            batch.add(num_bytes, len(task.loads))
            items.append((resident, task.loads))
        if items:
            return Load(number, tuple(items), is_prefetch=True)
    return None


def _drive_to_prefetch(queues: Queues) -> int | None:
    """Returns the drive whose prefetch is next, if its memory may have room."""
    places: dict[int, int] = {}
    for number, drive in enumerate(() if queues.is_holding else queues.drives):
        has_room = not drive.room.waiting and drive.room.refused_bytes is None
        if drive.due and has_room and _may_move(queues, drive):
            places[number], _ = next(iter(drive.due.values()))
    return min(places, key=places.__getitem__, default=None)
