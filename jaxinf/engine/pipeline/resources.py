"""What units of work compete for: memory, and a number of threads.

Invariant: plain data.
"""

from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from jaxinf.engine.pipeline.task import Task
from jaxinf.engine.pipeline.work import Resident
from jaxinf.layout import Subgroup

__all__ = ["CsdTraits", "Limits", "Memory", "NumberedTask"]


class CsdTraits(NamedTuple):
    """What scheduling has to know of a CSD.

    Attributes:
      memory: the number of the memory that its buffers are from.
      is_host: whether submitters compute its tasks themselves.
    """

    memory: int
    is_host: bool


class Limits(NamedTuple):
    """How many units of work may be under way.

    Attributes:
      moving: loads and writes.
      computing: computations, those of submitters too.
    """

    moving: int
    computing: int


NumberedTask: TypeAlias = tuple[int, Task]
"""A task and its place among all that were submitted, or prefetched."""


@dataclass(slots=True)
class Memory:
    """What waits for a memory, and what it holds.

    Attributes:
      waiting: submitted tasks without memory, in order.
      prefetched: subgroups whose tasks nobody has submitted yet, in order.
      num_in_use: subgroups that give their memory back by themselves: those of
        submitted tasks, and those that are being prefetched.
      refused_bytes: the length for which there was no room, nor has been since.
    """

    waiting: deque[NumberedTask] = field(default_factory=deque)
    prefetched: dict[Subgroup, Resident] = field(default_factory=dict)
    num_in_use: int = 0
    refused_bytes: int | None = None
