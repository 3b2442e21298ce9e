"""The transformation's `init`: makes a store, or gives the state of one.

Invariant: an eager `init` writes before it returns, an `init` in a computation writes
when that runs, and an `init` under ``eval_shape`` never writes.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxinf import compat
from jaxinf.csd import ScalarInputs
from jaxinf.engine import (
    StoreDescription,
    check_processes,
    distinct_shards,
    local_shards,
)
from jaxinf.optimizer.aligning import Shapes
from jaxinf.optimizer.callback import call_once
from jaxinf.optimizer.deferred import run_prologue
from jaxinf.optimizer.entering import entering
from jaxinf.optimizer.host_init import HostInit
from jaxinf.optimizer.leaf_call import HostCall, leaf_call, send
from jaxinf.optimizer.sharding import (
    mesh_of,
    on_one_mesh,
    shard_indices,
    traced_shardings,
)
from jaxinf.optimizer.state import SmartUpdateState, first_state
from jaxinf.optimizer.wrapped import Wrapped
from jaxinf.program import InitProgram, key_data, leaf_infos, trained
from jaxinf.typing import DeferredArray, PyTree


class _Initialised(NamedTuple):
    """The results of `init`.

    Attributes:
      feedback: error feedback of each leaf; empty without.
    """

    initial: Sequence[jax.Array]
    held: Sequence[Any]
    feedback: Sequence[jax.Array]


def init_state(wrapped: Wrapped, params: PyTree) -> SmartUpdateState:
    params = entering("init", trained(params))
    leaves = jax.tree.leaves(params)
    is_known = all(
        hasattr(x, "__array__") and not isinstance(x, compat.Tracer) for x in leaves
    )
    if is_known:
        seen = [getattr(leaf, "sharding", None) for leaf in leaves]
        _check_memory(params, seen)
        wrapped.store._training.shardings = on_one_mesh(seen)
    shardings = wrapped.shardings or (() if is_known else traced_shardings(leaves))
    program, update = wrapped.trace(params, wrapped.example_args)
    check_processes(wrapped.store._training.members, mesh_of(shardings))
    description = wrapped.describe(program, update, shardings)
    if compat.is_tracing() or not is_known:
        made = _init_traced(wrapped, description, program, leaves, shardings)
    else:
        made = _init_eagerly(wrapped, description, program, leaves)
    wrapped.store._training.shapes = Shapes.of(params)
    feedback = wrapped.structure_of_feedback(params).unflatten(made.feedback)
    return first_state(program, made.initial, made.held, feedback)


def _check_memory(params: PyTree, shardings: Sequence[Any]) -> None:
    """Refuses params that are not in their devices' own memory."""
    for info, sharding in zip(leaf_infos(params), shardings, strict=True):
        kind = getattr(sharding, "memory_kind", None)
        if kind is None:
            continue
        own = next(iter(sharding.device_set)).default_memory().kind
        if kind != own:
            raise ValueError(
                f"init: leaf {info.name}: expected params in the memory of their "
                f"device, {own}, found {kind}; put them there: jax.device_put(params, "
                f"sharding.with_memory_kind({own!r}))"
            )


def _init_eagerly(
    wrapped: Wrapped,
    description: StoreDescription,
    program: InitProgram,
    leaves: Sequence[Any],
) -> _Initialised:
    store = wrapped.store
    host = HostInit(store, description, wrapped.on_existing)
    is_new = host.begin()
    initial, inputs = run_prologue(program, leaves)
    for number, leaf in enumerate(leaves if is_new else ()):
        scalars = tuple(np.asarray(s) for s in inputs[number].scalars)
        for index, shard in distinct_shards(leaf):
            arrays = tuple(_part_of(a, index) for a in inputs[number].arrays)
            own = ScalarInputs(scalars, arrays)
            origin = [s.start or 0 for s in index]
            host.place(number, shard, origin, own)
            del shard  # frees a deferred leaf before the next is read
    for number, leaf in enumerate(() if is_new else leaves):
        for index in shard_indices(leaf):
            bounds = [s.indices(n) for s, n in zip(index, leaf.shape, strict=True)]
            extent = [stop - start for start, stop, _ in bounds]
            host.check_box(number, [start for start, _, _ in bounds], extent)
    for number, leaf in enumerate(() if is_new else leaves):
        if isinstance(leaf, DeferredArray):
            host.see(number, None)
        for index, shard in distinct_shards(leaf) if host.is_comparing else ():
            host.see(number, shard, [s.start or 0 for s in index])
    held = host.held_state([np.asarray(key_data(value)) for value in initial])
    held[2] = host.agreed_origin(held[2])
    if (mesh := mesh_of(wrapped.shardings)) is not None:
        whole = NamedSharding(mesh, PartitionSpec())
        held = [
            jax.make_array_from_callback(value.shape, whole, value.__getitem__)
            if jax.process_count() > 1
            else jax.device_put(value, whole)
            for value in held
        ]
    feedback: list[jax.Array] = []
    if wrapped.has_feedback:
        places = wrapped.shardings or [None] * len(leaves)
        feedback = [
            jnp.zeros(leaf.shape, jnp.float32, device=sharding)
            for leaf, sharding in zip(leaves, places, strict=True)
        ]
    if not is_new:
        records = store._manifest.leaves
        feedback = [
            store._read_leaf(number, like, len(records[number].states) - 1)
            for number, like in enumerate(feedback)
        ]
    return _Initialised(initial, held, feedback)


def _part_of(array: jax.Array, index: tuple[slice, ...]) -> np.ndarray:
    if array.is_fully_addressable or array.is_fully_replicated:
        return np.asarray(array)[index]
    for shard in local_shards(array):
        if shard.index == index:
            return np.asarray(shard.data)
    raise ValueError(
        f"init: expected an initial state sharded like its params, {index}, found "
        f"{array.sharding}; give params of one sharding"
    )


def _init_traced(
    wrapped: Wrapped,
    description: StoreDescription,
    program: InitProgram,
    leaves: Sequence[jax.Array],
    shardings: tuple[NamedSharding, ...],
) -> _Initialised:
    host = HostInit(wrapped.store, description, wrapped.on_existing)
    mesh = mesh_of(shardings)
    initial, inputs = program.prologue(leaves)
    statuses, feedback = [], []
    for number, (leaf, own) in enumerate(zip(leaves, inputs, strict=True)):
        sharding = shardings[number : number + 1]
        result = None
        if wrapped.has_feedback:
            result = jax.ShapeDtypeStruct(leaf.shape, np.float32)
        call = leaf_call(number, leaf.ndim, *sharding, params=leaf)
        [placed] = send(
            wrapped.host.guarded(host.leaves),
            HostCall.of([call], [own]),
            [result],
            sharding,
        )
        statuses.append(placed.status)
        feedback += [] if placed.array is None else [placed.array]
    scalars = [key_data(value) for value in initial]
    counter = jax.ShapeDtypeStruct((), np.int32)
    avals = [jax.ShapeDtypeStruct(v.shape, v.dtype) for v in scalars]
    held = call_once(
        wrapped.host.guarded(host.finish),
        mesh,
        (jnp.stack(statuses), scalars),
        [counter, counter, counter, *avals],
    )
    return _Initialised(initial, held, feedback)
