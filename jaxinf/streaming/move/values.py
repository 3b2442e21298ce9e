"""The values of a step between the calls that make and read them.

    call a makes v ─► … ─► evict ─► … ─► evicted ─► … ─► prefetch ─► call b reads v
                                    memory is free in between

Invariant: a value that was away has the bits that it left with.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import jax

from jaxinf import compat
from jaxinf.streaming.move.mover import Mover, MoverCounts, drive_threads
from jaxinf.streaming.move.scratch import Place, Scratch
from jaxinf.streaming.move.tensors import Evicted
from jaxinf.streaming.plan.calls import Plan, Slot
from jaxinf.streaming.plan.offload import NUM_COPIES, Tiers
from jaxinf.streaming.program.lifetimes import Stay, occupancy
from jaxinf.streaming.program.meshes import default_device


class Values:
    """Holds values, those in memory and those elsewhere. Used from one thread.

    Args:
      plan: The calls of a step, which say when values are absent; by default all
        values stay in memory.
      scratch: Files for values on drives, closed with this; without folders if no
        value goes there.
      tiers: Where values wait that leave a device with memory of its own; None if its
        memory is the host's, and they wait on drives.

    Attributes:
      num_bytes: Bytes that are written to drives in a step, and read again; at most, as
        a value that is still on its way out comes back from memory.
    """

    def __init__(
        self,
        plan: Plan | None = None,
        scratch: Scratch | None = None,
        tiers: Tiers | None = None,
    ) -> None:
        self._scratch = Scratch(()) if scratch is None else scratch
        assert tiers is None or not tiers.least_bytes, "the host has room"
        evictions = {} if plan is None else plan.evictions
        lives = {} if plan is None else plan.lives
        self._order = tiers.on_drive if tiers else ()
        self._places = {
            slot: self._scratch.allocate(lives[slot].num_bytes)
            for slot in (self._order if tiers else evictions)
        }
        self._scratch.reserve()
        self._num_copies = NUM_COPIES if tiers else 0
        self._room: Sequence[int] = tiers.room if tiers else ()
        self._mover = Mover(
            drive_threads(self._scratch.num_drives),
            has_link=tiers is not None,
            read_bytes=max(tiers.room, default=0)
            if tiers
            else _most_back(plan, self._places),
            way_bytes=tiers.leaving_bytes if tiers else 0,
            registry=compat.memory_registry(default_device()) if tiers else None,
        )
        self.num_bytes = sum(place.num_bytes for place in self._places.values())
        in_order = sorted(evictions.items(), key=lambda item: item[1].needed)
        first_gone = sorted(in_order, key=lambda item: item[1].gone)
        self._leaving = _by_call((slot, one.written) for slot, one in first_gone)
        self._gone = _by_call((slot, one.gone) for slot, one in in_order)
        self._back = _by_call((slot, one.back) for slot, one in in_order)
        self._ends = _by_call((s, lives[s].takers[-1]) for s in evictions)
        self._held: dict[Slot, jax.Array] = {}
        self._away: set[Slot] = set()
        self.reset()

    def __getitem__(self, slot: Slot) -> jax.Array:
        """Returns a value; blocks until it is back.

        Raises:
          StoreIOError: The drive failed.
        """
        if slot in self._away and slot not in self._held:
            self._held[slot] = self._mover.get(slot)
        return self._held[slot]

    def before(self, number: int) -> None:
        """Makes ready what the call of that number needs; may block.

        It waits for values that must be gone, and lets others come back.
        """
        if self._room:
            self._mover.read_ahead(self._room[number])
        for slot in self._gone.get(number, ()):
            self._mover.wait_evicted(slot)
            del self._held[slot]
            self._away.add(slot)
        for slot in self._back.get(number, ()):
            self._mover.prefetch(slot)

    def put(self, slots: Sequence[Slot | None], outputs: Sequence[jax.Array]) -> None:
        """Takes a call's outputs, those that have a slot."""
        for slot, output in zip(slots, outputs, strict=True):
            if slot is not None:
                self._held[slot] = output

    def after(self, number: int, drops: Sequence[Slot]) -> None:
        """Drops what no call after that of this number reads; lets others leave."""
        for slot in drops:
            del self._held[slot]
        for slot in self._leaving.get(number, ()):
            place = self._places.get(slot, Place(()))
            way_bytes = self._num_copies * place.num_bytes
            self._mover.evict(
                Evicted(
                    slot,
                    value=self._held[slot],
                    way_bytes=way_bytes,
                    scratch=self._scratch,
                    place=place,
                )
            )

    def done(self, number: int) -> None:
        """Frees memory that the call of that number was the last to read; may block."""
        for slot in self._ends.get(number, ()):
            self._away.discard(slot)
            self._mover.release(slot)

    def reset(self) -> None:
        """Drops everything; no call may be under way. Blocks until no value moves."""
        self._held.clear()
        self._away.clear()
        self._mover.reset(self._order)
        self._mover.rest()  # it goes back to the system between steps

    def counts(self) -> MoverCounts:
        """Returns the traffic of values since the last call."""
        return self._mover.take_counts()

    def close(self) -> None:
        """Frees memory and files, and ends the threads; idempotent."""
        self.reset()
        self._mover.close()
        self._scratch.close()


def _by_call(pairs: Iterable[tuple[Slot, int]]) -> Mapping[int, list[Slot]]:
    found: defaultdict[int, list[Slot]] = defaultdict(list)
    for slot, number in pairs:
        found[number].append(slot)
    return found


def _most_back(plan: Plan | None, places: Mapping[Slot, Place]) -> int:
    """The most memory, in whole pages, of values that have come back."""
    if plan is None:
        return 0
    stays = (
        Stay(
            plan.evictions[slot].back,
            plan.lives[slot].takers[-1] + 2,
            place.num_bytes,
        )
        for slot, place in places.items()
    )
    return int(occupancy(len(plan.calls) + 1, stays).max(initial=0))
