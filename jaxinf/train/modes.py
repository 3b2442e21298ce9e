"""The three ways to train, each a function that returns what the loop calls.

                       params         optimizer's state
    `near_storage`     in memory      in the store
    `in_memory`        in memory      in memory, by plain optax
    `streamed`         in the store   in the store

Invariant: a step has the same effect in each; `step` says which have the same bits.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jaxinf_models import ModelConfig, deferred_params, make_model, split
from optax.contrib import ScheduleFreeState

from jaxinf.command_line import UsageError
from jaxinf.compress import sparsify
from jaxinf.engine import Store
from jaxinf.errors import NonFiniteGradientError, StreamError
from jaxinf.optimizer import smart_update
from jaxinf.streaming import StreamedStep, stream, stream_function
from jaxinf.train.config import TrainConfig
from jaxinf.train.data.loader import Batch
from jaxinf.train.devices import Devices, placed
from jaxinf.train.freezing import check_source
from jaxinf.train.lora import Lora, with_new
from jaxinf.train.metrics import NO_TRAFFIC, Costs
from jaxinf.train.opening import (
    begin,
    costs_of,
    open_run,
    refused_as_usage,
    stored_bytes,
)
from jaxinf.train.optimizers import behind_clipping, make_clipping, make_optimizer
from jaxinf.train.step import compile_train_step, loss_of, weight_of_part
from jaxinf.typing import DeferredArray, PyTree

# Share of the budget for pieces read and traced programs during an import.
_IMPORT_BYTES, _IMPORT_LEAF_BYTES = 4 << 20, 64 << 10
_FLAGS = {  # of arguments of `jaxinf.stream`
    "device_memory_bytes": "--device-memory",
    "memory_bytes": "--memory",
    "device_updates": "--device-updates",
    "replan=True": "--elastic",
}


class Done(NamedTuple):
    """What a step has done; its commit may still be in flight.

    Attributes:
      loss: of the batch, before the update.
      norm: of all gradients; None where they never exist at once.
      is_skipped: whether a gradient was not finite, so that nothing was updated.
      costs: blocks until the step is durable.
    """

    loss: float
    norm: float | None
    is_skipped: bool
    costs: Costs


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mode:
    """What the loop calls.

    Attributes:
      compile: returns the step for batches like this one.
      function: makes a function of params and inputs to evaluate them by.
      params: returns the params to evaluate, which may be their average; None if they
        are never in memory.
      is_joint: whether all processes call such a function together.
      state: returns the optimizer's state, for a checkpoint to wait for.
      close: frees what it holds.
    """

    compile: Callable[[Batch], Callable[[Batch], Done]]
    function: Callable[[Callable[[PyTree, Any], Any]], Callable[[PyTree, Any], Any]]
    params: Callable[[], PyTree] = lambda: None
    is_joint: bool = False
    state: Callable[[], Any] = lambda: None
    close: Callable[[], None] = lambda: None


def first_params(config: TrainConfig) -> PyTree:
    """Returns new params, or those of a checkpoint as deferred leaves."""
    adapters = config.adapters
    if config.source is None:
        return _new_params(config.model_config, config.seed, adapters)
    assert config.files is not None
    params = deferred_params(config.files, config.model_config, config.seed)
    check_source(config.frozen, params, config.source)
    return params if adapters is None else with_new(adapters, params, config.seed)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _new_params(model: ModelConfig, seed: int, adapters: Lora | None) -> PyTree:
    params = split(make_model(model, rngs=nnx.Rngs(seed)))[1]
    return params if adapters is None else with_new(adapters, params, seed)


# --- the optimizer's state near storage ----------------------------------------------


def near_storage(config: TrainConfig, store: Store, devices: Devices) -> Mode:
    """Trains with the optimizer's state in a store; params are in memory, too."""
    tx, like = store_optimizer(config, store), devices.shapes(config.abstract[1])
    if store.step > 0:
        params = store.params(like=like)
        state = tx.init(params)
    else:
        params = placed(first_params(config), like)
        state = begin(config, store, functools.partial(tx.init, params))
        if any(isinstance(leaf, DeferredArray) for leaf in jax.tree.leaves(params)):
            params = store.params(like=like)
    drive_bytes = stored_bytes(store)

    def costs(state: Any) -> Costs:
        return functools.partial(costs_of, store, int(state.step), drive_bytes)

    return _with_params(
        *(config, tx, params, state),
        # With clipping, updates wait for all gradients in any case, so a program of
        # their own costs almost nothing. Compression needs finished gradients, too.
        is_fused=not (config.clip_norm or config.compress),
        num_skipped=lambda state: int(state.skipped_steps),
        costs=costs,
        average=lambda params, state: store.params(params, average=True, state=state),
    )


