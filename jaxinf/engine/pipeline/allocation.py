"""Finds memory for the next unit of work, from the CSDs or by evicting prefetches.

Invariant: no call blocks. Every acquired buffer is in the queues or released.
"""

from collections.abc import Iterable, Sequence

from jaxinf.csd import Csd, CsdBuffer
from jaxinf.engine.pipeline.queues import Queues
from jaxinf.engine.pipeline.scheduling import next_unit
from jaxinf.engine.pipeline.task import Task
from jaxinf.engine.pipeline.work import Allocate, Evict, Resident, Work


def next_work(queues: Queues, csds: Sequence[Csd]) -> Work | None:
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
                release((resident,))
            case _:
                return unit


def release(residents: Iterable[Resident]) -> None:
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
