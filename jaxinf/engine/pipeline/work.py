"""Subgroups in memory, and the units of work on them.

Invariant: plain data. A unit describes work and does none of it.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from jaxinf.csd import CsdBuffer
from jaxinf.engine.pipeline.task import Loads, Task

_TOGETHER_BYTES = 4 << 20
_MOST_TOGETHER = 64


@dataclass
class Batch:
    """The total length of short states that move in one request."""

    num_bytes: int = 0
    num_states: int = 0

    def add(self, num_bytes: int, num_states: int = 1) -> None:
        self.num_bytes += num_bytes
        self.num_states += num_states

    @property
    def is_full(self) -> bool:
        """Whether it is large enough for a request."""
        return self.num_bytes >= _TOGETHER_BYTES or self.num_states >= _MOST_TOGETHER


@dataclass(eq=False, slots=True)
class Resident:
    """A subgroup in memory.

    Attributes:
      task: its task, submitted or only prefetched.
      is_loading: whether a load of it is under way.
      unchecked: loaded states without a known checksum.
      stored: states of which it has a newer version than those loaded, as its last task
        computed them.
      deferred: states that its task stores, and that are written at a commit alone.
      unwritten: states whose newest version is not on the drive.
      is_flushed: whether it is being written for a commit, not for its task.
      to_write: states whose write has not begun.
    """

    task: Task
    buffer: CsdBuffer
    is_loading: bool = False
    loaded: Loads = ()
    unchecked: Loads = ()
    stored: frozenset[int] = frozenset()
    deferred: tuple[int, ...] = ()
    unwritten: frozenset[int] = frozenset()
    is_flushed: bool = False
    to_write: tuple[int, ...] = ()
    num_writing: int = 0

    @property
    def missing(self) -> Loads:
        """The task's states that are not loaded."""
        return tuple([load for load in self.task.loads if load not in self.loaded])

    def add_loaded(self, states: Loads, unchecked: Loads) -> None:
        """Adds states that have been read, in place of those of the same number."""
        again = {state for state, _ in states}
        self.stored, self.unwritten = self.stored - again, self.unwritten - again
        if self.loaded:
            replaced = {state for state, _ in states}
            self.loaded = _without(self.loaded, replaced)
            self.unchecked = _without(self.unchecked, replaced)
        self.loaded += states
        self.unchecked += unchecked

    def end_task(self) -> None:
        """Notes that its task is done; the states stay, of the step's new version."""
        if not self.is_flushed:
            self.stored |= set(self.task.stores)
            self.loaded = _without(self.loaded, self.stored)
            self.unchecked = ()
        self.is_flushed = False

    def name_slots(self, sources: Callable[[Sequence[int]], Loads]) -> None:
        """Takes what it holds as loaded, when the step has ended.

        Args:
          sources: returns states with the slots of their newest versions.
        """
        states = sorted({state for state, _ in self.loaded} | self.stored)
        self.loaded, self.stored = sources(states), frozenset()

    def num_bytes(self, states: Iterable[int]) -> int:
        return sum([self.task.layout.extents[n].num_bytes for n in states])


def _without(loads: Loads, states: Collection[int]) -> Loads:
    return tuple(load for load in loads if load[0] not in states)


@dataclass(frozen=True, slots=True)
class Allocate:
    """Find memory for tasks of one CSD, in their order.

    Attributes:
      is_prefetch: whether they have not been submitted yet.
    """

    tasks: tuple[Task, ...]
    is_prefetch: bool


@dataclass(frozen=True, slots=True)
class Evict:
    """Evict a prefetched subgroup, to free memory for a submitted task."""

    resident: Resident


LoadItem: TypeAlias = tuple[Resident, Loads]
"""A subgroup, and its states to read."""


@dataclass(frozen=True, slots=True)
class Load:
    """Read states of one CSD.

    Attributes:
      items: subgroups and states; a prefetch may have several short subgroups.
      is_prefetch: whether they had not been submitted when this began.
    """

    items: tuple[LoadItem, ...]
    is_prefetch: bool


@dataclass(frozen=True, slots=True)
class Compute:
    """Compute a task with loaded states.

    Attributes:
      is_own: whether its submitter computes it instead of a worker.
    """

    resident: Resident
    is_own: bool = False


WriteItem: TypeAlias = tuple[Resident, tuple[int, ...]]
"""A subgroup, and its states to write."""


@dataclass(frozen=True, slots=True)
class Write:
    """Write states of one CSD.

    Attributes:
      items: a long state, or short ones together.
    """

    csd: int
    items: tuple[WriteItem, ...]


Work: TypeAlias = Load | Compute | Write
"""A unit of work for a thread."""

Unit: TypeAlias = Allocate | Evict | Work
"""The next action: find or free memory, or work."""
