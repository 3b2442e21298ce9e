"""Ties the state and params of a step to the store, before anything else of the step.

    one JAX device, several processes:   must bind? ─► compare … ─► bind
    a mesh:                              the same, and all devices wait on the host

On a mesh of one process no device waits in a collective meanwhile: to compare params
takes as long as to read them, and XLA gives a first collective up that is stuck. Every
device calls, the host function runs once, and no device goes on before it has ended.
Invariant: no leaf is updated before all have been compared.
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from jaxinf import compat
from jaxinf.engine import StoreDescription, replicas_differ
from jaxinf.optimizer.callback import (
    AnyMesh,
    GuardedHost,
    call_host,
    call_once,
    call_owner,
)
from jaxinf.optimizer.host_side import UNBOUND, HostSide
from jaxinf.optimizer.leaf_call import (
    HostCall,
    HostResult,
    LeafCall,
    axis_indices,
    call_specs,
    mesh_of,
    send,
    unused_axes,
)
from jaxinf.optimizer.state import SmartUpdateState
from jaxinf.typing import PyTree


def once_for_all(host: GuardedHost, num_devices: int) -> GuardedHost:
    """Returns a host function that the last of the devices to call it runs.

    It gets the greatest of the arguments of all devices, element by element, and all
    get its results. It runs beside other devices, so it reports what it raises.

    Args:
      num_devices: number of devices of this process, each of which calls it.
    """
    return replace(host, host=_Meeting(host, num_devices))


@dataclass(eq=False)
class _Group:
    """The calls that meet: results to fill, and arguments."""

    calls: list[tuple[PyTree, PyTree]] = field(default_factory=list)
    is_over: bool = False


class _Meeting:
    """See `once_for_all`. Thread-safe."""

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
      host: the host functions.
      description: the store's description.
      shardings: the leaves' shardings; empty for one JAX device.
      state: the state at the beginning of the step.
      groups: the leaves with their params, by call; empty if these are not available.

    Returns:
      int32, ready when leaves may be updated; and the new state's origin.
    """
    mesh = mesh_of(shardings)
    if mesh is None or jax.process_count() > 1:
        return _bind_in_turn(host, description, shardings, state, groups)
    return _bind_together(host, description, shardings, mesh, state, groups)


def _bind_in_turn(
    host: HostSide,
    description: StoreDescription,
    shardings: Sequence[NamedSharding],
    state: SmartUpdateState,
    groups: Sequence[tuple[LeafCall, ...]],
) -> tuple[jax.Array, jax.Array]:
    mesh = mesh_of(shardings)
    must_bind = host.guarded(partial(host.must_bind, description))
    found = call_once(must_bind, mesh, (state.step, state.origin), _RESULT)

    def compare() -> jax.Array:
        statuses, differing = [found[:1]], [jnp.zeros(0, jnp.int32)]
        for group in groups:
            placed = [shardings[leaf.number] for leaf in group if shardings]
            call, compared = HostCall(group), host.guarded(host.compare)
            _, own = send(compared, call, [None] * len(group), placed)
            statuses.append(own)
        if jax.process_count() > 1 and shardings:
            params = {leaf.number: leaf.params for group in groups for leaf in group}
            pairs = [(params[n], shardings[n]) for n in sorted(params)]
            differing += [replicas_differ(*p).astype(jnp.int32)[None] for p in pairs]
        given = state.step, jnp.concatenate(statuses), jnp.concatenate(differing)
        return call_once(
            host.guarded(partial(host.bind, description)), mesh, given, _RESULT
        )

    flag, origin = lax.cond(found[0] == UNBOUND, compare, lambda: found)
    return flag, origin


def _bind_together(
    host: HostSide,
    description: StoreDescription,
    shardings: Sequence[NamedSharding],
    mesh: AnyMesh,
    state: SmartUpdateState,
    groups: Sequence[tuple[LeafCall, ...]],
) -> tuple[jax.Array, jax.Array]:
    must_bind, compare, finish = (
        host.guarded(partial(host.must_bind, description)),
        host.guarded(host.compare),
        host.guarded(partial(host.bind, description)),
    )

    def on_device(
        step: jax.Array, origin: jax.Array, calls: list[HostCall]
    ) -> jax.Array:
        def together(function: GuardedHost, *given: jax.Array) -> jax.Array:
            met = once_for_all(function, mesh.size)
            return call_host(met, _RESULT, given, is_local=True)

        def compared() -> jax.Array:
            statuses = [found[:1]]
            for call in calls:
                avals = jax.ShapeDtypeStruct((len(call.leaves),), np.int32)
                others = unused_axes(mesh, call.leaves[0].split)
                sent = call._replace(device=axis_indices(mesh))
                results = HostResult((None,) * len(call.leaves), avals)
                found_here = call_owner(
                    compare, results, sent, mesh, others, shares=False
                )
                statuses.append(found_here.statuses)
            statuses, differing = jnp.concatenate(statuses), jnp.zeros(0, jnp.int32)
            return together(finish, step, statuses, differing)

        found = together(must_bind, step, origin)
        return lax.cond(found[0] == UNBOUND, compared, lambda: found)

    calls = [HostCall(group) for group in groups]
    whole = PartitionSpec()
    specs = [
        call_specs(call, [shardings[leaf.number].spec for leaf in call.leaves])
        for call in calls
    ]
    flag, origin = compat.shard_map(
        on_device, mesh=mesh, in_specs=(whole, whole, specs), out_specs=whole
    )(state.step, state.origin, calls)
    return flag, origin
