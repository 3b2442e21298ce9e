"""The data of the mover: tasks, pieces in memory, and units of work on them.

Invariant: plain data. A task names everything it touches, the mover decides only the
time; a unit describes work and does none of it.
"""

from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

_TOGETHER_BYTES = 4 << 20
_MOST_TOGETHER = 64

Loads: TypeAlias = tuple[tuple[int, Any], ...]
"""States of a piece by number, each with the place to read it from."""


@dataclass(eq=False)
class TaskGroup:
    """Tasks that one caller has submitted together and waits for.

    Attributes:
      num_waiting: number of tasks that have not computed.
      num_running: number of those that a worker computes.
    """

    num_waiting: int = 0
    num_running: int = 0


_NOBODY = TaskGroup()
"""The group of tasks without a waiting caller."""


def idle(csd: Any, buffer: Any, tells: Collection[int]) -> None:
    """The computation of a task that has none."""


@dataclass(eq=False, slots=True)
class Task:
    """The work on one piece: load → compute → write.

    Attributes:
      piece: a run of bytes with its states. It has a `key`, the number of its `drive`,
        the `num_bytes` of its buffer, and the `sizes` of its states in bytes.
      compute: the computation on the loaded buffer. It runs once, on a worker or on the
        submitter's thread. Its arguments are what the drive computes with, the buffer,
        and the states without a known checksum as loaded; it returns these by state.
      loads: states to read, each with its place.
      stores: states to write.
      runs_kernel: whether `compute` runs a kernel of the drive over the loaded states,
        which computes these checksums; otherwise the host computes them before.
      is_elsewhere: whether `compute` waits for a processor that is not the host's.
      group: the group to notify when `compute` is done.
    """

    piece: Any
    compute: Callable[[Any, Any, Collection[int]], Mapping[int, int] | None] = idle
    loads: Loads = ()
    stores: tuple[int, ...] = ()
    runs_kernel: bool = False
    is_elsewhere: bool = False
    group: TaskGroup = _NOBODY


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
        """Whether it is large enough for a request."""
        return self.num_bytes >= _TOGETHER_BYTES or self.num_states >= _MOST_TOGETHER


@dataclass(eq=False, slots=True)
class Resident:
    """A piece in memory.

    Attributes:
      task: task of the piece, submitted or only prefetched.
      buffer: memory of the piece, which `release` gives back.
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
    buffer: Any
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

    def begin_task(self, task: Task, step: int) -> None:
        """Takes a task; the results of an earlier step's task count from now on."""
        self.task = task
        if self.stored and self.stored_in < step:
            self.held, self.stored = self.held | self.stored, frozenset()

    def add_loaded(self, states: Loads, unchecked: Loads) -> None:
        """Adds states that have been read, in place of what its task computed."""
        read = frozenset([state for state, _ in states])
        self.stored, self.unwritten = self.stored - read, self.unwritten - read
        self.held |= read
        self.unchecked += unchecked

    def end_task(self, step: int) -> None:
        """Notes that its task is done; the states stay, of the step's new version."""
        if not self.is_flushed:
            self.stored = self.stored.union(self.task.stores)
            self.stored_in = step
            used = {state for state, _ in self.task.loads}
            unused = {state for state, _ in self.unchecked} - used
            self.held = self.held.difference(self.stored, unused)
            self.unchecked = ()
        self.is_flushed = False

    def give_up(self, step: int) -> bool:
        """Drops the results of this step's task; whether nothing is left."""
        if self.stored_in == step:
            self.unwritten, self.stored = self.unwritten - self.stored, frozenset()
        return self.is_empty

    @property
    def is_empty(self) -> bool:
        """Whether no state is in it."""
        return not self.held and not self.stored

    def num_bytes(self, states: Iterable[int]) -> int:
        """Returns the bytes of states of it."""
        sizes = self.task.piece.sizes
        return sum([sizes[state] for state in states])


# --- units of work -------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Load:
    """Read states of one drive.

    Attributes:
      items: pieces, and their states; short ones may be read together.
      is_prefetch: whether their tasks had not been submitted when this began.
    """

    drive: int
    items: tuple[tuple[Resident, Loads], ...]
    is_prefetch: bool


@dataclass(frozen=True, slots=True)
class Compute:
    """Compute a task with loaded states.

    Attributes:
      is_own: whether its submitter computes it instead of a worker.
    """

    resident: Resident
    is_own: bool = False

    @property
    def drive(self) -> int:
        return self.resident.task.piece.drive


@dataclass(frozen=True, slots=True)
class Write:
    """Write states of one drive.

    Attributes:
      items: pieces, and their states: a long one, or short ones together.
    """

    drive: int
    items: tuple[tuple[Resident, tuple[int, ...]], ...]


Unit: TypeAlias = Load | Compute | Write


@dataclass(slots=True)
class Limits:
    """Numbers of units that may be under way.

    Attributes:
      moving: loads and writes.
      computing: computations, including those of submitters.
      elsewhere: computations that wait for another processor than the host's.
    """

    moving: int
    computing: int
    elsewhere: int = 0


@dataclass(slots=True)
class MemoryQueue:
    """A memory that drives share: the tasks that wait for it, and the pieces in it.

    Attributes:
      waiting: submitted tasks without memory, each with its number, in order.
      prefetched: pieces whose tasks have not been submitted yet, in order.
      kept: pieces that stay from step to step, between their tasks.
      num_in_use: number of pieces that will free their memory without an eviction:
        those of submitted tasks, and those being prefetched.
      num_writes: number of writes under way, which may free memory.
      refused_bytes: the length of the last refused request; None if memory was freed
        since, or none was refused.
    """

    waiting: deque[tuple[int, Task]] = field(default_factory=deque)
    prefetched: dict[Hashable, Resident] = field(default_factory=dict)
    kept: dict[Hashable, Resident] = field(default_factory=dict)
    num_in_use: int = 0
    num_writes: int = 0
    refused_bytes: int | None = None
