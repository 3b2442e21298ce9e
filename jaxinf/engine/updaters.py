"""Who computes updates in place of the CSDs: another processor, such as a JAX device.

    subgroup in the CSD's buffer ─► updater ─► the buffer, to be written

Invariant: which subgroups an updater computes changes between steps only. What it is
not given stays with the CSDs, with the same results.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from jaxinf.csd import Csd, CsdBuffer, Extent, Update, UpdateOutcome
from jaxinf.engine.shape import StoreShape
from jaxinf.layout import Subgroup
from jaxinf.program import Kernel

LEAST_ELEMENTS = 1 << 16
"""Shorter subgroups stay with the CSDs: an update of theirs is over before a call of
another processor has begun."""


class Updater(Protocol):
    """Computes updates of subgroups that are in a host CSD's buffers. Thread-safe."""

    @property
    def num_at_once(self) -> int:
        """Number of updates to run at once, each on a thread that waits for it."""
        ...

    def takes(self, extents: Sequence[Extent], kernel: Kernel) -> bool:
        """Whether it can compute a kernel on states of this form."""
        ...

    def update(
        self, csd: Csd, buffer: CsdBuffer, update: Update, *, wants_out: bool = True
    ) -> UpdateOutcome:
        """Updates a buffer's states in place, as `Csd.update`; blocks.

        Args:
          csd, buffer: the CSD, and its buffer with the states.
          update: of a kernel that it takes, and a gradient that is not sparse.
          wants_out: whether the result is needed.

        Raises:
          StoreError: the processor failed, or has no memory left.
        """
        ...


@dataclass(frozen=True)
class Assignment:
    """Which subgroups an updater computes.

    Attributes:
      updater: the updater; None for none.
      every: it computes every so many of the subgroups that it can; 0 for none.
      subgroups: these.
    """

    updater: Updater | None = None
    every: int = 0
    subgroups: frozenset[Subgroup] = frozenset()


def assigned(
    shape: StoreShape, kernels: Sequence[Kernel], updater: Updater, every: int
) -> Assignment:
    """Assigns every so many subgroups to an updater, in the order of the store.

    Args:
      shape: the store's chunks.
      kernels: the update of each leaf.
      updater: the updater.
      every: 1 for all that it takes; 0 for none.
    """
    found: list[Subgroup] = []
    for leaf, kernel in enumerate(kernels):
        for layouts in shape.chunk_layouts(leaf):
            if all(updater.takes(x.kernel_extents, kernel) for x in layouts):
                own = (layout.subgroup for layout in layouts)
                found += (x for x in own if x.num_elements >= LEAST_ELEMENTS)
    chosen = frozenset(found[every - 1 :: every] if every else ())
    return Assignment(updater if chosen else None, every, chosen)
