"""The shards of an array over the JAX devices of this process.

Invariant: of several replicas of a shard only one counts.
"""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from jaxinf.typing import Array

__all__ = ["distinct_shards", "local_shards", "shard_counts", "shard_holders"]


def shard_counts(
    sharding: NamedSharding | None, shape: Sequence[int]
) -> tuple[int, ...]:
    """Returns the number of shards along each dimension; all 1 without a sharding."""
    if sharding is None:
        return (1,) * len(shape)
    local = sharding.shard_shape(tuple(shape))
    pairs = zip(shape, local, strict=True)
    return tuple(whole // part if part else 1 for whole, part in pairs)


def shard_holders(
    sharding: NamedSharding | None, shape: Sequence[int]
) -> tuple[tuple[int, ...], ...]:
    """Returns the processes whose devices have each shard, in C order of the shards.

    Args:
      sharding: on a mesh of devices, not of shapes alone; None for no mesh.
      shape: the array's.
    """
    if sharding is None:
        return ()
    found = boxes_with_holders(sharding, shape)
    return tuple(tuple(sorted(holders)) for _, _, holders in found)


def boxes_with_holders(
    sharding: NamedSharding, shape: Sequence[int]
) -> list[tuple[tuple[int, ...], tuple[int, ...], set[int]]]:
    """Returns origin and extent of each shard, and the processes that have it.

    Args:
      sharding: on a mesh of devices.
      shape: the array's.
    """
    found: dict[tuple[int, ...], tuple[tuple[int, ...], set[int]]] = {}
    for device, index in sharding.devices_indices_map(tuple(shape)).items():
        bounds = [s.indices(n)[:2] for s, n in zip(index, shape, strict=True)]
        extent = tuple(stop - start for start, stop in bounds)
        start = tuple(start for start, _ in bounds)
        found.setdefault(start, (extent, set()))[1].add(device.process_index)
    return [(start, *found[start]) for start in sorted(found)]


def distinct_shards(leaf: Any) -> list[tuple[tuple[slice, ...], Array]]:
    """Yields index and data of each part of an array in this process, replicas once.

    The data are views if the platform supports them, as a CPU does.
    """
    sharding = getattr(leaf, "sharding", None)
    if not isinstance(sharding, NamedSharding) or sharding.is_fully_replicated:
        array = np.asarray(leaf)
        return [((slice(None),) * array.ndim, array)]
    return [(s.index, np.asarray(s.data)) for s in local_shards(leaf)]


def local_shards(leaf: jax.Array) -> list[Any]:
    """Returns each shard that a device of this process has, replicas once."""
    found: dict[tuple[Any, ...], Any] = {}
    for shard in leaf.addressable_shards:
        key = tuple((s.start, s.stop) for s in shard.index)
        found.setdefault(key, shard)
    return list(found.values())
