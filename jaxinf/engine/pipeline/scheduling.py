"""Chooses the next unit of work: a pure function of the queues.

    compute a loaded task, elsewhere or here  >  write a state that is long enough or
      blocks memory  >  load for submitted tasks  >  prefetch

Invariant: the queues do not change. Submitted tasks get a memory in order, and before
prefetches.
"""

from collections.abc import Iterable

from jaxinf.engine.pipeline.queues import Queues
from jaxinf.engine.pipeline.work import (
    Allocate,
    Batch,
    Compute,
    Evict,
    Load,
    Memory,
    NumberedTask,
    TaskGroup,
    Unit,
    Write,
)


def next_unit(queues: Queues) -> Unit | None:
    """Returns the best unit to begin; None if there is none now."""
    if queues.is_stopped:
        return None
    if _may_compute_elsewhere(queues):
        return Compute(next(iter(queues.elsewhere)))
    if queues.ready and _may_compute(queues):
        return Compute(next(iter(queues.ready)))
    if queues.num_moving >= queues.limits.moving:
        return None
    return _next_write(queues) or _next_load(queues) or _next_prefetch(queues)


def has_next(queues: Queues) -> bool:
    """Whether `next_unit` finds a unit; faster, as short states are not counted."""
    if queues.is_stopped:
        return False
    if queues.ready and _may_compute(queues):
        return True
    if _may_compute_elsewhere(queues):
        return True
    if queues.num_moving >= queues.limits.moving:
        return False
    return (
        _due_csd(queues) is not None
        or _first_due(queues) is not None
        or _next_load(queues) is not None
    )


def next_own(queues: Queues, group: TaskGroup) -> Compute | None:
    """Returns a task of the group for its submitter to compute.

    Handing a small subgroup to another thread takes longer than computing it.
    """
    if queues.ready and not queues.is_stopped and _may_compute(queues):
        for resident in queues.ready:
            task = resident.task
            if task.group is group and queues.csds[task.csd].is_host:
                return Compute(resident, is_own=True)
    return None


def _may_compute(queues: Queues) -> bool:
    num_computing = queues.num_computing + len(queues.submitting)
    return num_computing < queues.limits.computing


def _may_compute_elsewhere(queues: Queues) -> bool:
    return bool(queues.elsewhere) and queues.num_elsewhere < queues.limits.elsewhere


def _due_csd(queues: Queues) -> int | None:
    is_awaited = queues.num_draining > 0
    return queues.writes.due_csd(
        queues.is_busy, queues.is_starved, is_awaited=is_awaited
    )


def _next_write(queues: Queues) -> Write | None:
    csd = _due_csd(queues)
    return None if csd is None else queues.writes.next_write(csd)


def _next_load(queues: Queues) -> Allocate | Evict | Load | None:
    """Returns a load for a submitted task, with or without memory."""
    if queues.incomplete:
        resident = queues.incomplete[0]
        return Load(((resident, resident.missing),), is_prefetch=False)
    first = min(
        [memory.waiting[0] for memory in queues.memories if _may_fit_first(memory)],
        key=lambda numbered: numbered[0],
        default=None,
    )
    if first is not None:
        return Allocate((first[1],), is_prefetch=False)
    return _next_eviction(queues)


def _may_fit_first(memory: Memory) -> bool:
    """Whether there may be room for the first waiting task."""
    if not memory.waiting:
        return False
    refused_bytes, (_, task) = memory.refused_bytes, memory.waiting[0]
    return refused_bytes is None or task.layout.num_bytes < refused_bytes


def _next_eviction(queues: Queues) -> Evict | None:
    """Returns an eviction if no memory will be freed otherwise."""
    for memory in queues.memories:
        if memory.waiting and memory.prefetched and not memory.num_in_use:
            return Evict(next(reversed(memory.prefetched.values())))
    return None


def _first_due(queues: Queues) -> Iterable[NumberedTask] | None:
    """Returns the prefetches of the next CSD in turn, if memory may have room."""
    if queues.is_holding:
        return None
    first, first_number = None, 0
    for csd, due in enumerate(queues.due):
        memory = queues.memories[queues.csds[csd].memory]
        has_room = not memory.waiting and memory.refused_bytes is None
        if due and has_room and not queues.is_busy(csd):
            number, _ = next(iter(due.values()))
            if first is None or number < first_number:
                first, first_number = due, number
    return None if first is None else first.values()


def _next_prefetch(queues: Queues) -> Allocate | None:
    """Returns a prefetch of one long subgroup, or of short ones of a CSD, in order."""
    due = _first_due(queues)
    if due is None:
        return None
    tasks, batch = [], Batch()
    for _, task in due:
        tasks.append(task)
        extents = task.layout.extents
        num_bytes = sum([extents[state].num_bytes for state, _ in task.loads])
        batch.add(num_bytes, len(task.loads))
        if batch.is_full:
            break
    return Allocate(tuple(tasks), is_prefetch=True)
