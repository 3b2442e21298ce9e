"""The shards of an array over the JAX devices of this process, and of others.

Invariant: of several replicas of a shard only one counts.
"""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jaxinf.errors import DeviceConfigurationError
from jaxinf.processes import Group
from jaxinf.typing import Array


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


def has_shared_parts(sharding: NamedSharding, shape: Sequence[int]) -> bool:
    """Whether several processes have devices with the same part of an array."""
    return any(len(own) > 1 for _, _, own in boxes_with_holders(sharding, shape))


def part_holders(
    sharding: NamedSharding, shape: Sequence[int], counts: Sequence[int]
) -> tuple[tuple[int, ...], ...]:
    """Returns the processes that have each part of an array, in C order of the parts.

    Args:
      sharding: on a mesh of devices.
      shape: the array's.
      counts: number of equal parts along each dimension, a multiple of the shards'.
    """
    shards = np.array(shard_counts(sharding, shape), np.int64)
    holders = shard_holders(sharding, shape)
    found = []
    for part in np.ndindex(*counts):
        shard = np.array(part, np.int64) * shards // np.array(counts, np.int64)
        found.append(holders[np.ravel_multi_index(tuple(shard), tuple(shards))])
    return tuple(found)


def callers(mesh: Mesh, axes: Sequence[str]) -> Array:
    """Returns for each device of a mesh whether it calls; bool, shaped like the mesh.

    Of the devices that differ along `axes` alone the first of each process calls.
    """
    along = [number for number, name in enumerate(mesh.axis_names) if name in axes]
    result, seen = np.zeros(mesh.devices.shape, bool), set()
    for place, device in np.ndenumerate(mesh.devices):
        others = tuple(n for axis, n in enumerate(place) if axis not in along)
        key = others, device.process_index
        result[place] = key not in seen
        seen.add(key)
    return result


def check_processes(group: Group, mesh: Any) -> None:
    """Refuses a run of several processes whose store or mesh is not of all of them.

    Args:
      group: the processes that have the store.
      mesh: the params' mesh, maybe of shapes alone; None for one JAX device.

    Raises:
      DeviceConfigurationError: says what to change; nothing was written.
    """
    if jax.process_count() == 1:
        return
    count, path = jax.process_count(), group.where
    if group.is_alone and (mesh is None or _processes(mesh) == {jax.process_index()}):
        return
    if group.is_alone:
        raise DeviceConfigurationError(
            f"{path}: the params are on a mesh of several processes, and the "
            "store is this process's alone: each gave a path of its own, or it was "
            "opened before jax.distributed.initialize. Call that first, and then "
            "open_store with one path in all processes"
        )
    if not isinstance(mesh, Mesh):
        raise DeviceConfigurationError(
            f"{path}: expected params on a mesh of all {count} processes, found "
            f"{'none' if mesh is None else 'a mesh of shapes alone'}; put them on one "
            "first (jax.device_put with a NamedSharding, PartitionSpec() for "
            "replicated ones), or give shardings=…. To train alone in each process, "
            "give each a path of its own"
        )
    missing = sorted(set(range(count)) - _processes(mesh))
    if missing:
        raise DeviceConfigurationError(
            f"{path}: expected a mesh with devices of all {count} processes, as "
            "each has its member of the store, found none of process "
            f"{', '.join(map(str, missing))}"
        )


def _processes(mesh: Any) -> set[int]:
    if not isinstance(mesh, Mesh):
        return set()
    return {device.process_index for device in mesh.devices.flat}


def boxes_with_holders(
    sharding: NamedSharding, shape: Sequence[int]
) -> list[tuple[tuple[int, ...], tuple[int, ...], set[int]]]:
    """Returns origin and extent of each shard, and the processes that have it."""
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
