"""Computed subgroups that are to be written; short states wait for more of their CSD.

Invariant: states are written in the order in which their subgroups computed, each once.
"""

from collections import deque
from collections.abc import Callable, Sequence

from jaxinf.engine.pipeline.work import Batch, Resident, Write, WriteItem

__all__ = ["WriteQueue"]


class WriteQueue:
    """Plain data: not thread-safe.

    Args:
      memories: of each CSD, the number of the memory that its buffers are from.
    """

    def __init__(self, memories: Sequence[int]) -> None:
        self._memories = memories
        self._residents: list[deque[Resident]] = [deque() for _ in memories]
        self._waiting = [Batch() for _ in memories]
        self._num_under_way = [0] * (max(memories, default=-1) + 1)

    def add(self, resident: Resident) -> None:
        """Queues all that the subgroup's task stores."""
        stores = resident.task.stores
        resident.to_write = stores
        self._residents[resident.task.csd].append(resident)
        self._waiting[resident.task.csd].add(resident.num_bytes(stores), len(stores))

    def due_csd(
        self, is_starved: Callable[[int], bool], *, is_awaited: bool
    ) -> int | None:
        """The CSD with the most bytes waiting, of those worth a request.

        Args:
          is_starved: whether a CSD's memory had no room for a subgroup.
          is_awaited: whether somebody waits until all is written.
        """
        most, most_bytes = None, -1
        for csd, waiting in enumerate(self._waiting):
            if not waiting.num_states or waiting.num_bytes <= most_bytes:
                continue
            if waiting.is_full or is_awaited or self._frees(csd, is_starved):
                most, most_bytes = csd, waiting.num_bytes
        return most

    def _frees(self, csd: int, is_starved: Callable[[int], bool]) -> bool:
        """Whether memory is wanted that no write under way may give back."""
        return is_starved(csd) and not self._num_under_way[self._memories[csd]]

    def next_write(self, csd: int) -> Write:
        """What to write next of a CSD: a long state, or short ones together."""
        batch = Batch()
        items: list[WriteItem] = []
        for resident in self._residents[csd]:
            num_taken = 0
            for state in resident.to_write:
                if batch.is_full:
                    break
                batch.add(resident.num_bytes((state,)))
                num_taken += 1
            if num_taken:
                items.append((resident, resident.to_write[:num_taken]))
            if batch.is_full:
                break
        return Write(csd, tuple(items))

    def begin(self, write: Write) -> None:
        """Takes from the queue what is being written now."""
        residents = self._residents[write.csd]
        for resident, states in write.items:
            assert residents[0] is resident
            resident.to_write = resident.to_write[len(states) :]
            resident.num_writing += len(states)
            num_bytes = resident.num_bytes(states)
            self._waiting[write.csd].add(-num_bytes, -len(states))
            if not resident.to_write:
                residents.popleft()
        self._num_under_way[self._memories[write.csd]] += 1

    def end(self, write: Write) -> list[Resident]:
        """Notes that states are written; the subgroups of which that is all."""
        self._num_under_way[self._memories[write.csd]] -= 1
        for resident, states in write.items:
            resident.num_writing -= len(states)
        return [r for r, _ in write.items if not r.num_writing and not r.to_write]

    def clear(self) -> None:
        """Nothing more of it will be written."""
        for residents in self._residents:
            residents.clear()
        self._waiting = [Batch() for _ in self._memories]
