"""Arrays that several processes hold in parts: put together, and compared.

     process 0:  a b 0 0 ─┐
     process 1:  0 0 c d ─┴─► sum of bits ─► a b c d   on every device that wants it

Invariant: parts are summed as integers, and all but one are zero, so that every bit is
kept. All processes call these functions alike, since they are collectives.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxinf import compat
from jaxinf.engine.sharding import callers
from jaxinf.typing import Array

_ReadBox: TypeAlias = Callable[[Sequence[int], Sequence[int]], Array]
"""Reads a box, by its origin and extent, with zeros in place of what others hold."""

_BITS = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint64}


def sum_bits(value: jax.Array, axes: Sequence[str]) -> jax.Array:
    """Sums bits over devices, all but one zero, so that -0.0 and NaN stay exact."""
    axes = tuple(axes)
    if value.dtype == jnp.bool_:
        return lax.psum(value.astype(jnp.uint8), axes) > 0
    raw = lax.bitcast_convert_type(value, _BITS[value.dtype.itemsize])
    return lax.bitcast_convert_type(lax.psum(raw, axes), value.dtype)


def own_parts(
    sharding: NamedSharding, shape: Sequence[int], dtype: np.dtype, read: _ReadBox
) -> list[jax.Array]:
    """Reads what this process holds of an array onto its devices.

    Args:
      sharding: the array's, on a mesh of all processes.
    """
    seen, own = set(), []
    for device, index in sharding.addressable_devices_indices_map(tuple(shape)).items():
        assert index is not None
        bounds = [s.indices(n)[:2] for s, n in zip(index, shape, strict=True)]
        extent = [stop - start for start, stop in bounds]
        if tuple(bounds) in seen:
            part = np.zeros(extent, dtype)
        else:
            seen.add(tuple(bounds))
            part = read([start for start, _ in bounds], extent)
        own.append(jax.device_put(part, device))
    return own


def gathered_replicas(
    sharding: NamedSharding, shape: Sequence[int], own: Sequence[jax.Array]
) -> jax.Array:
    """Makes an array whose shards their holders have in parts, the `own_parts`; blocks.

    No process may come without its parts: the others would wait for ever.
    """
    parts = jax.make_array_from_single_device_arrays(tuple(shape), sharding, own)
    unused = _unused_axes(sharding)
    return _summed(sharding, unused)(parts) if unused else parts


def put_together(parts: jax.Array, *, donates: bool = False) -> jax.Array:
    """Puts shards together whose replicas have what their process has, else zeros.

    Args:
      parts: the array; its sharding is on a mesh of all processes.
      donates: whether its memory is reused.
    """
    return _together(parts.sharding, donates)(parts)


def gathered_whole(part: Array) -> Array:
    """Returns an array of which every process has a part, in every process; blocks.

    No process may come without its part: the others would wait for ever.
    """
    mesh = _one_device_each()
    sharding = NamedSharding(mesh, PartitionSpec("process"))
    own = jax.device_put(part[None], mesh.local_devices[0])
    shape = (mesh.size, *part.shape)
    parts = jax.make_array_from_single_device_arrays(shape, sharding, [own])
    whole = _summed(sharding, ("process",))(parts)
    return np.asarray(whole.addressable_data(0))[0]


def replicas_differ(array: jax.Array, sharding: NamedSharding) -> jax.Array:
    """Whether replicas of a shard have other bits, by a checksum; traceable.

    Returns:
      bool, the same on all devices.
    """
    mesh, unused = sharding.mesh, _unused_axes(sharding)
    if not unused or array.size == 0:
        return jnp.bool_(False)

    def on_device(shard: jax.Array) -> jax.Array:
        raw = lax.bitcast_convert_type(shard, _BITS[shard.dtype.itemsize]).ravel()
        places = lax.iota(jnp.uint32, raw.size) * jnp.uint32(2654435761)
        found = jnp.sum((raw.astype(jnp.uint32) + 1) * (places | 1), dtype=jnp.uint32)
        differs = lax.pmax(found, unused) != lax.pmin(found, unused)
        return lax.pmax(differs.astype(jnp.int32), mesh.axis_names) > 0

    whole = PartitionSpec()
    checked = compat.shard_map(
        on_device, mesh=mesh, in_specs=(sharding.spec,), out_specs=whole
    )
    return checked(array)


@cache
def _one_device_each() -> Mesh:
    first: dict[int, Any] = {}
    for device in jax.devices():
        first.setdefault(device.process_index, device)
    return Mesh(np.array([first[n] for n in sorted(first)]), ("process",))


@cache
def _together(sharding: NamedSharding, donates: bool) -> Any:
    """Returns a compiled `put_together`: of a process's replicas the first counts."""
    mesh = sharding.mesh
    assert isinstance(mesh, Mesh), "its devices are known"
    axes = _unused_axes(sharding)
    counts = callers(mesh, axes)

    def on_device(part: jax.Array) -> jax.Array:
        place = tuple(lax.axis_index(name) for name in mesh.axis_names)
        own = jnp.where(jnp.asarray(counts)[place], part, jnp.zeros_like(part))
        return sum_bits(own, axes)

    spec = sharding.spec
    mapped = compat.shard_map(on_device, mesh=mesh, in_specs=(spec,), out_specs=spec)
    return jax.jit(mapped, donate_argnums=(0,) if donates else ())


@cache
def _summed(sharding: NamedSharding, axes: tuple[str, ...]) -> Any:
    """Returns a compiled sum over axes; the first process's place gets it, too."""
    mapped = compat.shard_map(
        lambda part: sum_bits(part, axes),
        mesh=sharding.mesh,
        in_specs=(sharding.spec,),
        out_specs=sharding.spec,
    )
    return jax.jit(mapped)


def _unused_axes(sharding: NamedSharding) -> tuple[str, ...]:
    """Returns the axes of the mesh along which devices have replicas."""
    used = {name for entry in sharding.spec for name in _names(entry)}
    return tuple(name for name in sharding.mesh.axis_names if name not in used)


def _names(entry: Any) -> tuple[str, ...]:
    if entry is None:
        return ()
    return entry if isinstance(entry, tuple) else (entry,)
