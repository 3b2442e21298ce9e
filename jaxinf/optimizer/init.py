"""The transformation's `init`: makes a store, or gives the state of one.

Invariant: an eager `init` writes before it returns, an `init` in a computation writes
when that runs, and an `init` under ``eval_shape`` never writes. A store is new until
every leaf is stored and step 0 is committed. On a store with steps the params of `init`
are not looked at: the first update compares those that it is given. A deferred leaf is
in memory only while its own state is made, unless the optimizer's init needs all its
elements in the prologue.
"""

import threading
from collections.abc import Iterator, Sequence
from typing import Any

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
    mesh_of,
    on_one_mesh,
    send_leaves,
    traced_shardings,
)
from jaxinf.optimizer.offloaded import OffloadedOptimizer, guard_arrays
from jaxinf.optimizer.state import InitResult, SmartUpdateState, first_state
from jaxinf.program import InitProgram, LeafInputs, keep_trained, key_data
from jaxinf.store import ScalarState
from jaxinf.typing import Array, DeferredArray, PyTree


class HostInit:
    """Host functions that make or resume the store."""

    def __init__(
        self, optimizer: OffloadedOptimizer, description: StoreDescription
    ) -> None:
        self._optimizer, self._store = optimizer, optimizer.host.store
        self._description = description
        self._guard = threading.Lock()
        self._has_begun = False

    def begin(self) -> bool:
        """Begins `init` as `on_existing` says; returns whether the store is new."""
        engine, path = self._optimizer.engine, self._store.path
        with self._guard:
            is_first, self._has_begun = not self._has_begun, True
            if is_first and not engine.is_new:
                if self._optimizer.on_existing == "error":
                    raise StoreMismatchError(
                        f"{path}: expected no store there yet, as "
                        'on_existing="error" says, found one at step '
                        f"{engine.files.commit.step}; "
                        'on_existing="resume" goes on with it, "restart" keeps it as '
                        "a checkpoint and begins anew"
                    )
                if self._optimizer.on_existing == "restart":
                    restart_store(engine, self._description)
        is_new = bind_optimizer(engine, self._description, may_create=True)
        if is_first and not is_new and engine.resume_check.expected_step:
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

    def store_leaves(self, outs: HostResult, call: HostCall) -> None:
        """Callback: stores leaves, or shards, of a new store; gives error feedback."""
        is_new, engine = self.begin(), self._optimizer.engine
        if is_new:
            first_params = [
                InitialParams(x.number, x.params, call.origin(x), call.inputs(x))
                for x in call.leaves
            ]
            initialise_leaves(engine.files, self._description, first_params)
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
        """Callback: ends `init`, when all leaves are stored; see `start_run`."""
        statuses, scalars = arguments
        if np.any(statuses == FAILED):
            self._optimizer.engine.health.check()
            raise self._optimizer.engine.group.failure_of_others(0)
        for out, value in zip(outs, self.start_run(scalars), strict=True):
            out[...] = value

    def start_run(self, scalars: Sequence[Array]) -> list[Array]:
        """Commits step 0 of a new store, with the optimizer's first scalar state.

        Returns step, skipped steps and scalar state of the store's last step.
        """
        engine = self._optimizer.engine
        is_new = self.begin()
        self._has_begun = False  # the computation may run again
        if is_new:
            engine.steps.commit_written_step(
                0, named_scalars(self._description, scalars)
            )
        else:
            engine.resume_check.expected_step = None
        commit = engine.files.finished
        self._check_scalars(scalars, commit.scalar_state)
        counters = (commit.step, commit.skipped_steps)
        stored = [scalar.value for scalar in commit.scalar_state]
        return [*(np.array(n, np.int32) for n in counters), *stored]

    def _check_scalars(
        self, initial: Sequence[Array], stored: Sequence[ScalarState]
    ) -> None:
        expected, found = (
            [(s.path, s.value.dtype.name, s.value.shape) for s in scalars]
            for scalars in (named_scalars(self._description, initial), stored)
        )
        if expected != found:
            raise StoreMismatchError(
                f"{self._store.path}: the store's scalar state is {found}, this "
                f"optimizer's {expected}; open it with the optimizer it was made with"
            )


