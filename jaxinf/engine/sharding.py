"""Arrays over the JAX devices of this process, and of others.

     process 0:  a b 0 0 ─┐
     process 1:  0 0 c d ─┴─► sum of bits ─► a b c d   on every device that wants it

Invariant: of several replicas of a shard only one counts. Parts that processes hold are
summed as integers, and all but one are zero, so that every bit is kept. Sums are
collectives, which all processes call alike.
"""

import itertools
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxinf.errors import DeviceConfigurationError
from jaxinf.layout import Box
from jaxinf.processes import Group
from jaxinf.store import Shards
from jaxinf.typing import Array

_BITS = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint64}

# --- shards and their holders -------------------------------------------------------


def shard_counts(
    sharding: NamedSharding | None, shape: Sequence[int]
) -> tuple[int, ...]:
    """Returns the number of shards along each dimension; all 1 without a sharding."""
    if sharding is None:
        return (1,) * len(shape)
    local = sharding.shard_shape(tuple(shape))
    lengths = zip(shape, local, strict=True)
    return tuple(whole // part if part else 1 for whole, part in lengths)


def held_shards(sharding: NamedSharding | None, shape: Sequence[int]) -> Shards:
    """Returns the shards of an array, with the processes whose devices have each."""
    if sharding is None:
        return Shards(shard_counts(sharding, shape))
    processes: dict[tuple[int, ...], set[int]] = {}
    for device, index in sharding.devices_indices_map(tuple(shape)).items():
        start = Box.of(index, shape).start
        processes.setdefault(start, set()).add(device.process_index)
    holders = [tuple(sorted(processes[start])) for start in sorted(processes)]
    return Shards(shard_counts(sharding, shape), holders)


def shards_with_origin(leaf: Any) -> list[tuple[tuple[int, ...], Array]]:
    """Returns the shards of an array in this process, of replicas one.

    Each has its origin, the index in the leaf of its first element. The values are
    views if the platform supports them, as a CPU does.
    """
    sharding = getattr(leaf, "sharding", None)
    if not isinstance(sharding, NamedSharding) or sharding.is_fully_replicated:
        array = np.asarray(leaf)
        return [((0,) * array.ndim, array)]
    shards: dict[tuple[int, ...], Any] = {}
    for shard in leaf.addressable_shards:
        shards.setdefault(tuple(s.start or 0 for s in shard.index), shard)
    return [(origin, np.asarray(shard.data)) for origin, shard in shards.items()]


def unused_axes(sharding: NamedSharding | None) -> tuple[str, ...]:
    """Returns the axes of the mesh along which devices have replicas."""
    if sharding is None:
        return ()
    used = set[Any]()
    for entry in sharding.spec:
        used.update(entry if isinstance(entry, tuple) else (entry,))
    return tuple(name for name in sharding.mesh.axis_names if name not in used)


def calling_devices(mesh: Mesh, axes: Sequence[str]) -> Array:
    """Returns whether each device of a mesh calls the host; bool, shaped like the mesh.

    Of the devices that differ along `axes` alone the first of each process calls.
    """
    is_fixed = [name not in axes for name in mesh.axis_names]
    are_calling, seen = np.zeros(mesh.devices.shape, bool), set()
    for place, device in np.ndenumerate(mesh.devices):
        key = tuple(itertools.compress(place, is_fixed)), device.process_index
        are_calling[place] = key not in seen
        seen.add(key)
    return are_calling


def check_processes(group: Group, mesh: Any) -> None:
    """Refuses a run of several processes if its store or mesh is not of all of them.

    Args:
      mesh: The params' mesh, maybe an abstract one; None for one JAX device.
    """
    count, numbers = jax.process_count(), set[int]()
    if count == 1:
        return
    if isinstance(mesh, Mesh):
        numbers = {device.process_index for device in mesh.devices.flat}
    if group.is_alone and (mesh is None or numbers == {jax.process_index()}):
        return
    if group.is_alone:
        raise DeviceConfigurationError(
            f"{group.where}: the params are on a mesh of several processes, and the "
            "store is this process's alone: each gave a path of its own, or it was "
            "opened before jax.distributed.initialize. Call that first, and then "
            "open_store with one path in all processes"
        )
    if missing := sorted(set(range(count)) - numbers):
        where = "none" if not numbers else f"none of process {str(missing)[1:-1]}"
        raise DeviceConfigurationError(
            f"{group.where}: expected params on a mesh with devices of all {count} "
            f"processes, as each has its member of the store, found {where}; put them "
            "on one (jax.device_put with a NamedSharding, PartitionSpec() for "
            "replicated ones), or give shardings=…. To train alone in each process, "
            "give each a path of its own"
        )


# --- arrays that processes hold in parts ----------------------------------------------


def shard_whole(array: Any, sharding: NamedSharding) -> jax.Array:
    """Shards an array that every process has as a whole; no collective."""
    whole = np.asarray(array)
    return jax.make_array_from_callback(whole.shape, sharding, whole.__getitem__)


def sum_bits(value: jax.Array, axes: Sequence[str]) -> jax.Array:
    """Sums bits over devices, all but one zero, so that -0.0 and NaN stay exact."""
    axes = tuple(axes)
    if value.dtype == jnp.bool_:
        return lax.psum(value.astype(jnp.uint8), axes) > 0
    raw = lax.bitcast_convert_type(value, _BITS[value.dtype.itemsize])
    return lax.bitcast_convert_type(lax.psum(raw, axes), value.dtype)


def place_parts(
    sharding: NamedSharding,
    shape: Sequence[int],
    read: Callable[[Sequence[int], Sequence[int]], Array],
) -> jax.Array:
    """Returns an array of the parts that this process holds, for `assemble_shards`.

    `read` takes origin and extent of a box, and gives zeros for what others hold.
    """
    places = sharding.addressable_devices_indices_map(tuple(shape))
    holders: dict[Box, list[Any]] = {}
    for device, index in places.items():
        holders.setdefault(Box.of(index, shape), []).append(device)
    parts = {}
    for box, devices in holders.items():
        part = read(box.start, box.shape)  # one at a time: a process may have many
        parts |= {device: jax.device_put(part, device) for device in devices}
        del part
    ordered = [parts[device] for device in places]
    return jax.make_array_from_single_device_arrays(tuple(shape), sharding, ordered)


def assemble_shards(parts: jax.Array, *, donates: bool = False) -> jax.Array:
    """Returns an array of whole shards, from the parts that each process holds.

    A collective: if a process comes without its parts, the others wait for ever.

    Args:
      parts: The result of `place_parts`.
      donates: Whether XLA may reuse their memory.
    """
    sharding = parts.sharding
    assert isinstance(sharding, NamedSharding)
    if not unused_axes(sharding):
        return parts
    return _compiled_sum(sharding, donates)(parts)


def gather_whole(part: Array) -> Array:
    """Returns the whole of an array, of which every process has a part; blocks."""
    whole = NamedSharding(_one_device_each(), PartitionSpec())
    parts = place_parts(whole, part.shape, lambda origin, extent: part)
    return np.asarray(assemble_shards(parts).addressable_data(0))


def replicas_differ(array: jax.Array, sharding: NamedSharding) -> jax.Array:
    """Whether replicas of a shard have other bits, on all devices alike; traceable."""
    mesh, unused = sharding.mesh, unused_axes(sharding)
    if not unused or array.size == 0:
        return jnp.bool_(False)

    def on_device(shard: jax.Array) -> jax.Array:
        raw = lax.bitcast_convert_type(shard, _BITS[shard.dtype.itemsize]).ravel()
        places = lax.iota(jnp.uint32, raw.size) * jnp.uint32(2654435761)
        digest = jnp.sum((raw.astype(jnp.uint32) + 1) * (places | 1), dtype=jnp.uint32)
        differs = lax.pmax(digest, unused) != lax.pmin(digest, unused)
        return lax.pmax(differs.astype(jnp.int32), mesh.axis_names) > 0

    specs = {"in_specs": (sharding.spec,), "out_specs": PartitionSpec()}
    return jax.shard_map(on_device, mesh=mesh, **specs, check_vma=False)(array)


@cache
def _one_device_each() -> Mesh:
    first: dict[int, Any] = {}
    for device in jax.devices():
        first.setdefault(device.process_index, device)
    return Mesh(np.array([first[n] for n in sorted(first)]), ("process",))


@cache
def _compiled_sum(sharding: NamedSharding, donates: bool) -> Any:
    mesh, axes = sharding.mesh, unused_axes(sharding)
    assert isinstance(mesh, Mesh), "its devices are known"
    counts = calling_devices(mesh, axes)

    def on_device(part: jax.Array) -> jax.Array:
        place = tuple(lax.axis_index(name) for name in mesh.axis_names)
        part = jnp.where(jnp.asarray(counts)[place], part, jnp.zeros_like(part))
        return sum_bits(part, axes)

    specs = {"in_specs": (sharding.spec,), "out_specs": sharding.spec}
    mapped = jax.shard_map(on_device, mesh=mesh, **specs, check_vma=False)
    return jax.jit(mapped, donate_argnums=(0,) if donates else ())
