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


def on_one_mesh(shardings: Sequence[Any]) -> tuple[NamedSharding, ...]:
    """Returns every leaf's sharding on the run's mesh; empty for one JAX device.

    Other kinds than ``NamedSharding`` count as replicated; several meshes are refused.
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
    """Returns the leaves' shardings that a trace knows: on meshes of explicit axes."""
    shardings = [getattr(jax.typeof(leaf), "sharding", None) for leaf in leaves]
    return on_one_mesh(
        [s if s and s.mesh.are_all_axes_explicit else None for s in shardings]
    )


def mesh_of(shardings: Sequence[NamedSharding]) -> AnyMesh | None:
    """Returns the mesh of the leaves; None for one JAX device."""
    return shardings[0].mesh if shardings else None


FINITE, NON_FINITE = 0, 1
"""Status of a leaf's call; or `callback.FAILED`."""

GO, HOLD, HOLD_NON_FINITE = 0, 1, 2
"""Gate of a leaf: it may be updated, or not; in the last case for its own gradient."""

_NUM_PROBED = 8
_REPLICATED = ("gate", "probe")
_STATIC = ("number", "shape", "sharding", "is_kept", "scalar_places")


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("gradient", "params", "inputs", "feedback", "gate", "probe"),
    meta_fields=_STATIC,
)
@dataclass(frozen=True)
class LeafCall:
    """The data of a leaf for the host; on a mesh, each JAX device sends its shard's.

    Attributes:
      shape: The whole leaf's.
      is_kept: Whether the leaf has no gradient, and stays as it is.
      scalar_places: For each scalar of the kernel its place in `HostCall.scalars`.
      gradient: Dense or compressed; None in `init`.
      params: Params on the JAX device; None if the host does not need them.
      inputs: Other inputs of the kernel, of the gradient's shape.
      feedback: float32, the sum of elements not sent; None without error feedback.
      gate: int32, whether the leaf may be updated; None if it always may.
      probe: The first few params, if the host does not get all.
    """

    number: int
    shape: tuple[int, ...]
    sharding: NamedSharding | None
    is_kept: bool = False
    scalar_places: tuple[int, ...] = ()
    gradient: Any = None
    params: Any = None
    inputs: tuple[Any, ...] = ()
    feedback: Any = None
    gate: Any = None
    probe: Any = None

    @property
    def shard_shape(self) -> tuple[int, ...]:
        return self.sharding.shard_shape(self.shape) if self.sharding else self.shape

    @property
    def gate_value(self) -> int:
        """`GO`, `HOLD` or `HOLD_NON_FINITE`; on the host."""
        return GO if self.gate is None else int(self.gate)

    def request(
        self, call: "HostCall", leaf: LeafDescription, out: Any
    ) -> UpdateRequest:
        """Makes the request, on the host; `out` gets the update or 16-bit params."""
        probe = self.probe
        if probe is None:
            no_params = np.zeros(0, out.dtype)
            probe = first_elements(no_params if self.params is None else self.params)
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
    """The data of one call of the host.

    Attributes:
      step: int32, the state's step; None in `init`.
      device: int32, position of the JAX device along each axis of the mesh; None
        without a mesh.
      after: Arrays that must be ready before the call; they are not used.
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
        step: jax.Array | None,
        after: jax.Array | None,
    ) -> "HostCall":
        """Makes a call with the kernels' inputs; scalars that they share go once."""
        scalars = {id(s): s for leaf_inputs in inputs for s in leaf_inputs.scalars}
        places = {key: place for place, key in enumerate(scalars)}
        complete = [
            replace(
                leaf,
                scalar_places=tuple(places[id(s)] for s in leaf_inputs.scalars),
                inputs=leaf_inputs.arrays,
            )
            for leaf, leaf_inputs in zip(leaves, inputs, strict=True)
        ]
        return cls(tuple(complete), tuple(scalars.values()), step, after=after)

    def origin(self, leaf: LeafCall) -> tuple[int, ...]:
        """Returns the index in the leaf of the device's first element; on the host."""
        origin = [0] * len(leaf.shape)
        if leaf.sharding is not None:
            mesh = leaf.sharding.mesh
            places = dict(zip(mesh.axis_names, self.device.tolist(), strict=True))
            for dimension, entry in enumerate(leaf.sharding.spec):
                number = 0
                for name in entry if isinstance(entry, tuple) else (entry,):
                    if isinstance(name, str):
                        number = number * mesh.shape[name] + places[name]
                origin[dimension] = number * leaf.shard_shape[dimension]
        return tuple(origin)

    def inputs(self, leaf: LeafCall) -> LeafInputs:
        scalars = tuple(self.scalars[place] for place in leaf.scalar_places)
        return LeafInputs(scalars, leaf.inputs)

    @property
    def key(self) -> tuple[int, ...]:
        """Identifies the call within a step; on the host."""
        device = () if self.device is None else self.device.tolist()
        return (self.leaves[0].number, *device)


