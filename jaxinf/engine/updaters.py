"""Who computes updates in place of the CSDs: another processor, such as a JAX device.

    subgroup in the CSD's buffer ─► updater ─► the buffer, to be written

Invariant: which subgroups an updater computes changes between steps only. What it is
not given stays with the CSDs, with the same results.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from jaxinf.csd import Csd, CsdBuffer, Extent, UpdateOutcome
from jaxinf.engine.division import staying
from jaxinf.engine.shape import StoreShape
from jaxinf.engine.subgroup_layout import SubgroupLayout
from jaxinf.layout import Subgroup
from jaxinf.program import Kernel
from jaxinf.typing import Array

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

    def check(self, kernel: Kernel, scalars: Sequence[np.generic | Array]) -> None:
        """Compares a kernel with the host's on a sample, once; before its updates.

        Raises:
          JaxinfError: they differ, and nothing was updated.
        """
        ...

    def update(
        self,
        csd: Csd,
        buffer: CsdBuffer,
        extents: Sequence[Extent],
        kernel: Kernel,
        gradient: Array,
        scalars: Sequence[np.generic | Array],
        out: Array | None,
        *,
        given: Array | None = None,
        wants_params: bool = False,
        tells: Collection[int] = (),
        held: dict[int, Any] | None = None,
        puts: Collection[int] = (),
    ) -> UpdateOutcome:
        """Updates a buffer's states in place, as `Csd.update`; blocks.

        Args:
          csd, buffer, extents: the CSD, and its buffer with the states.
          kernel: one that it takes.
          gradient: ``(n,)``, float32 or 16 bits; only read.
          scalars: as for `jaxinf.kernels.CompiledKernel.run`.
          out: as there; None if no result is needed.
          given, wants_params, tells: as for `Csd.update`.
          held: states that stay with the processor, by number, in place of the
            buffer's; those that it reads or computes take their places. None if none
            stays.
          puts: with `held`, the new states that the buffer gets, too.

        Raises:
          StoreError: the processor failed, or has no memory left.
        """
        ...

    def fetch(
        self,
        csd: Csd,
        buffer: CsdBuffer,
        extents: Sequence[Extent],
        held: Mapping[int, Any],
    ) -> None:
        """Copies states that stay with the processor to a buffer, too; blocks.

        Raises:
          StoreError: the processor failed.
        """
        ...


@dataclass(frozen=True)
class Assignment:
    """Which subgroups an updater computes.

    Attributes:
      updater: the updater; None for none.
      every: it computes every so many of the subgroups that it can and whose state
        does not stay with it; 0 for none.
      subgroups: these, and those whose state stays with it.
      stays: the latter.
      tier_bytes: memory for them.
    """

    updater: Updater | None = None
    every: int = 0
    subgroups: frozenset[Subgroup] = frozenset()
    stays: frozenset[Subgroup] = frozenset()
    tier_bytes: int = 0


def assigned(
    shape: StoreShape,
    kernels: Sequence[Kernel],
    updater: Updater,
    every: int,
    tier_bytes: int = 0,
) -> Assignment:
    """Assigns every so many subgroups to an updater, in the order of the store.

    And before them those of whole chunks whose state stays with it.

    Args:
      shape: the store's chunks.
      kernels: the update of each leaf.
      updater: the updater.
      every: 1 for all that it takes; 0 for none.
      tier_bytes: memory of the updater for state that stays.
    """
    chunks: list[list[SubgroupLayout]] = []
    for leaf, kernel in enumerate(kernels):
        for layouts in shape.chunk_layouts(leaf):
            taken = [x for x in layouts if updater.takes(x.kernel_extents, kernel)]
            num_elements = sum(x.subgroup.num_elements for x in taken)
            if num_elements >= LEAST_ELEMENTS and len(taken) == len(layouts):
                chunks.append(taken)
    stays = staying(chunks, tier_bytes)
    found = [
        layout.subgroup
        for chunk in chunks
        for layout in chunk
        if layout.subgroup.num_elements >= LEAST_ELEMENTS
        and layout.subgroup not in stays
    ]
    chosen = stays.union(found[every - 1 :: every] if every else ())
    who = updater if chosen else None
    return Assignment(who, every, chosen, stays, tier_bytes)
