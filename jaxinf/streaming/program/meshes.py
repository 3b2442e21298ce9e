"""The JAX devices of a streamed program: one mesh or none, and its inputs' shardings.

Invariant: with a mesh, every input of a program is sharded over it, and an input
without a sharding is replicated.
"""

import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from itertools import chain
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxinf import compat
from jaxinf.errors import StreamError
from jaxinf.program import path_name
from jaxinf.typing import PyTree


def sharding_of(name: str, leaf: Any) -> NamedSharding | None:
    """Returns an array's NamedSharding; None on one device, or else StreamError."""
    sharding = getattr(leaf, "sharding", None)
    if sharding is None or isinstance(leaf, compat.Tracer):
        return None
    if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh):
        if sharding.mesh.size == 1:
            return None
        return NamedSharding(sharding.mesh, sharding.spec)
    if len(getattr(sharding, "device_set", ())) == 1:
        return None
    raise StreamError(
        f"jaxinf.stream: expected arrays on one device, or with a NamedSharding, found "
        f"{name} with {sharding}; put it on the mesh (jax.device_put(x, "
        "NamedSharding(mesh, PartitionSpec(…))))"
    )


def mesh_of(params: PyTree, batch: PyTree = None) -> Mesh | None:
    """Returns the mesh of arrays, else of `jax.set_mesh`; refuses two: StreamError."""
    meshes: dict[Mesh, str] = {}  # with the name of the first array on each
    for whole, tree in (("params", params), ("the batch", batch)):
        for path, leaf in jax.tree.leaves_with_path(tree):
            name = path_name(path, whole)
            sharding: Any = sharding_of(name, leaf)
            if sharding is not None:
                meshes.setdefault(sharding.mesh, name)
    if len(meshes) > 1:
        (mesh, name), (other_mesh, other_name), *_ = meshes.items()
        raise StreamError(
            f"jaxinf.stream: expected arrays on one mesh, found {name} on "
            f"{mesh_text(mesh)} and {other_name} on {mesh_text(other_mesh)}; put all "
            "params and the batch on one"
        )
    mesh = next(iter(meshes), compat.mesh_in_use())
    return mesh if mesh.size > 1 else None


def outside_mesh() -> Any:
    """Leaves ``jax.set_mesh``, in which small arrays would go to all its devices."""
    return nullcontext() if compat.mesh_in_use().empty else jax.set_mesh(None)


def default_device() -> Any:
    (device,) = jax.device_put(np.zeros(())).devices()
    return device


def is_sharded(leaf: Any) -> bool:
    is_known = isinstance(leaf, jax.Array) and not isinstance(leaf, compat.Tracer)
    return is_known and len(leaf.devices()) > 1


def on_one_device(leaf: Any) -> Any:
    return jax.device_put(leaf, default_device()) if is_sharded(leaf) else leaf


def on_this_process(leaf: jax.Array) -> jax.Array:
    return leaf if leaf.is_fully_addressable else leaf.addressable_data(0)


def mesh_in_program(closed: Any, known: Mesh | None) -> Mesh | None:
    """Returns the known mesh or one that a program sets; refuses two: StreamError."""
    values = (v for eqn in compat.all_equations(closed) for v in eqn.params.values())
    params = (v if isinstance(v, (tuple, list)) else (v,) for v in values)
    for mesh in (getattr(x, "mesh", x) for x in chain.from_iterable(params)):
        if not (isinstance(mesh, Mesh) and mesh.size > 1):
            continue
        known = mesh if known is None else known
        if tuple(mesh.devices.flat) != tuple(known.devices.flat):
            raise StreamError(
                "jaxinf.stream: expected a function on the mesh of its arguments, "
                f"{mesh_text(known)}, found one that uses {mesh_text(mesh)}; make both "
                "of the same devices, in the same order"
            )
    return known


def on_mesh(leaves: Sequence[Any], mesh: Mesh | None) -> list[jax.ShapeDtypeStruct]:
    """Returns abstract values with shardings; those without one are replicated."""
    if mesh is None:
        return list(leaves)
    replicated = NamedSharding(mesh, PartitionSpec())
    return [
        leaf if leaf.sharding is not None else leaf.update(sharding=replicated)
        for leaf in leaves
    ]


def sharded_like(avals: PyTree, shardings: PyTree) -> PyTree:
    """Returns abstract values with the shardings of a tree; None for one device.

    Raises:
      StreamError: The trees differ.
      ValueError: A leaf does not divide evenly.
    """
    if shardings is None:
        return avals
    leaves, tree = jax.tree.flatten(shardings)
    are_named = all(isinstance(leaf, NamedSharding) for leaf in leaves)
    if tree != jax.tree.structure(avals) or not are_named:
        raise StreamError(
            "shardings: expected a NamedSharding for each leaf of the params, in a "
            f"tree {jax.tree.structure(avals)}, found {tree}"
        )

    def sharded(leaf: jax.ShapeDtypeStruct, sharding: NamedSharding) -> Any:
        sharding.shard_shape(leaf.shape)  # or it refuses
        return leaf.update(sharding=sharding)

    return jax.tree.map(sharded, avals, shardings)


def without_shardings(avals: PyTree) -> PyTree:
    return jax.tree.map(lambda leaf: leaf.update(sharding=None), avals)


def struct(aval: Any, sharding: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(
        aval.shape, aval.dtype, weak_type=aval.weak_type, sharding=sharding
    )


def typed_sharding(aval: Any) -> Any:
    """Returns the sharding in an abstract value, on a mesh with explicit axes."""
    sharding = getattr(aval, "sharding", None)
    if sharding is None or sharding.mesh.empty:
        return None
    return sharding if any(spec is not None for spec in sharding.spec) else None


def item_aval(aval: Any) -> Any:
    """Returns the abstract value of an element along the leading axis."""
    sharding = typed_sharding(aval)
    if sharding is None:
        return aval.update(shape=aval.shape[1:])
    spec = PartitionSpec(*tuple(sharding.spec)[1:])
    return aval.update(shape=aval.shape[1:], sharding=sharding.update(spec=spec))


def mesh_text(mesh: Mesh | Mapping[str, int] | None) -> str:
    """Describes a mesh, or the sizes of its axes: "4 devices (data=2, model=2)"."""
    sizes = mesh.shape if isinstance(mesh, Mesh) else mesh
    if not sizes:
        return "one device"
    axes = ", ".join(f"{name}={size}" for name, size in sizes.items())
    return f"{math.prod(sizes.values())} devices ({axes})"
