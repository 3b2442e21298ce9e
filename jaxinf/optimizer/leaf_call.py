"""Builds and sends a leaf's call of the host, and decodes it there.

    LeafCall ─► compress ─► callback ─► LeafCall ─► UpdateRequest
    of JAX arrays, where the gradient is │ of NumPy arrays, on the host

Invariant: all data of a leaf for the host is in one pytree. Values that are known when
  a step is traced are part of its structure, not operands. A run has one mesh or none;
  arrays that are not sharded are replicated.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from jaxinf import compat
from jaxinf.csd import ScalarInputs
from jaxinf.engine import (
    KeptLeaf,
    LeafDescription,
    StoreDescription,
    UpdateRequest,
    local_shards,
)
from jaxinf.optimizer.callback import AnyMesh, GuardedHost, call_host, call_owner
from jaxinf.program import LeafInputs
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
        [s if s is not None and s.mesh.are_all_axes_explicit else None for s in seen]
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


FINITE, NON_FINITE = 0, 1
"""Status of a leaf's call; or `callback.FAILED`."""

GO, HOLD, HOLD_NON_FINITE = 0, 1, 2
"""Gate of a leaf's call: it may update, or must not, the last because of this leaf."""

_NUM_PROBED = 8
_REPLICATED = ("gate", "probe")
_STATIC = ("number", "split", "scalars", "kept")


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("gradient", "params", "inputs", "feedback", "gate", "probe"),
    meta_fields=_STATIC,
)
@dataclass(frozen=True)
class LeafCall:
    """The data of a leaf for the host; on a mesh, each JAX device sends its shard's.

    Attributes:
      split: its division by the mesh; empty axes without a mesh.
      scalars: indices of the call's scalars for its kernel.
      kept: for a leaf without a gradient, which stays as it is, the shape of the leaf
        or of the shard; None for others.
      gradient: dense or compressed; None in `init`.
      params: params on the JAX device; None if the host does not need them.
      inputs: other inputs of the kernel, of the gradient's shape.
      feedback: float32, the sum of elements not sent; None without error feedback.
      gate: int32, whether it may update; None if it always may.
      probe: the first few params, if the host does not get all.
    """

    number: int
    split: Split
    scalars: tuple[int, ...] = ()
    kept: tuple[int, ...] | None = None
    gradient: Any = None
    params: Any = None
    inputs: tuple[Any, ...] = ()
    feedback: Any = None
    gate: Any = None
    probe: Any = None

    @property
    def shape(self) -> tuple[int, ...]:
        if self.kept is not None:
            return self.kept
        array = self.params if self.gradient is None else self.gradient
        return tuple(array.shape)

    @property
    def held(self) -> int:
        """The gate's verdict, on the host."""
        return GO if self.gate is None else int(self.gate)

    def request(
        self, call: "HostCall", leaf: LeafDescription, origin: tuple[int, ...], out: Any
    ) -> UpdateRequest | KeptLeaf:
        """On the host: makes the request for the engine.

        Args:
          out: receives the update or the new 16-bit params.
        """
        if self.kept is not None:
            return KeptLeaf(self.number, origin, self.kept)
        probe = self.probe
        if probe is None:
            given = np.zeros(0, out.dtype) if self.params is None else self.params
            probe = first_elements(given)
        return UpdateRequest(
            leaf=self.number,
            kernel=leaf.kernel,
            origin=origin,
            gradient=self.gradient,
            inputs=call.inputs(self),
            out=out,
            probe=probe,
            params=self.params,
            feedback=self.feedback,
        )


Compress: TypeAlias = Callable[[LeafCall], LeafCall]
"""Compresses a leaf's call on the JAX device with the gradient, or with its shard."""


class HostCall(NamedTuple):
    """One call of the host.

    Attributes:
      scalars: the prologue's scalars for the kernels.
      step: int32, the state's step; None in `init`.
      device: int32, position of the JAX device along each axis of the mesh; None
        without a mesh.
      after: arrays that must be ready before the call; they are not used.
    """

    leaves: tuple[LeafCall, ...]
    scalars: Any = ()
    step: Any = None
    device: Any = None
    after: Any = None

    @classmethod
    def of(
        cls,
        leaves: Sequence[LeafCall],
        inputs: Sequence[LeafInputs],
        step: jax.Array | None = None,
        after: jax.Array | None = None,
    ) -> "HostCall":
        """Makes a call with the kernels' inputs; equal scalars are sent once."""
        scalars: dict[int, jax.Array] = {}
        for scalar in (scalar for own in inputs for scalar in own.scalars):
            scalars.setdefault(id(scalar), scalar)
        places = {key: place for place, key in enumerate(scalars)}
        complete = [
            replace(
                leaf,
                scalars=tuple(places[id(scalar)] for scalar in own.scalars),
                inputs=own.arrays,
            )
            for leaf, own in zip(leaves, inputs, strict=True)
        ]
        return cls(tuple(complete), tuple(scalars.values()), step, after=after)

    def origin(self, leaf: LeafCall) -> tuple[int, ...]:
        """On the host: index in the leaf of the call's first element."""
        return shard_origin(leaf.split, self.device, leaf.shape)

    def inputs(self, leaf: LeafCall) -> ScalarInputs:
        return ScalarInputs(
            tuple(self.scalars[place] for place in leaf.scalars), leaf.inputs
        )

    def results(self, description: StoreDescription) -> "HostResult":
        """Shapes and dtypes of what an update of the call fills; may be traced."""
        leaves = [(leaf, description.leaves[leaf.number]) for leaf in self.leaves]
        arrays = [
            None
            if leaf.kept is not None
            else jax.ShapeDtypeStruct(leaf.shape, described.device_dtype)
            for leaf, described in leaves
        ]
        statuses = jax.ShapeDtypeStruct((len(leaves),), np.int32)
        return HostResult(tuple(arrays), statuses)

    @property
    def key(self) -> tuple[int, ...]:
        """On the host: identifies the call within a step."""
        device = () if self.device is None else self.device.tolist()
        return (self.leaves[0].number, *device)

    @property
    def num_bytes(self) -> int:
        return sum(array.nbytes for array in jax.tree.leaves(self))


