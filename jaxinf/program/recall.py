"""Stored state that a prologue needs: the sum of gradients of an ``optax.MultiSteps``.

    other micro-steps:  gradient ─► kernel
    last micro-step:    sum ─► prologue (mean, its norm) ─► scalars ─► kernel

Invariant: a kernel reads the same slot by itself, so that a prologue gets copies.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from jaxinf.program.state import StateLayout, StateSlot
from jaxinf.typing import KeyPath

__all__ = ["Recall", "find_recall"]


@dataclass(frozen=True)
class Recall:
    """A slot of each leaf that a prologue needs in some steps.

    Attributes:
      slots: The slot of each leaf.
      counter: Index in the scalar state of a count. A step whose new count is 0 needs
        the slots; in others finite numbers may take their place.
    """

    slots: tuple[StateSlot, ...]
    counter: int


def find_recall(layout: StateLayout) -> Recall | None:
    """Returns the sums of an ``optax.MultiSteps`` and its count; None without one."""
    for counter, keys in enumerate(layout.scalar_keys):
        if not keys or keys[-1] != ("field", "mini_step"):
            continue
        prefix = (*keys[:-1], ("field", "acc_grads"))
        slots = [_slot_below(own, layout, prefix) for own in layout.slots]
        if all(slots):
            return Recall(tuple(slot for slot in slots if slot), counter)
    return None


def _slot_below(
    slots: Sequence[StateSlot], layout: StateLayout, prefix: KeyPath
) -> StateSlot | None:
    found = (s for s in slots if layout.keys[s.state_index][: len(prefix)] == prefix)
    return next(found, None)
