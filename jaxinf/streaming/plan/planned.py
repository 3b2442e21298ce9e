"""What a step for batches of one shape runs: its calls, and where memory goes.

Invariant: it is decided before anything is written, from the calls alone.
"""

import hashlib
from dataclasses import dataclass

from jaxinf.streaming.plan.calls import Plan
from jaxinf.streaming.plan.leaving import Tiers
from jaxinf.streaming.plan.memory import Division
from jaxinf.streaming.plan.reads import Reading
from jaxinf.transfer.pages import page_ceil


@dataclass(frozen=True)
class Planned:
    """A plan that fits, and what follows from it.

    Attributes:
      division: The memory, without that of values that wait on the host.
      tiers: Where values wait; None if the device's memory is the host's.
      reading: The reads of params; none if all are in memory.
      is_saved: Whether this process keeps its cuts already.
    """

    plan: Plan
    division: Division
    tiers: Tiers | None
    reading: Reading
    is_saved: bool

    @property
    def store_bytes(self) -> int:
        """Memory for the store's buffers."""
        return self.division.ring + self.reading.unused_bytes

    @property
    def away_bytes(self) -> int:
        """Bytes of values that are on drives for a part of a step, at most."""
        slots = self.plan.evictions if self.tiers is None else self.tiers.on_drive
        return sum(page_ceil(self.plan.lives[slot].num_bytes) for slot in slots)

    @property
    def digest(self) -> str:
        """What processes that run its programs together must have in common."""
        read = self.reading.fetches
        fetches = [(*x.unit.place, x.first, x.last, x.stays) for x in read]
        text = repr((self.plan.traced.mesh, self.plan.cuts, fetches))
        return hashlib.sha256(text.encode()).hexdigest()
