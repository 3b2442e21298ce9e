"""Subgroups that have memory, and what of them is moved together.

Invariant: a state that a task stores is to be written, being written or written; none
is forgotten that somebody waits for, and none is written twice. Nothing here is
thread-safe.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from jaxinf.csd import CsdBuffer
from jaxinf.engine.tasks import Task
from jaxinf.engine.units import Loads

__all__ = ["Batch", "Held", "WriteQueue", "Writes"]

_TOGETHER_BYTES = 4 << 20
_MOST_TOGETHER = 64


@dataclass
class Batch:
    """Short states that are moved together: handing one over takes as long."""

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
class Held:
    """A subgroup that has memory.

    Attributes:
      task: whose loads it has or gets: a submitted one, or one to come.
      buffer: where.
      loaded: the states that are there as the drive has them.
      unchecked: those of them whose checksum is not known yet.
      to_write: the states that nobody has begun to write.
      num_writing: those that somebody is writing.
    """

    task: Task
    buffer: CsdBuffer
    loaded: Loads = ()
    unchecked: Loads = ()
    to_write: tuple[int, ...] = ()
    num_writing: int = 0

    @property
    def missing(self) -> Loads:
        """What the task loads and is not there."""
        return tuple(load for load in self.task.loads if load not in self.loaded)

    @property
    def csd(self) -> int:
        """The number of its CSD."""
        return self.task.layout.subgroup.csd

    def num_bytes(self, states: Collection[int]) -> int:
        """Of these states."""
        return sum(self.task.layout.extents[n].num_bytes for n in states)


Writes: TypeAlias = Sequence[tuple[Held, Sequence[int]]]
"""What is written together: of each subgroup so many states."""


class WriteQueue:
    """Computed subgroups, in order; what is short waits for more of its CSD.

    Args:
      memories: of each CSD, what stands for the memory that its buffers are from.
    """

    def __init__(self, memories: Sequence[int]) -> None:
        self._memories = memories
        self._held: defaultdict[int, deque[Held]] = defaultdict(deque)
        self._due: defaultdict[int, Batch] = defaultdict(Batch)
        self._num_under_way: Counter[int] = Counter()

    def add(self, held: Held) -> None:
        """All that the task stores is to be written."""
        held.to_write = held.task.stores
        self._held[held.csd].append(held)
        self._due[held.csd].add(held.num_bytes(held.to_write), len(held.to_write))

    def due_csd(self, starved: Collection[int], *, is_awaited: bool) -> int | None:
        """The CSD that has most to be written, of those that have enough or must.

        Args:
          starved: memories that somebody waits for.
          is_awaited: whether somebody waits until all is written.
        """
        due = [
            csd
            for csd, batch in self._due.items()
            if batch.is_full
            or (batch.num_states and (is_awaited or self._frees(csd, starved)))
        ]
        return max(due, key=lambda csd: self._due[csd].num_bytes, default=None)

    def _frees(self, csd: int, starved: Collection[int]) -> bool:
        """Whether memory is waited for that no write under way gives back."""
        memory = self._memories[csd]
        return memory in starved and not self._num_under_way[memory]

    def take(self, csd: int) -> Writes:
        """What to write next of a CSD: a long state, or short ones together."""
        held, batch = self._held[csd], Batch()
        writes: list[tuple[Held, Sequence[int]]] = []
        while held and not batch.is_full:
            first, num = held[0], 0
            while num < len(first.to_write) and not batch.is_full:
                batch.add(first.num_bytes(first.to_write[num : num + 1]))
                num += 1
            writes.append((first, first.to_write[:num]))
            first.to_write = first.to_write[num:]
            first.num_writing += num
            if not first.to_write:
                held.popleft()
        self._due[csd].add(-batch.num_bytes, -batch.num_states)
        self._num_under_way[self._memories[csd]] += 1
        return writes

    def written(self, writes: Writes) -> list[Held]:
        """Notes that they are; the subgroups of which that is all."""
        self._num_under_way[self._memories[writes[0][0].csd]] -= 1
        for held, states in writes:
            held.num_writing -= len(states)
        return [h for h, _ in writes if not h.num_writing and not h.to_write]

    def clear(self) -> None:
        """Nothing of it will be written."""
        self._held.clear()
        self._due.clear()
