"""The sharding of a run's arrays over its JAX devices.

Invariant: a run has one mesh or none; arrays that are not sharded are replicated.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from jaxinf.compat import has_explicit_axes_only
from jaxinf.engine import local_shards
from jaxinf.optimizer.callback import AnyMesh
from jaxinf.typing import Array


class Axis(NamedTuple):
    """An axis of a mesh: its position, and its number of devices."""

    number: int
    size: int


Split = tuple[tuple[Axis, ...], ...]
"""The axes that each dimension of an array is sharded over."""


def on_one_mesh(shardings: Sequence[Any]) -> tuple[NamedSharding, ...]:
    """Returns every leaf's sharding on the run's mesh; empty for one JAX device.

    Args:
      shardings: the leaves' shardings; others than ``NamedSharding`` count as
        replicated.

    Raises:
      ValueError: the leaves are on several meshes.
    """
    meshes = {s.mesh for s in shardings if isinstance(s, NamedSharding)}
    meshes = {mesh for mesh in meshes if mesh.size > 1}
    if not meshes:
        return ()
    if len(meshes) > 1:
        raise ValueError(
            f"params are sharded over {len(meshes)} meshes ({meshes}); put all of them "
            "on one"
        )
    replicated = NamedSharding(meshes.pop(), PartitionSpec())
    return tuple(s if isinstance(s, NamedSharding) else replicated for s in shardings)


def traced_shardings(leaves: Sequence[Any]) -> tuple[NamedSharding, ...]:
    """Returns the leaves' shardings as far as a trace knows them; empty otherwise.

    It knows them on meshes whose axes are all explicit.
    """
    seen = [getattr(jax.typeof(leaf), "sharding", None) for leaf in leaves]
    return on_one_mesh(
        [s if s is not None and has_explicit_axes_only(s.mesh) else None for s in seen]
    )


def mesh_of(shardings: Sequence[NamedSharding]) -> AnyMesh | None:
    """Returns the mesh of the leaves; None for one JAX device."""
    return shardings[0].mesh if shardings else None


def split_of(sharding: NamedSharding, ndim: int) -> Split:
    """Returns the axes over which each dimension of an array is sharded."""
    names = list(sharding.mesh.axis_names)
    spec = (*sharding.spec, *[None] * (ndim - len(sharding.spec)))
    entries = [entry if isinstance(entry, tuple) else (entry,) for entry in spec]
    return tuple(
        tuple(
            Axis(names.index(name), sharding.mesh.shape[name])
            for name in entry
            if isinstance(name, str)
        )
        for entry in entries
    )


def unused_axes(mesh: AnyMesh, split: Split) -> tuple[str, ...]:
    """Returns the axes along which devices hold the same shard."""
    used = {axis.number for axes in split for axis in axes}
    return tuple(n for i, n in enumerate(mesh.axis_names) if i not in used)


def axis_indices(mesh: AnyMesh) -> jax.Array:
    """Returns this device's position along each axis, int32; for a ``shard_map``."""
    indices = [lax.axis_index(name) for name in mesh.axis_names]
    return jnp.stack(indices).astype(jnp.int32)


def shard_origin(split: Split, device: Array, shape: Sequence[int]) -> tuple[int, ...]:
    """Returns the index in an array of the first element of a device's shard."""
    origin = []
    for axes, length in zip(split, shape, strict=True):
        position = 0
        for axis in axes:
            position = position * axis.size + int(device[axis.number])
        origin.append(position * length)
    return tuple(origin)


def shard_indices(leaf: Any) -> list[tuple[slice, ...]]:
    """Returns the index of each part of an array in this process; reads nothing."""
    if not isinstance(getattr(leaf, "sharding", None), NamedSharding):
        return [(slice(None),) * len(leaf.shape)]
    return [s.index for s in local_shards(leaf)]
