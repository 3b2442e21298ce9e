"""Leaves that are handed over whole, since the store's chunks do not divide at shards.

A trace of `init` does not know the shardings that ``jit(init, out_shardings=…)`` gives
its results, so the store is made for whole leaves. Invariant: the program's arrays keep
their own shardings; only the calls of the host see others.
"""

import itertools
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from jaxinf.engine import Store, shard_counts

__all__ = ["moved", "stored_shardings"]


def stored_shardings(
    store: Store, shardings: tuple[NamedSharding, ...], leaves: Sequence[jax.Array]
) -> tuple[NamedSharding, ...]:
    """Returns the shardings in which leaves can be handed over.

    Args:
      store: the store; one that is not made yet divides as needed.
      shardings: the leaves' own; empty for one JAX device.
      leaves: the params' leaves.

    Returns:
      The same, with replicated leaves where the chunks do not divide at the shards.
    """
    if store.training.commit is None:
        return shardings
    if len(store.manifest.leaves) != len(leaves):
        return shardings  # refused where the store is bound
    return tuple(
        sharding
        if _divides(store, number, sharding, leaves[number].shape)
        else NamedSharding(sharding.mesh, PartitionSpec())
        for number, sharding in enumerate(shardings)
    )


def moved(
    arrays: Sequence[Any],
    present: Sequence[NamedSharding],
    wanted: Sequence[NamedSharding],
) -> list[Any]:
    """Returns arrays in other shardings; None stays None. Traceable."""
    if tuple(present) == tuple(wanted):
        return list(arrays)
    return [
        array if array is None or now == then else jax.sharding.reshard(array, then)
        for array, now, then in zip(arrays, present, wanted, strict=True)
    ]


def _divides(
    store: Store, leaf: int, sharding: NamedSharding, shape: tuple[int, ...]
) -> bool:
    local = sharding.shard_shape(shape)
    return all(
        store.training.opened.divides(
            leaf, [n * extent for n, extent in zip(place, local, strict=True)], local
        )
        for place in itertools.product(*map(range, shard_counts(sharding, shape)))
    )