def store_optimizer(
    config: TrainConfig, store: Store
) -> optax.GradientTransformationExtraArgs:
    """Returns the run's optimizer with its state in a store.

    Raises:
      UsageError: the optimizer cannot run so.
    """
    try:
        tx = smart_update(
            make_optimizer(config),
            store,
            average=config.average,
            compress=config.compression,
            nonfinite=config.nonfinite,
            updates="float32",  # a resumed run has the params of the store
        )
    except ValueError as error:
        raise UsageError(f"--compress {config.compress}: {error}") from error
    return tx if config.compress is None else behind_clipping(config, tx)


def import_weights(config: TrainConfig) -> int:
    """Makes the store from a checkpoint's weights, one leaf at a time.

    Returns:
      The step of the store.

    Raises:
      UsageError: the store has a run already.
    """
    params = first_params(config)
    aside_bytes = _IMPORT_BYTES + _IMPORT_LEAF_BYTES * len(jax.tree.leaves(params))
    aside_bytes = min(aside_bytes, config.buffer_bytes // 4)
    config = dataclasses.replace(config, memory=config.buffer_bytes - aside_bytes)
    with contextlib.closing(open_run(config, Devices())) as store:
        tx = store_optimizer(config, store)
        if store.step:
            raise UsageError(
                f"--steps 0: {config.store} is at step {store.step} already; give a "
                "--store that is new"
            )
        begin(config, store, functools.partial(tx.init, params))
        return store.step


def _with_params(
    config: TrainConfig,
    tx: optax.GradientTransformation,
    params: PyTree,
    state: Any,
    *,
    is_fused: bool = False,
    num_skipped: Callable[[Any], int],
    average: Callable[[PyTree, Any], PyTree],
    costs: Callable[[Any], Costs] = lambda state: lambda: NO_TRAFFIC,
) -> Mode:
    """Trains params in memory by an optax transformation.

    Args:
      num_skipped: returns the number of steps that a state has skipped.
      average: returns the average of params, given them and the state.
      costs: returns those of the step that made a state; by default none.
    """
    skipped = num_skipped(state)

    def compile(batch: Batch) -> Callable[[Batch], Done]:
        (graphdef, _), example = config.abstract, (params, state, batch)
        train_step = compile_train_step(
            config, graphdef, tx, *example, is_fused=is_fused
        )

        def step(batch: Batch) -> Done:
            nonlocal params, state, skipped
            params, state, (loss, norm) = jax.block_until_ready(
                train_step(params, state, batch)
            )
            before, skipped = skipped, num_skipped(state)
            is_skipped = skipped > before
            found = (lambda: NO_TRAFFIC) if is_skipped else costs(state)
            return Done(float(loss), float(norm), is_skipped, found)

        return step

    def evaluated() -> PyTree:
        return average(params, state) if config.evaluates_average else params

    return Mode(
        compile=compile, function=jax.jit, params=evaluated, state=lambda: state
    )


# --- all in memory, the baseline -----------------------------------------------------


def in_memory(config: TrainConfig) -> Mode:
    """Trains by plain optax, which treats non-finite gradients like `smart_update`.

    Losses are the other modes' to the bit, as no jit computes an update and adds it.
    """
    tx = make_optimizer(config)
    if config.compression is not None:
        tx = optax.chain(make_clipping(config), sparsify(config.compression), tx)
    tx = optax.apply_if_finite(tx, max_consecutive_errors=2**31 - 1)

    def num_skipped(state: Any) -> int:
        if (num := int(state.total_notfinite)) and config.nonfinite == "error":
            raise NonFiniteGradientError(
                "NaN or Inf in a gradient: the run ends before it reaches the params. "
                "Lower the learning rate or clip the gradients, or give --nonfinite "
                "skip to go on without such batches"
            )
        return num

    params = held_params(first_params(config))
    state = jax.jit(tx.init)(params)
    return _with_params(
        *(config, tx, params, state),
        num_skipped=num_skipped,
        average=_schedule_free_average,
    )


def held_params(params: PyTree) -> PyTree:
    """Reads params onto the JAX device, unless they are there."""
    return jax.tree.map(
        lambda x: x if isinstance(x, jax.Array) else jnp.asarray(np.asarray(x)), params
    )


def _schedule_free_average(params: PyTree, state: Any) -> PyTree:
    """Returns a schedule-free optimizer's average; `check` refuses --ema in memory."""

    leaves = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, ScheduleFreeState))
    (held,) = [one for one in leaves if isinstance(one, ScheduleFreeState)]

    def averaged(y: jax.Array, z: Any) -> jax.Array:
        is_frozen = isinstance(z, optax.MaskedNode)
        return y if is_frozen else (y - (1 - held.b1) * z) / held.b1

    return jax.tree.map(averaged, params, held.z)


