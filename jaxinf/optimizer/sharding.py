"""How a run's arrays are spread over its JAX devices.

Invariant: a run has one mesh or none; what is not sharded over it is replicated.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxinf.typing import Array

__all__ = ["distinct_shards", "on_one_mesh", "shard_counts"]


def on_one_mesh(shardings: Sequence[Any]) -> list[NamedSharding]:
    """Every leaf's sharding on the run's mesh; empty where it has one JAX device.

    Args:
      shardings: of each leaf; what is no ``NamedSharding`` counts as replicated.

    Raises:
      ValueError: the leaves are on several meshes.
    """
    meshes = {s.mesh for s in shardings if isinstance(s, NamedSharding)}
    meshes = {mesh for mesh in meshes if mesh.size > 1}
    if not meshes:
        return []
    if len(meshes) > 1:
        raise ValueError(
            f"params are sharded over {len(meshes)} meshes ({meshes}); put all of them "
            "on one"
        )
    replicated = NamedSharding(meshes.pop(), PartitionSpec())
    return [s if isinstance(s, NamedSharding) else replicated for s in shardings]


def shard_counts(
    sharding: NamedSharding | None, shape: Sequence[int]
) -> tuple[int, ...]:
    """Shards along each dimension of a leaf; all 1 without a sharding."""
    if sharding is None:
        return (1,) * len(shape)
    local = sharding.shard_shape(tuple(shape))
    pairs = zip(shape, local, strict=True)
    return tuple(whole // part if part else 1 for whole, part in pairs)


def distinct_shards(leaf: Any) -> list[tuple[tuple[slice, ...], Array]]:
    """Index and data of each part of an array that this process holds, replicas once.

    The data are views where the platform gives them (a CPU does).
    """
    sharding = getattr(leaf, "sharding", None)
    if not isinstance(sharding, NamedSharding) or sharding.is_fully_replicated:
        array = np.asarray(leaf)
        return [((slice(None),) * array.ndim, array)]
    shards = [s for s in leaf.addressable_shards if s.replica_id == 0]
    return [(shard.index, np.asarray(shard.data)) for shard in shards]
