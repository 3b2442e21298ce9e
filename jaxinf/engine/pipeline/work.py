"""The data of the pipeline: tasks, subgroups in memory, and units of work on them.

Invariant: plain data. A task names everything it touches, the handler decides only the
time; a unit describes work and does none of it.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from jaxinf.csd import Csd, CsdBuffer
from jaxinf.engine.subgroup_layout import SubgroupLayout
from jaxinf.layout import Subgroup
from jaxinf.store import Slot

_TOGETHER_BYTES = 4 << 20
_MOST_TOGETHER = 64

Loads: TypeAlias = tuple[tuple[int, Slot], ...]
"""States of a subgroup by number, each with the slot to read from."""


@dataclass(eq=False)
class TaskGroup:
    """Tasks that one caller has submitted together and waits for.

    Attributes:
      num_waiting: number of tasks that have not computed.
    """

    num_waiting: int = 0
    num_running: int = 0


_NOBODY = TaskGroup()
"""The group of tasks without a waiting caller."""


@dataclass(eq=False, slots=True)
class Task:
    """The work on one subgroup: load → compute → write.

    Attributes:
      layout: the subgroup and its buffer.
      compute: the computation on the loaded buffer. It runs once, on a worker or on the
        submitter's thread. Its argument are the states without a known checksum as
        loaded; it returns these checksums by state.
      loads: states to read, as indices into the layout's states, each with its slot.
      stores: states to write, to the slot that the step builds.
      runs_kernel: whether `compute` runs a kernel of the CSD over the loaded states,
        which computes these checksums; otherwise the host computes them before.
      is_elsewhere: whether `compute` waits for a processor that is not the host's.
      group: the group to notify when `compute` is done.
    """

    layout: SubgroupLayout
    compute: Callable[[Csd, CsdBuffer, Collection[int]], Mapping[int, int] | None]
    loads: Loads = ()
    stores: tuple[int, ...] = ()
    runs_kernel: bool = False
    is_elsewhere: bool = False
    group: TaskGroup = _NOBODY

    @property
    def csd(self) -> int:
        """The number of the subgroup's CSD."""
        return self.layout.subgroup.csd


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
      held: states in it, as the last finished step left them.
      unchecked: loaded states without a known checksum.
      stored: states in it, as its last task computed them.
      stored_in: the step of that task, by the queues' count.
      deferred: states that its task stores, and that are written at a commit alone.
      unwritten: states whose newest version is not on the drive.
      is_flushed: whether it is being written for a commit, not for its task.
      to_write: states whose write has not begun.
    """

    task: Task
    buffer: CsdBuffer
    is_loading: bool = False
    held: frozenset[int] = frozenset()
    unchecked: Loads = ()
    stored: frozenset[int] = frozenset()
    stored_in: int = 0
    deferred: tuple[int, ...] = ()
    unwritten: frozenset[int] = frozenset()
    is_flushed: bool = False
    to_write: tuple[int, ...] = ()
    num_writing: int = 0

    @property
    def missing(self) -> Loads:
        """The task's states that are not in it."""
        return tuple([load for load in self.task.loads if load[0] not in self.held])

    def add_loaded(self, states: Loads, unchecked: Loads) -> None:
        """Adds states that have been read, in place of what its task computed."""
        read = frozenset([state for state, _ in states])
        self.stored, self.unwritten = self.stored - read, self.unwritten - read
        self.held |= read
        self.unchecked += unchecked

    def begin_task(self, task: Task, step: int) -> None:
        """Takes a task; what one of an earlier step has computed counts from now on."""
        self.task = task
        if self.stored and self.stored_in < step:
            self.held, self.stored = self.held | self.stored, frozenset()

    def end_task(self, step: int) -> None:
        """Notes that its task is done; the states stay, of the step's new version."""
        if not self.is_flushed:
            self.stored = self.stored.union(self.task.stores)
            self.stored_in = step
            self.held -= self.stored
            self.unchecked = ()
        self.is_flushed = False

    def num_bytes(self, states: Iterable[int]) -> int:
        return sum([self.task.layout.extents[n].num_bytes for n in states])


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


# --- resources ---------------------------------------------------------------------


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
      kept: subgroups that stay from step to step, between their tasks.
      num_in_use: number of subgroups that will free their memory without an eviction:
        those of submitted tasks, and those being prefetched.
      refused_bytes: the length of the last refused request; None if memory was freed
        since, or none was refused.
    """

    waiting: deque[NumberedTask] = field(default_factory=deque)
    prefetched: dict[Subgroup, Resident] = field(default_factory=dict)
    kept: dict[Subgroup, Resident] = field(default_factory=dict)
    num_in_use: int = 0
    refused_bytes: int | None = None
