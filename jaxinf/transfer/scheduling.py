"""Chooses the next unit of work, and gives it memory.

    compute a loaded task, remote or here  >  write what is long enough, or blocks
      memory  >  load for submitted tasks  >  prefetch

Invariant: submitted tasks get memory in order, and before prefetches.
"""

from jaxinf.transfer.queues import Drive, DriveMemory, Queues
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
        resident = _next_to_compute(queues)
        unit: Unit | None = None if resident is None else Compute(resident)
        if unit is None and queues.num_moving < queues.limits.moving:
            unit = _next_write(queues) or _next_load(queues)
            if unit is None and (_admit(queues) or _evict(queues)):
                continue
            unit = unit or _next_prefetch(queues)
        if unit is not None:
            queues.begin(unit)
        return unit
    return None


def next_for_submitter(queues: Queues, group: TaskGroup) -> Compute | None:
    """Begins a task of the group for its submitter to compute, if there is one.

    Handing a short subgroup to another thread takes longer than computing it.
    """
    if queues.ready and not queues.is_stopped and _may_compute(queues):
        for resident in queues.ready:
            if resident.task.group is group and queues.drive_of(resident).is_host:
                unit = Compute(resident, is_for_submitter=True)
                queues.begin(unit)
                return unit
    return None


# --- computations --------------------------------------------------------------------


def _next_to_compute(queues: Queues) -> Resident | None:
    if queues.remote and queues.num_remote < queues.limits.remote:
        return next(iter(queues.remote))
    if queues.ready and _may_compute(queues):
        return next(iter(queues.ready))
    return None


def _may_compute(queues: Queues) -> bool:
    num_computing = queues.num_computing + len(queues.computing_groups)
    return num_computing < queues.limits.computing


# --- writes --------------------------------------------------------------------------


def _next_write(queues: Queues) -> Write | None:
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

    Few are enough if a thread waits for them, or for memory that no other write frees.
    """

    def is_due(drive: Drive) -> bool:
        size, memory = drive.to_write_size, drive.memory
        is_starved = memory.refused_bytes is not None and not memory.num_writes
        is_enough = size.is_full or queues.num_draining or is_starved
        return bool(size.num_states and is_enough) and _may_move(queues, drive)

    sizes = {n: d.to_write_size for n, d in enumerate(queues.drives) if is_due(d)}
    return max(sizes, key=lambda number: sizes[number].num_bytes, default=None)


def _may_move(queues: Queues, drive: Drive) -> bool:
    """Whether a worker may move bytes of a drive; the others keep a worker each."""
    num_others = len(queues.drives) - 1
    return drive.num_moving < max(1, queues.limits.moving - num_others)


# --- loads ---------------------------------------------------------------------------


def _next_load(queues: Queues) -> Load | None:
    """Returns a load for submitted tasks of one drive, for short ones together."""
    if not queues.to_load:
        return None
    number, batch = queues.to_load[0].task.layout.drive, RequestSize()
    items: list[tuple[Resident, Loads]] = []
    for resident in queues.to_load:
        if batch.is_full or resident.task.layout.drive != number:
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
    memory, batch = _memory_to_admit(queues), RequestSize()
    if memory is None:
        return False
    while memory.waiting and not batch.is_full:
        resident = queues.acquire(memory.waiting[0][1])
        if resident is None:
            break
        memory.waiting.popleft()
        queues.route(resident)
        loads = resident.task.loads
        num_bytes = resident.num_bytes([state for state, _ in loads])
        batch.add(num_bytes, max(1, len(loads)))
    return True


def _memory_to_admit(queues: Queues) -> DriveMemory | None:
    """Returns the memory whose first waiting task is the next, and may fit."""

    def may_fit(memory: DriveMemory) -> bool:
        refused_bytes = memory.refused_bytes
        num_bytes = memory.waiting[0][1].layout.num_bytes
        return refused_bytes is None or num_bytes < refused_bytes

    fitting = [one for one in queues.memories if one.waiting and may_fit(one)]
    return min(fitting, key=lambda memory: memory.waiting[0][0], default=None)


def _evict(queues: Queues) -> bool:
    """Drops a prefetched subgroup if no memory will be freed otherwise."""
    for memory in queues.memories:
        if memory.waiting and memory.prefetched and not memory.num_in_use:
            queues.drop(next(reversed(memory.prefetched.values())))
            return True
    return False


# --- prefetches ----------------------------------------------------------------------


def _next_prefetch(queues: Queues) -> Load | None:
    """Returns a prefetch of a long subgroup, or of short ones of a drive, in order."""
    while (number := _drive_to_prefetch(queues)) is not None:
        drive, batch = queues.drives[number], RequestSize()
        items: list[tuple[Resident, Loads]] = []
        while drive.to_prefetch and not batch.is_full:
            key, (_, task) = next(iter(drive.to_prefetch.items()))
            resident = queues.acquire(task)
            if resident is None:
                break
            del drive.to_prefetch[key]
            drive.memory.prefetched[key] = resident
            num_bytes = resident.num_bytes([state for state, _ in task.loads])
            batch.add(num_bytes, len(task.loads))
            items.append((resident, task.loads))
        if items:
            return Load(number, tuple(items), is_prefetch=True)
    return None


def _drive_to_prefetch(queues: Queues) -> int | None:
    """Returns the drive whose prefetch is next, if its memory may have room."""
    places: dict[int, int] = {}
    for number, drive in enumerate(() if queues.holds_prefetches else queues.drives):
        has_room = not drive.memory.waiting and drive.memory.refused_bytes is None
        if drive.to_prefetch and has_room and _may_move(queues, drive):
            places[number], _ = next(iter(drive.to_prefetch.values()))
    return min(places, key=places.__getitem__, default=None)
