"""Ties the state and params of a step to the store, before anything else of the step.

    must bind? ─► compare … ─► bind        on a mesh all devices wait on the host

On a mesh no device waits in a collective meanwhile: to compare params takes as long as
to read them, and XLA gives a first collective up that is stuck. Every device calls, the
host function runs once, and no device goes on before it has ended.
Invariant: no leaf is updated before all have been compared.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxinf import compat
from jaxinf.engine import StoreDescription, replicas_differ
from jaxinf.optimizer.callback import AnyMesh, GuardedHost, call_host, call_owner
from jaxinf.optimizer.host_side import UNBOUND, HostSide
from jaxinf.optimizer.leaf_call import (
    HostCall,
    HostResult,
    LeafCall,
    axis_indices,
    call_specs,
    mesh_of,
    unused_axes,
)
from jaxinf.optimizer.state import SmartUpdateState
from jaxinf.typing import PyTree


@dataclass(eq=False)
class _Group:
    """The calls that meet: results to fill, and arguments."""

    calls: list[tuple[PyTree, PyTree]] = field(default_factory=list)
    is_over: bool = False


class _Meeting:
    """A host function that the last of a process's devices to call it runs.

    It gets the greatest of the arguments of all devices, element by element, and all
    get its results. Thread-safe.
    """

    def __init__(self, host: GuardedHost, num_devices: int) -> None:
        self._host, self._num_devices = host, num_devices
        self._changed = threading.Condition()
        self._group = _Group()

    def __call__(self, outs: PyTree, arguments: PyTree) -> None:
        with self._changed:
            group = self._group
            group.calls.append((outs, arguments))
            if len(group.calls) < self._num_devices:
                self._changed.wait_for(lambda: group.is_over)
                return
            self._group = _Group()
        given = [arguments for _, arguments in group.calls]
        self._host.reporting(outs, jax.tree.map(_greatest, *given))
        for others, _ in group.calls:
            jax.tree.map(np.copyto, others, outs)
        with self._changed:
            group.is_over = True
            self._changed.notify_all()


def _greatest(*arrays: Any) -> Any:
    return np.maximum.reduce(arrays)


_RESULT = jax.ShapeDtypeStruct((2,), np.int32)


def bind(
    host: HostSide,
    description: StoreDescription,
    shardings: Sequence[NamedSharding],
    state: SmartUpdateState,
    groups: Sequence[tuple[LeafCall, ...]],
) -> tuple[jax.Array, jax.Array]:
    """Compares params with the store, unless the state is the last step's; traceable.

    Then this is one call without arrays.

    Args:
      shardings: the leaves' shardings; empty for one JAX device.
      groups: the leaves with their params, by call; empty if these are not available.

    Returns:
      int32, ready when leaves may be updated; and the new state's origin.
    """
    mesh, calls = mesh_of(shardings), [HostCall(group) for group in groups]
    compare = host.guarded(host.compare)
    found = _together(
        mesh,
        host.guarded(partial(host.must_bind, description)),
        (state.step, state.origin),
    )

    def compared() -> jax.Array:
        statuses = [found[:1], *(_compared(mesh, compare, shardings, c) for c in calls)]
        differing = [jnp.zeros(0, jnp.int32)]
        if mesh is not None and jax.process_count() > 1:
            params = {leaf.number: leaf.params for group in groups for leaf in group}
            pairs = [(params[n], shardings[n]) for n in sorted(params)]
            differing += [replicas_differ(*p).astype(jnp.int32)[None] for p in pairs]
        given = state.step, jnp.concatenate(statuses), jnp.concatenate(differing)
        return _together(mesh, host.guarded(partial(host.bind, description)), given)

    flag, origin = lax.cond(found[0] == UNBOUND, compared, lambda: found)
    return flag, origin


def _together(mesh: AnyMesh | None, host: GuardedHost, arguments: PyTree) -> jax.Array:
    """Calls the host once when all devices of a process have come."""
    if mesh is None:
        return call_host(host, _RESULT, arguments, is_local=False)
    is_alone = jax.process_count() == 1
    num = mesh.size if is_alone or not isinstance(mesh, Mesh) else mesh.local_mesh.size
    met = replace(host, host=_Meeting(host, num))

    def on_device(arguments: PyTree) -> jax.Array:
        found = call_host(met, _RESULT, arguments, is_local=True)
        return found if is_alone else lax.pmax(found, mesh.axis_names)

    return _mapped(mesh, on_device, arguments, PartitionSpec())


def _compared(
    mesh: AnyMesh | None,
    host: GuardedHost,
    shardings: Sequence[NamedSharding],
    call: HostCall,
) -> jax.Array:
    """Compares leaves; returns statuses, which each device knows of its own shards."""
    aval = jax.ShapeDtypeStruct((len(call.leaves),), np.int32)
    results = HostResult((None,) * len(call.leaves), aval)
    if mesh is None:
        return call_host(host, results, call, is_local=False).statuses
    others = unused_axes(mesh, call.leaves[0].split)

    def on_device(call: HostCall) -> jax.Array:
        sent = call._replace(device=axis_indices(mesh))
        return call_owner(host, results, sent, mesh, others, shares=False).statuses

    specs = call_specs(call, [shardings[leaf.number].spec for leaf in call.leaves])
    return _mapped(mesh, on_device, call, specs)


def _mapped(
    mesh: AnyMesh,
    function: Callable[[PyTree], jax.Array],
    arguments: PyTree,
    specs: Any,
) -> jax.Array:
    """A ``shard_map`` whose results count as replicated, though devices' own differ."""
    return compat.shard_map(
        function, mesh=mesh, in_specs=(specs,), out_specs=PartitionSpec()
    )(arguments)
