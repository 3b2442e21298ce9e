"""The first step of a store: each leaf, or shard of one, is made, written, dropped.

Invariant: nothing is written before the leaves and the program are known to fit.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import optax
from jax.sharding import Mesh

from jaxinf.csd import ScalarInputs
from jaxinf.engine import (
    Engine,
    FirstParams,
    StoreDescription,
    describe,
    part_holders,
)
from jaxinf.program import UpdateProgram, trace_init
from jaxinf.streaming.plan.options import Options
from jaxinf.streaming.planning import within
from jaxinf.streaming.program.graph import Piece
from jaxinf.streaming.program.initial import BUFFERS_SHARE, Shard
from jaxinf.streaming.program.meshes import mesh_of, on_mesh, without_shardings
from jaxinf.streaming.program.units import part_counts
from jaxinf.streaming.update.optimizer import passes_for
from jaxinf.typing import PyTree

MakeLeaves: TypeAlias = Callable[[int], Iterable[Iterable[Shard]]]
"""Returns the shards of each leaf, made in so many bytes."""


def described(
    tx: optax.GradientTransformation,
    options: Options,
    update: UpdateProgram,
    avals: PyTree,
    pieces: Sequence[Piece],
) -> tuple[Any, StoreDescription]:
    """Returns the optimizer's first state, traced, and the store that suits a program.

    Args:
      avals: Shapes, dtypes and shardings of the params.

    Raises:
      UnsupportedTransformError: The optimizer needs too much of all leaves.
    """
    is_alone = options.together.group.is_alone
    passes_for(update, pieces, is_alone=is_alone)
    first, held = trace_init(tx, without_shardings(avals)), jax.tree.leaves(avals)
    compress, counts = options.compress, part_counts(held, pieces)
    description = describe(
        update,
        first,
        counts,
        average=options.average,
        compression=compress,
        holders=() if is_alone else _holders(held, counts, mesh_of(avals)),
    )
    return first, description


def _holders(
    leaves: Sequence[jax.ShapeDtypeStruct],
    counts: Sequence[tuple[int, ...]],
    mesh: Mesh | None,
) -> list[tuple[tuple[int, ...], ...]]:
    """Returns the processes that have each part of each leaf."""
    return [
        part_holders(leaf.sharding, leaf.shape, own)
        for leaf, own in zip(on_mesh(leaves, mesh), counts, strict=True)
    ]


def planned_leaves(
    options: Options,
    leaves: MakeLeaves,
    check: Callable[[Mapping[str, int]], object] | None,
) -> Iterator[Iterable[Shard]]:
    """Returns the leaves to be made, if they and the program fit in memory.

    Args:
      check: Plans the program within budgets, or raises; None if it is not known.

    Raises:
      BudgetError: Memory does not suffice; names a budget that does.
    """

    def plan(budgets: Mapping[str, int]) -> Iterator[Iterable[Shard]]:
        host_bytes = budgets["memory_bytes"]
        device_bytes = budgets.get("device_memory_bytes") or host_bytes
        made_bytes = min(device_bytes, host_bytes)
        made = options.together.group.in_all(
            "the first params", lambda: leaves(made_bytes)
        )
        if check is not None:
            check(budgets)
        return iter(made)

    return within(options, plan)


def write_leaf(
    engine: Engine,
    description: StoreDescription,
    leaf: int,
    inputs: ScalarInputs,
    made: Iterator[Iterable[Shard]],
    memory_bytes: int,
) -> None:
    """Makes the next leaf, and writes its params and first state; blocks."""
    opened = engine.opened
    opened.mover.drain()
    opened.fleet.limit_memory(0)  # idle buffers leave the leaf their memory
    shards = next(made)
    opened.limit_memory(memory_bytes // BUFFERS_SHARE)
    for index, shard in shards:
        origin = [dim.start or 0 for dim in index]
        given = FirstParams(leaf, shard, origin, inputs)
        engine.initialise(description, [given])
