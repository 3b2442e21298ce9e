"""Stored state that a prologue needs.

The sum of gradients of an ``optax.MultiSteps``, in some steps:

    other micro-steps:  gradient ─► kernel
    last micro-step:    sum ─► prologue (mean, its norm) ─► scalars ─► kernel

All state, for optimizers that reduce over it, such as LAMB.

Invariant: a kernel reads the same slot by itself, so that a prologue gets copies.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from jaxinf.program.state import StateLayout, StateSlot
from jaxinf.typing import AVERAGE, KeyPath


@dataclass(frozen=True)
class Recall:
    """Slots that a prologue needs.

    Attributes:
      slots: The slots, those of a leaf behind those of the leaf before.
      leaves: The leaf of each slot.
      counter: Index in the scalar state of a count. A step whose new count is 0 needs
        the slots; in others finite numbers may take their place. None if each step
        needs them.
    """

    slots: tuple[StateSlot, ...]
    leaves: tuple[int, ...]
    counter: int | None


def recall_all(layout: StateLayout) -> Recall | None:
    """Returns all slots; None without any."""
    pairs = [
        (slot, leaf)
        for leaf, own in enumerate(layout.slots)
        for slot in own
        if slot.name != AVERAGE  # nothing depends on it
    ]
    if not pairs:
        return None
    slots, leaves = zip(*pairs, strict=True)
    return Recall(slots, leaves, None)


def find_recall(layout: StateLayout) -> Recall | None:
    """Returns the sums of an ``optax.MultiSteps`` and its count; None without one."""
    for counter, keys in enumerate(layout.scalar_keys):
        if not keys or keys[-1] != ("field", "mini_step"):
            continue
        prefix = (*keys[:-1], ("field", "acc_grads"))
        slots = [_slot_below(own, layout, prefix) for own in layout.slots]
        if all(slots):
            found = tuple(slot for slot in slots if slot)
            return Recall(found, tuple(range(len(found))), counter)
    return None


def _slot_below(
    slots: Sequence[StateSlot], layout: StateLayout, prefix: KeyPath
) -> StateSlot | None:
    found = (s for s in slots if layout.keys[s.state_index][: len(prefix)] == prefix)
    return next(found, None)