def init_state(optimizer: OffloadedOptimizer, params: PyTree) -> SmartUpdateState:
    check_device_configuration()
    optimizer.check()
    params = guard_arrays("init", keep_trained(params))
    leaves = jax.tree.leaves(params)
    has_values = all(
        hasattr(x, "__array__") and not isinstance(x, compat.Tracer) for x in leaves
    )
    if has_values:
        optimizer.engine.shardings = on_one_mesh(
            [getattr(leaf, "sharding", None) for leaf in leaves]
        )
    shardings = optimizer.shardings or (() if has_values else traced_shardings(leaves))
    program, _, description = optimizer.trace(params, optimizer.example_args, shardings)
    if compat.is_tracing() or not has_values:
        result = _init_traced(optimizer, description, program, leaves, shardings)
    else:
        result = _init_eagerly(optimizer, description, program, leaves)
    tree = jax.tree.structure(params if optimizer.has_feedback else ())
    return first_state(program, result, tree.unflatten(result.feedback))


def _init_eagerly(
    optimizer: OffloadedOptimizer,
    description: StoreDescription,
    program: InitProgram,
    leaves: Sequence[Any],
) -> InitResult:
    engine = optimizer.engine
    host = HostInit(optimizer, description)
    is_new = host.begin()
    initial, inputs = program.compute(leaves)
    if is_new:
        for first_params in _first_params(leaves, inputs):
            initialise_leaves(engine.files, description, first_params)
            first_params.clear()
    else:
        optimizer.check_shards(description, optimizer.shardings)
    stored = host.start_run([np.asarray(key_data(value)) for value in initial])
    if (mesh := mesh_of(optimizer.shardings)) is not None:
        replicated = NamedSharding(mesh, PartitionSpec())
        stored = [shard_whole(value, replicated) for value in stored]
    feedback: list[jax.Array] = []
    if optimizer.has_feedback:
        shardings = optimizer.shardings or [None] * len(leaves)
        feedback = [
            jnp.zeros(leaf.shape, jnp.float32, device=sharding)
            for leaf, sharding in zip(leaves, shardings, strict=True)
        ]
    if not is_new:
        files = engine.files
        feedback = [
            read_leaf(files, number, like, len(files.leaves[number].states) - 1)
            for number, like in enumerate(feedback)
        ]
    return InitResult(initial, stored, feedback)


def _first_params(
    leaves: Sequence[Any], inputs: Sequence[LeafInputs]
) -> Iterator[list[InitialParams]]:
    """Yields the shards of leaves, many small ones at once, a deferred leaf alone.

    The receiver empties the lists, so that a deferred leaf is free before the next is
    read.
    """
    group: list[InitialParams] = []
    num_bytes = 0
    for number, (leaf, leaf_inputs) in enumerate(zip(leaves, inputs, strict=True)):
        scalars = tuple(np.asarray(s) for s in leaf_inputs.scalars)
        for origin, shard in shards_with_origin(leaf):
            arrays = tuple(_part_of(a, origin, shard.shape) for a in leaf_inputs.arrays)
            shard_inputs = LeafInputs(scalars, arrays)
            group.append(InitialParams(number, shard, origin, shard_inputs))
            num_bytes += shard.nbytes
            del shard
            if isinstance(leaf, DeferredArray) or num_bytes > GROUP_BYTES:
                yield group
                group, num_bytes = [], 0
    if group:
        yield group


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
    optimizer: OffloadedOptimizer,
    description: StoreDescription,
    program: InitProgram,
    leaves: Sequence[jax.Array],
    shardings: tuple[NamedSharding, ...],
) -> InitResult:
    host = HostInit(optimizer, description)
    initial, inputs = program.prologue(leaves)
    calls = [
        LeafCall(number, leaf.shape, sharding, params=leaf)
        for number, (leaf, sharding) in enumerate(
            zip(leaves, shardings or [None] * len(leaves), strict=True)
        )
    ]
    dtypes = [np.float32 if optimizer.has_feedback else None] * len(leaves)
    store_leaves = optimizer.host.guarded(host.store_leaves)
    feedback, statuses = send_leaves(store_leaves, calls, dtypes, inputs)
    scalars = [key_data(value) for value in initial]
    counter = jax.ShapeDtypeStruct((), np.int32)
    stored = call_once(
        optimizer.host.guarded(host.finish),
        (jnp.concatenate(statuses), scalars),
        [counter, counter, *(jax.ShapeDtypeStruct(v.shape, v.dtype) for v in scalars)],
        mesh_of(shardings),
    )
    return InitResult(initial, stored, feedback if optimizer.has_feedback else [])
