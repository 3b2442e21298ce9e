"""Subgroups in memory, and the units of work that they go through.

Invariant: plain data. A unit says what is to be done and has no part in doing it.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import TypeAlias

from jaxinf.csd import CsdBuffer
from jaxinf.engine.pipeline.task import Loads, Task

__all__ = [
    "Allocate",
    "Batch",
    "Compute",
    "Evict",
    "Load",
    "LoadItem",
    "Resident",
    "Unit",
    "Work",
    "Write",
    "WriteItem",
]

_TOGETHER_BYTES = 4 << 20
_MOST_TOGETHER = 64


@dataclass
class Batch:
    """The length of short states that move together, in one request."""

    num_bytes: int = 0
    num_states: int = 0

    def add(self, num_bytes: int, num_states: int = 1) -> None:
        """Counts states."""
        self.num_bytes += num_bytes
        self.num_states += num_states

    @property
    def is_full(self) -> bool:
        """Whether it is worth a request of its own, or takes as long as one may."""
        return self.num_bytes >= _TOGETHER_BYTES or self.num_states >= _MOST_TOGETHER


@dataclass(eq=False, slots=True)
class Resident:
    """A subgroup that has memory.

    Attributes:
      task: the task that it is in memory for: submitted, or only prefetched.
      buffer: its memory.
      is_loading: whether a load of it is under way.
      loaded: the states that are there as the drive has them.
      unchecked: those of them whose checksum is not known yet.
      to_write: the states whose write has not begun.
      num_writing: how many states are being written.
    """

    task: Task
    buffer: CsdBuffer
    is_loading: bool = False
    loaded: Loads = ()
    unchecked: Loads = ()
    to_write: tuple[int, ...] = ()
    num_writing: int = 0

    @property
    def missing(self) -> Loads:
        """The states that the task loads and that are not there."""
        return tuple([load for load in self.task.loads if load not in self.loaded])

    def add_loaded(self, states: Loads, unchecked: Loads) -> None:
        """Notes states that have been read, in place of others of the same number."""
        if self.loaded:
            replaced = {state for state, _ in states}
            self.loaded = _without(self.loaded, replaced)
            self.unchecked = _without(self.unchecked, replaced)
        self.loaded += states
        self.unchecked += unchecked

    def num_bytes(self, states: Iterable[int]) -> int:
        """The length of some of its states."""
        return sum([self.task.layout.extents[n].num_bytes for n in states])


def _without(loads: Loads, states: Collection[int]) -> Loads:
    return tuple(load for load in loads if load[0] not in states)


@dataclass(frozen=True, slots=True)
class Allocate:
    """Memory is to be found for tasks of one CSD, for the first of them first.

    Attributes:
      tasks: at least one.
      is_prefetch: whether nobody has submitted them yet.
    """

    tasks: tuple[Task, ...]
    is_prefetch: bool


@dataclass(frozen=True, slots=True)
class Evict:
    """A prefetched subgroup is to give up its memory for a submitted task."""

    resident: Resident


LoadItem: TypeAlias = tuple[Resident, Loads]
"""A subgroup, and which of its states are read."""


@dataclass(frozen=True, slots=True)
class Load:
    """States of one CSD are to be read.

    Attributes:
      items: what; of a prefetch, short subgroups together.
      is_prefetch: whether nobody had submitted them when this began.
    """

    items: tuple[LoadItem, ...]
    is_prefetch: bool


@dataclass(frozen=True, slots=True)
class Compute:
    """A task whose states are loaded is to compute.

    Attributes:
      resident: its subgroup.
      is_own: whether its submitter computes it, not a worker.
    """

    resident: Resident
    is_own: bool = False


WriteItem: TypeAlias = tuple[Resident, tuple[int, ...]]
"""A subgroup, and which of its states are written."""


@dataclass(frozen=True, slots=True)
class Write:
    """States of one CSD are to be written.

    Attributes:
      csd: its number.
      items: a long state, or short ones together.
    """

    csd: int
    items: tuple[WriteItem, ...]


Work: TypeAlias = Load | Compute | Write
"""A unit of work for a thread."""

Unit: TypeAlias = Allocate | Evict | Work
"""What is next: memory to be found or taken away, or work."""