class HostResult(NamedTuple):
    """The results that a call of the host fills.

    Attributes:
      arrays: for each leaf an array of its shape, or None, as for a kept leaf: the fp32
        update or the new 16-bit params; in `init` its error feedback.
      statuses: int32, one for each leaf.
    """

    arrays: tuple[Any, ...]
    statuses: Any


class LeafResult(NamedTuple):
    """The results of a call for one leaf.

    Attributes:
      feedback: the new error feedback; None without.
    """

    array: Any
    feedback: Any


def first_elements(array: Any) -> Any:
    """Returns the first few elements of an array's first row, as a probe."""
    if not array.size:
        return array.reshape(-1)
    row = array[(0,) * (array.ndim - 1)] if array.ndim else array[None]
    return row[:_NUM_PROBED]


def send(
    host: GuardedHost,
    call: HostCall,
    results: Sequence[jax.ShapeDtypeStruct | None],
    shardings: Sequence[NamedSharding],
    compress: Compress | None = None,
) -> tuple[list[LeafResult], jax.Array]:
    """Calls the host with leaves, shard by shard; traceable.

    Args:
      host: ``host(HostResult, HostCall)``.
      call: whole leaves, all sharded over the same axes.
      results: shape and dtype of each leaf's result; None for no result.
      shardings: the leaves' shardings; empty for one JAX device.

    Returns:
      The result of each leaf, whose arrays are sharded like it; and its status, int32,
      the greatest of all shards. A slice for each leaf would take XLA long to compile.
    """
    statuses = jax.ShapeDtypeStruct((len(call.leaves),), np.int32)
    avals, mesh = HostResult(tuple(results), statuses), mesh_of(shardings)
    others: tuple[str, ...] = ()
    if mesh is not None:
        others = unused_axes(mesh, call.leaves[0].split)
        pairs = zip(results, shardings, strict=True)
        local = [aval if aval is None else _shard_aval(aval, s) for aval, s in pairs]
        avals = HostResult(tuple(local), statuses)

    def on_device(call: HostCall) -> tuple[HostResult, list[Any]]:
        leaves = tuple(map(compress, call.leaves)) if compress else call.leaves
        feedback = [leaf.feedback for leaf in leaves]
        call = call._replace(leaves=leaves)
        if mesh is None:
            return call_host(host, avals, call, is_local=False), feedback
        call = call._replace(device=axis_indices(mesh))
        found = call_owner(host, avals, call, mesh, others)
        greatest = jax.lax.pmax(found.statuses, mesh.axis_names)
        return found._replace(statuses=greatest), feedback

    run = on_device
    if mesh is not None:
        specs = [sharding.spec for sharding in shardings]
        run = compat.shard_map(
            on_device,
            mesh=mesh,
            in_specs=(call_specs(call, specs),),
            out_specs=(HostResult(tuple(specs), PartitionSpec()), specs),
        )
    found, feedback = run(call)
    return list(map(LeafResult, found.arrays, feedback)), found.statuses


def leaf_call(
    number: int, ndim: int, sharding: NamedSharding | None = None, **arrays: Any
) -> LeafCall:
    split = ((),) * ndim if sharding is None else split_of(sharding, ndim)
    return LeafCall(number, split, **arrays)


def _shard_aval(
    aval: jax.ShapeDtypeStruct, sharding: NamedSharding
) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sharding.shard_shape(aval.shape), aval.dtype)


def call_specs(call: HostCall, specs: Sequence[PartitionSpec]) -> HostCall:
    """Returns the sharding of each array of a call, as a prefix of its tree."""
    whole = PartitionSpec()
    sharded = [f.name for f in fields(LeafCall) if f.name not in _STATIC]
    leaves = [
        replace(leaf, **{n: whole if n in _REPLICATED else spec for n in sharded})
        for leaf, spec in zip(call.leaves, specs, strict=True)
    ]
    return HostCall(tuple(leaves), whole, whole, whole, whole)
