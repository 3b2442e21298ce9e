"""The queue of computed subgroups; short states of a CSD are written together.

Invariant: each state is written once, in the order of the subgroups' computations.
"""

from collections import deque
from collections.abc import Callable, Sequence

from jaxinf.engine.pipeline.work import Batch, Resident, Write, WriteItem


class WriteQueue:
    """Plain data: not thread-safe.

    Args:
      memories: for each CSD, the number of the memory of its buffers.
    """

    def __init__(self, memories: Sequence[int]) -> None:
        self._memories = memories
        self._residents: list[deque[Resident]] = [deque() for _ in memories]
        self._waiting = [Batch() for _ in memories]
        self._num_under_way = [0] * (max(memories, default=-1) + 1)

    def add(self, resident: Resident, states: tuple[int, ...]) -> None:
        resident.to_write = states
        self._residents[resident.task.csd].append(resident)
        self._waiting[resident.task.csd].add(resident.num_bytes(states), len(states))

    def due_csd(
        self,
        is_busy: Callable[[int], bool],
        is_starved: Callable[[int], bool],
        *,
        is_awaited: bool,
    ) -> int | None:
        """Returns the CSD with the most bytes to write, of those with enough.

        Args:
          is_busy: whether a CSD has enough requests under way.
          is_starved: whether a CSD's memory refused a subgroup for lack of room.
          is_awaited: whether a thread waits until all states are written.
        """
        most, most_bytes = None, -1
        for csd, waiting in enumerate(self._waiting):
            if not waiting.num_states or waiting.num_bytes <= most_bytes:
                continue
            if is_busy(csd):
                continue
            if waiting.is_full or is_awaited or self._frees(csd, is_starved):
                most, most_bytes = csd, waiting.num_bytes
        return most

    def _frees(self, csd: int, is_starved: Callable[[int], bool]) -> bool:
        """Whether memory is needed that no write under way may free."""
        return is_starved(csd) and not self._num_under_way[self._memories[csd]]

    def next_write(self, csd: int) -> Write:
        """Returns the next write of a CSD: a long state, or several short ones."""
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
        """Notes that states are written; returns the subgroups with none left."""
        self._num_under_way[self._memories[write.csd]] -= 1
        for resident, states in write.items:
            resident.num_writing -= len(states)
        return [r for r, _ in write.items if not r.num_writing and not r.to_write]

    def clear(self) -> None:
        """Drops all states that wait to be written."""
        for residents in self._residents:
            residents.clear()
        self._waiting = [Batch() for _ in self._memories]
