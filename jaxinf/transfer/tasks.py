"""The data of the mover: tasks, subgroups in memory, and units of work on them.

Invariant: plain data. A task names all that it touches, and the mover chooses the time.
"""

from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

_REQUEST_BYTES = 4 << 20
_REQUEST_STATES = 64

Loads: TypeAlias = tuple[tuple[int, Any], ...]
"""States of a subgroup by number, each with the place to read it from."""


@dataclass(eq=False)
class TaskGroup:
    """Tasks that one caller has submitted together and waits for."""

    num_waiting: int = 0  # that have not computed
    num_running: int = 0  # of these, that a worker computes


_NO_GROUP = TaskGroup()
"""The group of tasks that no caller waits for."""


def idle(csd: Any, buffer: Any, wanted_checksums: Collection[int]) -> None:
    """The computation of a task that has none."""


@dataclass(eq=False, slots=True)
class Task:
    """The work on one subgroup: load → compute → write.

    Attributes:
      layout: The subgroup's `key`, the number of its `drive`, the `num_bytes` of its
        buffer, and the `sizes` of its states in bytes.
      compute: The computation on the loaded buffer. It runs once, on a worker or on the
        submitter's thread. Its arguments are the drive's CSD, the buffer, and the
        loaded states whose checksums are not known; it returns these checksums.
      loads: States to read, each with its place.
      stores: States to write.
      runs_kernel: Whether `compute` runs a kernel of the drive over the loaded states,
        which computes these checksums; otherwise the host computes them first.
      is_remote: Whether `compute` waits for another processor than the host's.
    """

    layout: Any
    compute: Callable[[Any, Any, Collection[int]], Mapping[int, int] | None] = idle
    loads: Loads = ()
    stores: tuple[int, ...] = ()
    runs_kernel: bool = False
    is_remote: bool = False
    group: TaskGroup = _NO_GROUP


@dataclass
class RequestSize:
    """The total length of short states that move in one request."""

    num_bytes: int = 0
    num_states: int = 0

    def add(self, num_bytes: int, num_states: int = 1) -> None:
        self.num_bytes += num_bytes
        self.num_states += num_states

    @property
    def is_full(self) -> bool:
        return self.num_bytes >= _REQUEST_BYTES or self.num_states >= _REQUEST_STATES


@dataclass(eq=False, slots=True)
class Resident:
    """A subgroup in memory."""

    task: Task  # submitted, or only prefetched
    buffer: Any  # its memory, which `release` gives back
    is_loading: bool = False
    valid: frozenset[int] = frozenset()  # states as the last finished step left them
    unchecked: Loads = ()  # loaded states without a known checksum
    stored: frozenset[int] = frozenset()  # states as its last task computed them
    stored_in: int = 0  # the step of that task, as `Queues.step` counts
    deferred: tuple[int, ...] = ()  # states that its task leaves for a commit to write
    unwritten: frozenset[int] = frozenset()  # whose newest version is not on the drive
    is_flushed: bool = False  # written for a commit, not for its task
    to_write: tuple[int, ...] = ()  # states whose write has not begun
    num_writing: int = 0

    @property
    def missing(self) -> Loads:
        return tuple([load for load in self.task.loads if load[0] not in self.valid])

    def begin_task(self, task: Task, step: int) -> None:
        """Sets its task; what a task of an earlier step has stored is valid now."""
        self.task = task
        if self.stored and self.stored_in < step:
            self.valid, self.stored = self.valid | self.stored, frozenset()

    def add_loaded(self, states: Loads, unchecked: Loads) -> None:
        """Notes states that were read over what its task had stored."""
        read = frozenset([state for state, _ in states])
        self.stored, self.unwritten = self.stored - read, self.unwritten - read
        self.valid |= read
        self.unchecked += unchecked

    def end_task(self, step: int) -> None:
        """Notes that its task is done; its states are of the step's version now."""
        if not self.is_flushed:
            self.stored = self.stored.union(self.task.stores)
            self.stored_in = step
            used = {state for state, _ in self.task.loads}
            unused = {state for state, _ in self.unchecked} - used
            self.valid = self.valid.difference(self.stored, unused)
            self.unchecked = ()
        self.is_flushed = False

    def give_up(self, step: int) -> bool:
        """Drops what a task of this step has stored; returns whether it is empty."""
        if self.stored_in == step:
            self.unwritten, self.stored = self.unwritten - self.stored, frozenset()
        return self.is_empty

    @property
    def is_empty(self) -> bool:
        return not self.valid and not self.stored

    def num_bytes(self, states: Iterable[int]) -> int:
        """Returns the bytes of states, by number."""
        sizes = self.task.layout.sizes
        return sum([sizes[state] for state in states])


# --- units of work -------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Load:
    """A read from one drive: long states of a subgroup, or short ones of several."""

    drive: int
    items: tuple[tuple[Resident, Loads], ...]
    is_prefetch: bool  # it began before their tasks were submitted


@dataclass(frozen=True, slots=True)
class Compute:
    """The computation of a task, by a worker or by its submitter."""

    resident: Resident
    is_for_submitter: bool = False


@dataclass(frozen=True, slots=True)
class Write:
    """A write to one drive: subgroups, and a long state or short ones together."""

    drive: int
    items: tuple[tuple[Resident, tuple[int, ...]], ...]


Unit: TypeAlias = Load | Compute | Write


@dataclass(slots=True)
class Limits:
    """Numbers of units that may be under way."""

    moving: int  # loads and writes
    computing: int  # computations of the host, including those of submitters
    remote: int = 0  # computations of remote tasks


@dataclass(slots=True)
class DriveMemory:
    """Memory that drives share: tasks that wait for it, and subgroups in it, by key."""

    # Submitted tasks, in order.
    waiting: deque[tuple[int, Task]] = field(default_factory=deque)
    prefetched: dict[Hashable, Resident] = field(default_factory=dict)  # in order
    # Subgroups between their tasks.
    cached: dict[Hashable, Resident] = field(default_factory=dict)
    # Subgroups that will leave without an eviction: of submitted tasks, and those that
    # are being prefetched.
    num_in_use: int = 0
    num_writes: int = 0  # under way, which may free memory
    refused_bytes: int | None = None  # of the last refusal, until memory is freed
