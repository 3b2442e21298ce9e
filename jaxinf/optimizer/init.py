"""The transformation's `init`: makes a store, or gives the state of one.

Invariant: an eager `init` writes before it returns, an `init` in a computation writes
when that runs, and an `init` under ``eval_shape`` never writes. A store is new until
every leaf is placed and step 0 is committed. On a store with steps the params of `init`
are not looked at: the first update compares those that it is given. A deferred leaf is
in memory only while its own state is made, unless the optimizer's init needs all its
elements in the prologue.
"""

import threading
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxinf import compat
from jaxinf.engine import (
    InitialParams,
    StoreDescription,
    bind_optimizer,
    initialise_leaves,
    read_feedback,
    read_leaf,
    restart_store,
    shard_whole,
    shards_with_origin,
)
from jaxinf.errors import StoreMismatchError
from jaxinf.layout import Box
from jaxinf.optimizer.callback import FAILED, call_once, check_device_configuration
from jaxinf.optimizer.host_side import named_scalars
from jaxinf.optimizer.leaf_call import (
    FINITE,
    GROUP_BYTES,
    HostCall,
    HostResult,
    LeafCall,
    LeafResult,
    group_leaves,
    mesh_of,
    on_one_mesh,
    send,
    traced_shardings,
)
from jaxinf.optimizer.state import SmartUpdateState, first_state
from jaxinf.optimizer.wrapped import OffloadedOptimizer, entering
from jaxinf.program import InitProgram, LeafInputs, keep_trained, key_data
from jaxinf.store import ScalarState
from jaxinf.typing import Array, DeferredArray, PyTree


class HostInit:
    """Host functions that make or resume the store."""

    def __init__(
        self, wrapped: OffloadedOptimizer, description: StoreDescription
    ) -> None:
        self._wrapped, self._store = wrapped, wrapped.host.store
        self._description = description
        self._guard = threading.Lock()
        self._has_begun = False

    def begin(self) -> bool:
        """Begins `init`: treats a store that has steps according to `on_existing`.

        Returns:
          Whether the store is new, so that leaves must be placed.
        """
        engine, path = self._wrapped.engine, self._store.path
        with self._guard:
            is_first, self._has_begun = not self._has_begun, True
            if is_first and not engine.is_new:
                if self._wrapped.on_existing == "error":
                    raise StoreMismatchError(
                        f"{path}: expected no store there yet, as "
                        'on_existing="error" says, found one at step '
                        f"{engine.files.commit.step}; "
                        'on_existing="resume" goes on with it, "restart" keeps it as '
                        "a checkpoint and begins anew"
                    )
                if self._wrapped.on_existing == "restart":
                    restart_store(engine, self._description)
        is_new = bind_optimizer(engine, self._description, may_create=True)
        if is_first and not is_new and engine.resume_check.bound_step:
            raise StoreMismatchError(
                f"{path}: expected the first init on this open store, "
                "found one after steps of its own: it would keep moments and counts, "
                "which optax's init resets. To begin anew, use smart_update(…, "
                'on_existing="restart"), which keeps the run as a checkpoint; to go '
                "on, give update the state that the last call returned. Closed and "
                "opened, the store resumes"
            )
        self._store.wait()
        return is_new

    def leaves(self, outs: HostResult, call: HostCall) -> None:
        """Callback: stores leaves, or shards, of the params of a new store.

        Results: the error feedback, if there is any, and statuses.
        """
        is_new, engine = self.begin(), self._wrapped.engine
        if is_new:
            given = [
                InitialParams(
                    one.number, one.params, call.origin(one), call.inputs(one)
                )
                for one in call.leaves
            ]
            initialise_leaves(engine.files, self._description, given)
        for leaf, feedback in zip(call.leaves, outs.arrays, strict=True):
            if feedback is not None:
                feedback[...] = 0  # of a new store, and where others hold it
                if not is_new:
                    origin = call.origin(leaf)
                    read_feedback(engine.files, leaf.number, feedback, origin)
        outs.statuses[...] = FINITE

    def finish(
        self, outs: Sequence[Array], arguments: tuple[Array, Sequence[Array]]
    ) -> None:
        """Callback: ends `init`, when all leaves are placed according to the statuses.

        Results: see `held_state`.
        """
        statuses, scalars = arguments
        if np.any(statuses == FAILED):
            self._wrapped.engine.health.check()
            raise self._wrapped.engine.group.failure_of_others(0)
        for out, value in zip(outs, self.held_state(scalars), strict=True):
            out[...] = value

    def held_state(self, scalars: Sequence[Array]) -> list[Array]:
        """Commits step 0 of a new store; returns the beginning of the run's state.

        Returns:
          Step, skipped steps and scalar state.
        """
        engine = self._wrapped.engine
        is_new = self.begin()
        self._has_begun = False  # the computation may run again
        if is_new:
            engine.steps.commit_written_step(
                0, named_scalars(self._description, scalars)
            )
        else:
            engine.resume_check.bound_step = None
        commit = engine.files.finished
        self._check_scalars(scalars, commit.scalar_state)
        counters = (commit.step, commit.skipped_steps)
        held = [scalar.value for scalar in commit.scalar_state]
        return [*(np.array(n, np.int32) for n in counters), *held]

    def _check_scalars(
        self, given: Sequence[Array], held: Sequence[ScalarState]
    ) -> None:
        wanted = [
            (path, value.dtype.name, value.shape)
            for path, value in zip(self._description.scalar_paths, given, strict=True)
        ]
        stored = [(s.path, s.value.dtype.name, s.value.shape) for s in held]
        if wanted != stored:
            raise StoreMismatchError(
                f"{self._store.path}: the store's scalar state is {stored}, this "
                f"optimizer's {wanted}; open it with the optimizer it was made with"
            )


