"""Builds and sends a leaf's call of the host, and decodes it there.

    LeafCall ─► compress ─► callback ─► LeafCall ─► UpdateRequest
    of JAX arrays, where the gradient is │ of NumPy arrays, on the host

Invariant: all data of a leaf for the host is in one pytree. Values that are known when
  a step is traced are part of its structure, not operands. A run has one mesh or none;
  arrays that are not sharded are replicated.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from jaxinf.engine import LeafDescription, UpdateRequest, unused_axes
from jaxinf.optimizer.callback import (
    AnyMesh,
    HostCallback,
    call_host,
    call_owner,
    on_mesh,
)
from jaxinf.program import LeafInputs

# --- shardings -----------------------------------------------------------------------


def on_one_mesh(shardings: Sequence[Any]) -> tuple[NamedSharding, ...]:
    """Returns every leaf's sharding on the run's mesh; empty for one JAX device.

    Others than ``NamedSharding`` count as replicated; several meshes are refused.
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


def _dimension_axes(sharding: NamedSharding, ndim: int) -> list[tuple[str, ...]]:
    """Returns the names of the axes over which each dimension is sharded."""
    spec = (*sharding.spec, *[None] * (ndim - len(sharding.spec)))
    entries = (entry if isinstance(entry, tuple) else (entry,) for entry in spec)
    return [tuple(n for n in entry if isinstance(n, str)) for entry in entries]


# --- what crosses --------------------------------------------------------------------

FINITE, NON_FINITE = 0, 1
"""Status of a leaf's call; or `callback.FAILED`."""

GO, HOLD, HOLD_NON_FINITE = 0, 1, 2
"""Gate of a leaf's call: it may update, or must not, the last because of this leaf."""

_NUM_PROBED = 8
_REPLICATED = ("gate", "probe")
_STATIC = ("number", "shape", "sharding", "is_kept", "scalars")


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("gradient", "params", "inputs", "feedback", "gate", "probe"),
    meta_fields=_STATIC,
)
@dataclass(frozen=True)
class LeafCall:
    """The data of a leaf for the host; on a mesh, each JAX device sends its shard's.

    Attributes:
      shape: the leaf's.
      sharding: None without a mesh.
      is_kept: whether it has no gradient, and stays as it is.
      scalars: indices of the call's scalars for its kernel.
      gradient: dense or compressed; None in `init`.
      params: params on the JAX device; None if the host does not need them.
      inputs: other inputs of the kernel, of the gradient's shape.
      feedback: float32, the sum of elements not sent; None without error feedback.
      gate: int32, whether it may update; None if it always may.
      probe: the first few params, if the host does not get all.
    """

    number: int
    shape: tuple[int, ...]
    sharding: NamedSharding | None
    is_kept: bool = False
    scalars: tuple[int, ...] = ()
    gradient: Any = None
    params: Any = None
    inputs: tuple[Any, ...] = ()
    feedback: Any = None
    gate: Any = None
    probe: Any = None

    @property
    def part_shape(self) -> tuple[int, ...]:
        """The shape of the part that a JAX device has."""
        return self.sharding.shard_shape(self.shape) if self.sharding else self.shape

    @property
    def unused_axes(self) -> tuple[str, ...]:
        """The mesh's axes along which devices hold the same shard."""
        return unused_axes(self.sharding)

    @property
    def held(self) -> int:
        """The gate's verdict, on the host."""
        return GO if self.gate is None else int(self.gate)

    def request(
        self, call: "HostCall", leaf: LeafDescription, out: Any
    ) -> UpdateRequest:
        """Makes the request, on the host; `out` gets the update or 16-bit params."""
        probe = self.probe
        if probe is None:
            given = np.zeros(0, out.dtype) if self.params is None else self.params
            probe = first_elements(given)
        return UpdateRequest(
            leaf=self.number,
            kernel=leaf.kernel,
            origin=call.origin(self),
            gradient=self.gradient,
            inputs=call.inputs(self),
            out=out,
            probe=probe,
            params=self.params,
            feedback=self.feedback,
        )


def first_elements(array: Any) -> Any:
    """Returns the first few elements of an array's first row, as a probe."""
    if not array.size:
        return array.reshape(-1)
    row = array[(0,) * (array.ndim - 1)] if array.ndim else array[None]
    return row[:_NUM_PROBED]


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
        """Returns the leaf's index of the device's first element; on the host."""
        if leaf.sharding is None:
            return (0,) * len(leaf.shape)
        mesh, origin = leaf.sharding.mesh, []
        places = dict(zip(mesh.axis_names, self.device.tolist(), strict=True))
        axes = _dimension_axes(leaf.sharding, len(leaf.shape))
        for names, length in zip(axes, leaf.part_shape, strict=True):
            position = 0
            for name in names:
                position = position * mesh.shape[name] + places[name]
            origin.append(position * length)
        return tuple(origin)

    def inputs(self, leaf: LeafCall) -> LeafInputs:
        return LeafInputs(
            tuple(self.scalars[place] for place in leaf.scalars), leaf.inputs
        )

    @property
    def key(self) -> tuple[int, ...]:
        """Identifies the call within a step; on the host."""
        device = () if self.device is None else self.device.tolist()
        return (self.leaves[0].number, *device)


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


