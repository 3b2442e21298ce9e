"""The shards of an array over the JAX devices of this process.

Invariant: of several replicas of a shard only one counts.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.sharding import NamedSharding

from jaxinf.typing import Array

__all__ = ["distinct_shards", "shard_counts"]


def shard_counts(
    sharding: NamedSharding | None, shape: Sequence[int]
) -> tuple[int, ...]:
    """Returns the number of shards along each dimension; all 1 without a sharding."""
    if sharding is None:
        return (1,) * len(shape)
    local = sharding.shard_shape(tuple(shape))
    pairs = zip(shape, local, strict=True)
    return tuple(whole // part if part else 1 for whole, part in pairs)


def distinct_shards(leaf: Any) -> list[tuple[tuple[slice, ...], Array]]:
    """Yields index and data of each part of an array in this process, replicas once.

    The data are views if the platform supports them, as a CPU does.
    """
    sharding = getattr(leaf, "sharding", None)
    if not isinstance(sharding, NamedSharding) or sharding.is_fully_replicated:
        array = np.asarray(leaf)
        return [((slice(None),) * array.ndim, array)]
    shards = [s for s in leaf.addressable_shards if s.replica_id == 0]
    return [(shard.index, np.asarray(shard.data)) for shard in shards]
