"""The first step of a store: each leaf is made, written, and dropped.

Invariant: nothing is written before the leaves and the program are known to fit.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import TypeAlias

from jaxinf.csd import ScalarInputs
from jaxinf.engine import StoreDescription, Training
from jaxinf.streaming.budgets import planned_within
from jaxinf.streaming.plan.agreement import Together
from jaxinf.typing import Array

__all__ = ["INIT_SHARE", "Shard", "planned_leaves", "write_leaf"]

# Part of the memory that the store's buffers take while the first step is made.
INIT_SHARE = 4

Shard: TypeAlias = tuple[tuple[slice, ...], Array]
"""A part of a leaf: its index, and its numbers."""


def planned_leaves(
    budgets: Mapping[str, int],
    leaves: Callable[[int], Iterable[Iterable[Shard]]],
    check: Callable[[Mapping[str, int]], object] | None,
    together: Together,
) -> Iterable[Iterable[Shard]]:
    """Returns the leaves to be made, if they and the program fit in memory.

    Args:
      budgets: Memory, by argument.
      leaves: Returns the shards of each leaf, made in so many bytes.
      check: Plans the program within budgets, or raises; None if it is not known.
      together: The processes that make the store.

    Raises:
      BudgetError: Memory does not suffice; names a budget that does.
    """

    def plan(budgets: Mapping[str, int]) -> Iterable[Iterable[Shard]]:
        whole = budgets["memory_bytes"]
        device_bytes = budgets.get("device_memory_bytes") or whole
        made_bytes = min(device_bytes, whole - whole // INIT_SHARE)
        made = together.call("the first params", lambda: leaves(made_bytes))
        if check is not None:
            check(budgets)
        return made

    return planned_within(budgets, plan, searches=together.is_alone)


def write_leaf(
    training: Training,
    description: StoreDescription,
    leaf: int,
    shards: Iterable[Shard],
    inputs: ScalarInputs,
) -> None:
    """Writes a leaf's params and its first state; blocks."""
    for index, shard in shards:
        origin = [dim.start or 0 for dim in index]
        training.initialise(description, leaf, shard, origin, inputs)