CompressCall: TypeAlias = Callable[[LeafCall], LeafCall]
"""Compresses a leaf's call on the JAX device with the gradient, or with its shard."""


def send(
    host: HostCallback,
    call: HostCall,
    dtypes: Sequence[Any],
    compress: CompressCall | None = None,
    *,
    shares: bool = True,
) -> tuple[list[LeafResult], jax.Array]:
    """Calls the host with leaves, shard by shard; traceable.

    Args:
      call: whole leaves, all sharded over the same axes.
      dtypes: the dtype of each leaf's result; None for no result.
      shares: whether the devices of a mesh share the results, in a collective.

    Returns:
      The result of each leaf, whose arrays are sharded like it; and its status, int32,
      the greatest of all shards. A slice for each leaf would take XLA long to compile.
    """
    arrays = tuple(
        None if dtype is None else jax.ShapeDtypeStruct(leaf.part_shape, dtype)
        for leaf, dtype in zip(call.leaves, dtypes, strict=True)
    )
    statuses = jax.ShapeDtypeStruct((len(call.leaves),), np.int32)
    avals = HostResult(arrays, statuses)
    first = call.leaves[0]
    mesh = None if first.sharding is None else first.sharding.mesh

    def on_device(call: HostCall) -> tuple[HostResult, list[Any]]:
        leaves = tuple(map(compress, call.leaves)) if compress else call.leaves
        feedback = [leaf.feedback for leaf in leaves]
        call = call._replace(leaves=leaves)
        if mesh is None:
            return call_host(host, avals, call, is_local=False), feedback
        places = [lax.axis_index(name) for name in mesh.axis_names]
        call = call._replace(device=jnp.stack(places).astype(jnp.int32))
        found = call_owner(host, avals, call, mesh, first.unused_axes, shares=shares)
        if shares:
            greatest = lax.pmax(found.statuses, mesh.axis_names)
            found = found._replace(statuses=greatest)
        return found, feedback

    if mesh is None:
        found, feedback = on_device(call)
    else:
        whole = PartitionSpec()
        specs = [x.sharding.spec if x.sharding else whole for x in call.leaves]
        out_specs = HostResult(tuple(specs), whole), specs
        in_specs = _call_specs(call, specs)
        found, feedback = on_mesh(mesh, on_device, call, in_specs, out_specs)
    return list(map(LeafResult, found.arrays, feedback)), found.statuses


def _call_specs(call: HostCall, specs: Sequence[PartitionSpec]) -> HostCall:
    """Returns the sharding of each array of a call, as a prefix of its tree."""
    whole = PartitionSpec()
    sharded = [f.name for f in fields(LeafCall) if f.name not in _STATIC]
    leaves = [
        replace(leaf, **{n: whole if n in _REPLICATED else spec for n in sharded})
        for leaf, spec in zip(call.leaves, specs, strict=True)
    ]
    return HostCall(tuple(leaves), whole, whole, whole, whole)


# --- the leaves of a call ------------------------------------------------------------

SHARED_CALL_BYTES = 1 << 20
"""A leaf that is shorter, on each JAX device, shares a call."""

GROUP_BYTES = 8 << 20
"""No call brings more small leaves than this."""

SPAN_BYTES = 64 << 20
"""No gradient waits for more bytes of others, long leaves between them included."""


def group_leaves(leaves: Sequence[LeafCall]) -> list[list[int]]:
    """Returns the numbers of the leaves of each call, in the order of first gradients.

    A call costs as much for a few elements as for a million, so small leaves whose
    gradients arrive together share one, if they are sharded over the same axes:

        arrival:   … [small small] LONG [small small …] LONG …     (the tree backwards)
        calls:       └─────────── one ────────┘  and each long leaf by itself
    """
    groups: list[list[int]] = []
    filling: dict[frozenset[str], tuple[list[int], int, int]] = {}
    arrived = 0
    for leaf in reversed(leaves):
        num_bytes, kind = 4 * math.prod(leaf.part_shape), frozenset(leaf.unused_axes)
        group, held, began = filling.get(kind, ([], 0, arrived))
        fits = (
            held + num_bytes <= GROUP_BYTES
            and arrived + num_bytes - began <= SPAN_BYTES
        )
        if num_bytes >= SHARED_CALL_BYTES or not fits:
            group, held, began = [], 0, arrived
        if num_bytes < SHARED_CALL_BYTES:
            filling[kind] = group, held + num_bytes, began
        if not group:
            groups.append(group)
        group.append(leaf.number)
        arrived += num_bytes
    return groups
