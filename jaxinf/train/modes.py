"""Functions that train for the loop, params in memory or streamed from a store.

                   params         optimizer's state
    ``update``     in memory      in the store
    ``memory``     in memory      in memory, by plain optax
    ``stream``     in the store   in the store

Invariant: a step has the same effect in each; `step` says which have the same bits.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxinf_models import ModelConfig, deferred_params, make_model, split

from jaxinf.engine import Store
from jaxinf.errors import NonFiniteGradientError
from jaxinf.optimizer import smart_update
from jaxinf.streaming import StreamedStep, stream, stream_function
from jaxinf.train.config import TrainConfig
from jaxinf.train.data.loader import Batch
from jaxinf.train.devices import Devices, placed
from jaxinf.train.freezing import check_source
from jaxinf.train.lora import Lora, with_new
from jaxinf.train.opening import named_flags
from jaxinf.train.optimizers import (
    behind_clipping,
    make_optimizer,
    memory_optimizer,
    schedule_free_average,
)
from jaxinf.train.step import compile_train_step, loss_of, weight_of_part
from jaxinf.typing import DeferredArray, PyTree


class Done(NamedTuple):
    """The results of a step, whose commit may still be in flight.

    The loss is that of the batch before the update, the norm that of all gradients, if
    they exist at once. A step is skipped if one of them is not finite. `stream` is what
    a streamed one has moved and waited for.
    """

    loss: float
    norm: float | None
    is_skipped: bool
    stream: Mapping[str, Any] | None = None


@dataclasses.dataclass(frozen=True)
class Mode:
    """The functions that the loop calls.

    Attributes:
      compile: returns the step for batches like this one.
      function: makes a function of params and inputs to evaluate them by, which all
        processes call together.
      params: returns the params to evaluate, which may be their average; None if they
        are never in memory.
      state: returns the optimizer's state, for a checkpoint to wait for.
    """

    compile: Callable[[Batch], Callable[[Batch], Done]]
    function: Callable[[Callable[[PyTree, Any], Any]], Callable[[PyTree, Any], Any]]
    params: Callable[[], PyTree] = lambda: None
    state: Callable[[], Any] = lambda: None


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


def held_params(params: PyTree) -> PyTree:
    """Reads params onto the JAX device, unless they are there."""
    return jax.tree.map(
        lambda x: x if isinstance(x, jax.Array) else jnp.asarray(np.asarray(x)), params
    )


# --- params in memory ----------------------------------------------------------------


@named_flags()
def in_memory(config: TrainConfig, store: Store | None, devices: Devices) -> Mode:
    """Trains params in memory; the optimizer's state is in a store, or beside them."""
    if store is None:
        tx, params = memory_optimizer(config), held_params(first_params(config))
        state = jax.jit(tx.init)(params)
    else:
        offloaded = smart_update(
            make_optimizer(config),
            store,
            average=config.average,
            compress=config.compression,
            nonfinite=config.nonfinite,
            updates="float32",  # a resumed run has the params of the store
        )
        tx = behind_clipping(config, offloaded)
        like = devices.shapes(config.abstract[1])
        if store.step > 0:
            params = store.params(like=like)
            state = tx.init(params)
        else:
            params = placed(first_params(config), like)
            state = tx.init(params)
            if any(isinstance(leaf, DeferredArray) for leaf in jax.tree.leaves(params)):
                params = store.params(like=like)
    # With clipping, updates wait for all gradients in any case, so a program of their
    # own costs almost nothing. Compression needs finished gradients, too. In memory it
    # keeps the bits, as no jit computes an update and adds it.
    is_fused = store is not None and not (config.clip_norm or config.compress)
    skipped = _num_skipped(config, state)

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
            before, skipped = skipped, _num_skipped(config, state)
            return Done(float(loss), float(norm), skipped > before)

        return step

    def function(fn: Callable[[PyTree, Any], Any]) -> Callable[[PyTree, Any], Any]:
        jitted = jax.jit(fn)
        return lambda params, inputs: jitted(params, devices.spread(inputs))

    def evaluated() -> PyTree:
        if not config.evaluates_average:
            return params
        if store is None:  # `check` refuses --ema
            return schedule_free_average(params, state)
        return store.params(params, average=True, state=state)

    return Mode(compile, function, evaluated, lambda: state)


def _num_skipped(config: TrainConfig, state: Any) -> int:
    """Returns the steps that were skipped; raises in memory, as a store's update."""
    if config.mode == "update":
        return int(state.skipped_steps)
    if (num := int(state.total_notfinite)) and config.nonfinite == "error":
        raise NonFiniteGradientError(
            "NaN or Inf in a gradient: the run ends before it reaches the params. "
            "Lower the learning rate or clip the gradients, or give --nonfinite "
            "skip to go on without such batches"
        )
    return num


# --- params in the store -------------------------------------------------------------


@named_flags()
def streamed(
    config: TrainConfig,
    store: Store,
    devices: Devices,
    first: Batch,
    stack: contextlib.ExitStack,
) -> Mode:
    """Trains params and state that are in a store, and nowhere else.

    Args:
      first: a batch; only its shapes count.
      stack: frees what it holds.
    """
    step, like = streamed_step(config, store), devices.shapes(config.abstract[1])
    stack.callback(step.close)

    shardings: PyTree = jax.tree.map(lambda leaf: leaf.sharding, like)
    shardings = shardings if jax.tree.leaves(shardings) else None
    if store.step > 0:
        step.load(like)  # only compared: the store has them
    elif config.source is None:  # no more than a leaf is in memory
        new = functools.partial(first_params, config)
        step.init(new, batch=first, shardings=shardings)
    else:
        step.load(first_params(config), batch=first, shardings=shardings)
    skipped = step.skipped_steps
    functions: list[StreamedStep] = []  # in the step's memory, in turns with it

    def run(batch: Batch) -> Done:
        nonlocal skipped
        for made in functions:
            made.free_memory()
        loss, _ = jax.block_until_ready(step(batch))
        before, skipped, metrics = skipped, step.skipped_steps, step.metrics
        assert metrics is not None
        return Done(float(loss), None, skipped > before, dataclasses.asdict(metrics))

    @named_flags()
    def compile(batch: Batch) -> Callable[[Batch], Done]:
        step.compile(batch)
        return run

    @named_flags()
    def function(fn: Callable[[PyTree, Any], Any]) -> Callable[[PyTree, Any], Any]:
        assert config.memory is not None
        made = stream_function(
            fn,
            store,
            memory_bytes=config.memory,
            device_memory_bytes=config.device_memory,
            average=config.evaluates_average,
        )
        stack.callback(made.close)
        made.load(like)
        functions.append(made)

        def call(params: PyTree, inputs: Any) -> Any:
            step.free_memory()
            return made(devices.spread(inputs))

        return call

    return Mode(compile, function)


def streamed_step(config: TrainConfig, store: Store) -> StreamedStep:
    """Returns the step of a run whose params and state are in a store."""
    assert config.memory is not None
    return stream(
        loss_of(config, config.abstract[0]),
        behind_clipping(config, make_optimizer(config)),
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