# --- params and state in the store ---------------------------------------------------


def streamed(config: TrainConfig, store: Store, devices: Devices, first: Batch) -> Mode:
    """Trains params and state that are in a store, and nowhere else.

    Args:
      first: a batch; only its shapes count.
    """
    step, like = streamed_step(config, store), devices.shapes(config.abstract[1])

    def make() -> None:  # no more than a leaf is in memory
        shardings: PyTree = jax.tree.map(lambda leaf: leaf.sharding, like)
        shardings = shardings if jax.tree.leaves(shardings) else None
        if config.source is None:
            new = functools.partial(first_params, config)
            step.init(new, batch=first, shardings=shardings)
        else:
            step.load(first_params(config), batch=first, shardings=shardings)

    with contextlib.ExitStack() as undone:
        undone.callback(step.close)
        with refused_as_usage(), named_flags():
            if store.step > 0:
                step.load(like)  # only compared: the store has them
            else:
                begin(config, store, make)
        undone.pop_all()
    number, skipped, drive_bytes = store.step, step.num_skipped, stored_bytes(store)
    functions: list[StreamedStep] = []  # in the step's memory, in turns with it

    def run(batch: Batch) -> Done:
        nonlocal number, skipped
        for made in functions:
            made.rest()
        loss, _ = jax.block_until_ready(step(batch))
        before, skipped = skipped, step.num_skipped
        is_skipped = skipped > before
        number += not is_skipped
        costs = _streamed_costs(step, None if is_skipped else number, drive_bytes)
        return Done(float(loss), None, is_skipped, costs)

    def compile(batch: Batch) -> Callable[[Batch], Done]:
        with named_flags():
            step.compile(batch)
        return run

    def function(fn: Callable[[PyTree, Any], Any]) -> Callable[[PyTree, Any], Any]:
        assert config.memory is not None
        made = stream_function(
            fn,
            store,
            memory_bytes=config.memory,
            device_memory_bytes=config.device_memory,
            average=config.evaluates_average,
        )
        made.load(like)
        functions.append(made)

        def call(params: PyTree, inputs: Any) -> Any:
            step.rest()
            with named_flags():
                return devices.whole(made(devices.spread(inputs)))

        return call

    def close() -> None:
        for made in (*functions, step):
            made.close()

    return Mode(compile=compile, function=function, is_joint=True, close=close)


def streamed_step(config: TrainConfig, store: Store) -> StreamedStep:
    """Returns the step of a run whose params and state are in a store.

    Raises:
      UsageError: the run cannot be streamed.
    """
    assert config.memory is not None
    optimizer = make_optimizer(config)
    if config.compress is not None:
        optimizer = behind_clipping(config, optimizer)
    try:
        with named_flags():
            return stream(
                loss_of(config, config.abstract[0]),
                optimizer,
                store,
                memory_bytes=config.memory,
                device_memory_bytes=config.device_memory,
                policy=config.policy or "recompute",
                micro_batches=config.micro_batches,
                weights=weight_of_part if config.micro_batches > 1 else None,
                replan=config.elastic,
                nonfinite=config.nonfinite,
                average=config.average,
                compress=config.compression,
                device_updates=config.device_updates,
            )
    except ValueError as error:
        raise UsageError(f"--mode stream: {error}") from error


def _streamed_costs(step: StreamedStep, number: int | None, drive_bytes: int) -> Costs:
    """Returns the costs of the last step; `number` is None if it was skipped."""
    metrics = step.metrics
    assert metrics is not None
    waited_s = metrics.waited_params_s + metrics.waited_values_s
    found = {
        "stream": dataclasses.asdict(metrics),
        "phases": {"wait": round(waited_s + metrics.waited_updates_s, 6)},
    }
    if number is None:
        return lambda: NO_TRAFFIC | found
    drive_bytes += metrics.spilled_drive_bytes + metrics.offloaded_drive_bytes
    return lambda: costs_of(step.store, number, drive_bytes) | found


@contextlib.contextmanager
def named_flags() -> Iterator[None]:
    """Makes a refusal name the flags, not the arguments of `jaxinf.stream`."""
    try:
        yield
    except StreamError as error:
        text = str(error)
        for argument, flag in _FLAGS.items():
            text = text.replace(argument, flag)
        raise StreamError(text) from error