_Made: TypeAlias = tuple[Sequence[jax.Array], Sequence[Any], Sequence[jax.Array]]
"""The first scalar state, the result of `held_state`, each leaf's error feedback."""


def init_state(wrapped: OffloadedOptimizer, params: PyTree) -> SmartUpdateState:
    check_device_configuration()
    wrapped.check()
    params = entering("init", keep_trained(params))
    leaves = jax.tree.leaves(params)
    is_known = all(
        hasattr(x, "__array__") and not isinstance(x, compat.Tracer) for x in leaves
    )
    if is_known:
        seen = [getattr(leaf, "sharding", None) for leaf in leaves]
        wrapped.engine.shardings = on_one_mesh(seen)
    shardings = wrapped.shardings or (() if is_known else traced_shardings(leaves))
    program, update = wrapped.trace(params, wrapped.example_args)
    description = wrapped.describe(program, update, shardings)
    if compat.is_tracing() or not is_known:
        initial, held, left = _init_traced(
            wrapped, description, program, leaves, shardings
        )
    else:
        initial, held, left = _init_eagerly(wrapped, description, program, leaves)
    tree = jax.tree.structure(params if wrapped.has_feedback else ())
    return first_state(program, initial, held, tree.unflatten(left))


def _init_eagerly(
    wrapped: OffloadedOptimizer,
    description: StoreDescription,
    program: InitProgram,
    leaves: Sequence[Any],
) -> _Made:
    engine = wrapped.engine
    host = HostInit(wrapped, description)
    is_new = host.begin()
    initial, inputs = program.compute(leaves)
    if is_new:
        for given in _first_params(leaves, inputs):
            initialise_leaves(engine.files, description, given)
            given.clear()
    else:
        wrapped.check_shards(description, wrapped.shardings)
    held = host.held_state([np.asarray(key_data(value)) for value in initial])
    if (mesh := mesh_of(wrapped.shardings)) is not None:
        whole = NamedSharding(mesh, PartitionSpec())
        held = [shard_whole(value, whole) for value in held]
    feedback: list[jax.Array] = []
    if wrapped.has_feedback:
        places = wrapped.shardings or [None] * len(leaves)
        feedback = [
            jnp.zeros(leaf.shape, jnp.float32, device=sharding)
            for leaf, sharding in zip(leaves, places, strict=True)
        ]
    if not is_new:
        files = engine.files
        feedback = [
            read_leaf(files, number, like, len(files.leaves[number].states) - 1)
            for number, like in enumerate(feedback)
        ]
    return initial, held, feedback


def _first_params(
    leaves: Sequence[Any], inputs: Sequence[LeafInputs]
) -> Iterator[list[InitialParams]]:
    """Yields the shards of leaves, many small ones at once, a deferred leaf alone.

    The receiver empties the lists, so that a deferred leaf is free before the next is
    read.
    """
    given: list[InitialParams] = []
    num_bytes = 0
    for number, (leaf, own) in enumerate(zip(leaves, inputs, strict=True)):
        scalars = tuple(np.asarray(s) for s in own.scalars)
        for origin, shard in shards_with_origin(leaf):
            arrays = tuple(_part_of(a, origin, shard.shape) for a in own.arrays)
            given.append(
                InitialParams(number, shard, origin, LeafInputs(scalars, arrays))
            )
            num_bytes += shard.nbytes
            del shard
            if isinstance(leaf, DeferredArray) or num_bytes > GROUP_BYTES:
                yield given
                given, num_bytes = [], 0
    if given:
        yield given


def _part_of(
    array: jax.Array, origin: tuple[int, ...], extent: tuple[int, ...]
) -> np.ndarray:
    if array.is_fully_addressable or array.is_fully_replicated:
        return np.asarray(array)[Box(origin, extent).slices]
    for place, part in shards_with_origin(array):
        if (place, part.shape) == (origin, extent):
            return part
    raise ValueError(
        f"init: expected an initial state sharded like its params, {extent} at "
        f"{origin}, found {array.sharding}; give params of one sharding"
    )


def _init_traced(
    wrapped: OffloadedOptimizer,
    description: StoreDescription,
    program: InitProgram,
    leaves: Sequence[jax.Array],
    shardings: tuple[NamedSharding, ...],
) -> _Made:
    host = HostInit(wrapped, description)
    mesh = mesh_of(shardings)
    initial, inputs = program.prologue(leaves)
    calls = [
        LeafCall(number, leaf.shape, sharding, params=leaf)
        for number, (leaf, sharding) in enumerate(
            zip(leaves, shardings or [None] * len(leaves), strict=True)
        )
    ]
    found: dict[int, LeafResult] = {}
    statuses = []
    dtype = np.float32 if wrapped.has_feedback else None
    for group in group_leaves(calls):
        placed, own = send(
            wrapped.host.guarded(host.leaves),
            HostCall.of([calls[n] for n in group], [inputs[n] for n in group]),
            [dtype] * len(group),
        )
        found |= dict(zip(group, placed, strict=True))
        statuses.append(own)
    feedback = []
    if wrapped.has_feedback:
        feedback = [found[number].array for number in range(len(leaves))]
    scalars = [key_data(value) for value in initial]
    counter = jax.ShapeDtypeStruct((), np.int32)
    avals = [jax.ShapeDtypeStruct(v.shape, v.dtype) for v in scalars]
    held = call_once(
        wrapped.host.guarded(host.finish),
        mesh,
        (jnp.concatenate(statuses), scalars),
        [counter, counter, *avals],
    )
    return initial, held, feedback