class HostResult(NamedTuple):
    """The results that a call of the host fills.

    Attributes:
      arrays: For each leaf the fp32 update or the new 16-bit params, in `init` the
        error feedback; None for a kept leaf.
      statuses: int32, one for each leaf, in one array: a slice for each would take
        XLA long to compile.
    """

    arrays: tuple[Any, ...]
    statuses: Any


SentCall: TypeAlias = tuple[HostResult, list[Any]]
"""The results of a call, and the new error feedback of its leaves."""


def send_call(
    host: HostCallback,
    call: HostCall,
    dtypes: Sequence[Any],
    compress: Callable[[LeafCall], LeafCall] | None = None,
    *,
    shares: bool = True,
) -> SentCall:
    """Calls the host with leaves, shard by shard; traceable.

    Args:
      call: Whole leaves, all sharded over the same axes.
      dtypes: The dtype of each leaf's result; None for no result.
      compress: Compresses a leaf's call on the device that has its gradient's shard.
      shares: As for `call_owner`.

    Returns:
      Arrays sharded like their leaves, and the greatest status of all shards.
    """
    arrays = tuple(
        None if dtype is None else jax.ShapeDtypeStruct(leaf.shard_shape, dtype)
        for leaf, dtype in zip(call.leaves, dtypes, strict=True)
    )
    statuses = jax.ShapeDtypeStruct((len(call.leaves),), np.int32)
    avals = HostResult(arrays, statuses)
    sharding = call.leaves[0].sharding
    mesh = None if sharding is None else sharding.mesh

    def on_device(call: HostCall) -> SentCall:
        leaves = tuple(map(compress, call.leaves)) if compress else call.leaves
        feedback = [leaf.feedback for leaf in leaves]
        call = call._replace(leaves=leaves)
        if mesh is None:
            return call_host(host, call, avals, is_local=False), feedback
        places = [lax.axis_index(name) for name in mesh.axis_names]
        call = call._replace(device=jnp.stack(places).astype(jnp.int32))
        axes = unused_axes(sharding)
        result = call_owner(host, call, avals, mesh, axes, shares=shares)
        if shares:
            greatest = lax.pmax(result.statuses, mesh.axis_names)
            result = result._replace(statuses=greatest)
        return result, feedback

    if mesh is None:
        return on_device(call)
    replicated = PartitionSpec()
    specs = [x.sharding.spec if x.sharding else replicated for x in call.leaves]
    out_specs = HostResult(tuple(specs), replicated), specs
    return on_mesh(mesh, on_device, call, _call_specs(call, specs), out_specs)


def _call_specs(call: HostCall, specs: Sequence[PartitionSpec]) -> HostCall:
    """Returns the specs of a call's arrays, as a prefix of its tree."""
    replicated = PartitionSpec()
    sharded = [f.name for f in fields(LeafCall) if f.name not in _STATIC]
    leaves = [
        replace(leaf, **{n: replicated if n in _REPLICATED else spec for n in sharded})
        for leaf, spec in zip(call.leaves, specs, strict=True)
    ]
    return HostCall(tuple(leaves), *[replicated] * 4)


SHARED_CALL_BYTES = 1 << 20
"""A leaf that is shorter, on each JAX device, shares a call with others."""

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
    open_groups: dict[frozenset[str], tuple[list[int], int, int]] = {}
    arrived_bytes = 0
    for leaf in reversed(leaves):
        num_bytes = 4 * math.prod(leaf.shard_shape)
        axes = frozenset(unused_axes(leaf.sharding))
        group, group_bytes, start = open_groups.get(axes, ([], 0, arrived_bytes))
        fits = (
            group_bytes + num_bytes <= GROUP_BYTES
            and arrived_bytes + num_bytes - start <= SPAN_BYTES
        )
        if num_bytes >= SHARED_CALL_BYTES or not fits:
            group, group_bytes, start = [], 0, arrived_bytes
        if num_bytes < SHARED_CALL_BYTES:
            open_groups[axes] = group, group_bytes + num_bytes, start
        if not group:
            groups.append(group)
        group.append(leaf.number)
        arrived_bytes += num_bytes
    return groups


def send_leaves(
    host: HostCallback,
    leaves: Sequence[LeafCall],
    dtypes: Sequence[Any],
    inputs: Sequence[LeafInputs] = (),
    *,
    step: jax.Array | None = None,
    after: jax.Array | None = None,
    shares: bool = True,
) -> tuple[list[Any], list[jax.Array]]:
    """Calls the host with all leaves, small ones together; see `send_call`.

    Returns the array of each leaf, and the statuses of each call.
    """
    inputs = inputs or [LeafInputs()] * len(leaves)
    arrays, statuses = dict[int, Any](), []
    for group in group_leaves(leaves):
        members = [leaves[n] for n in group], [inputs[n] for n in group]
        call = HostCall.of(*members, step, after)
        result, _ = send_call(host, call, [dtypes[n] for n in group], shares=shares)
        arrays |= dict(zip(group, result.arrays, strict=True))
        statuses.append(result.statuses)
    return [arrays[number] for number in range(len(leaves))], statuses
