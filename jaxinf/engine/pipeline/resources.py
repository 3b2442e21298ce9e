"""The resources of units of work: memory, and a number of threads.

Invariant: plain data.
"""

from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from jaxinf.engine.pipeline.task import Task
from jaxinf.engine.pipeline.work import Resident
from jaxinf.layout import Subgroup


class CsdTraits(NamedTuple):
    """The traits of a CSD that matter for scheduling."""

    memory: int
    is_host: bool


class Limits(NamedTuple):
    """Limits for the number of units under way.

    Attributes:
      moving: limit for loads and writes.
      computing: limit for computations, including those of submitters.
      elsewhere: limit for those that wait for another processor than the host's.
    """

    moving: int
    computing: int
    elsewhere: int = 0


NumberedTask: TypeAlias = tuple[int, Task]
"""A task with its number in the order of submission, or of prefetches."""


@dataclass(slots=True)
class Memory:
    """A memory: the tasks that wait for it, and the subgroups in it.

    Attributes:
      waiting: submitted tasks without memory, in order.
      prefetched: subgroups whose tasks have not been submitted yet, in order.
      num_in_use: number of subgroups that will free their memory without an eviction:
        those of submitted tasks, and those being prefetched.
      refused_bytes: the length of the last refused request; None if memory was freed
        since, or none was refused.
    """

    waiting: deque[NumberedTask] = field(default_factory=deque)
    prefetched: dict[Subgroup, Resident] = field(default_factory=dict)
    num_in_use: int = 0
    refused_bytes: int | None = None
