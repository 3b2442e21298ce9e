"""How a run trains: with params in memory, or streamed from a store.

    --mode     params         optimizer's state
    update     in memory      in the store
    memory     in memory      in memory, by plain optax
    stream     in the store   in the store

Both classes have the methods that the loop calls: `compile_step`, `compile_function`,
`evaluation_params` and `optimizer_state`.

Invariant: a step has the same effect in each mode; `jaxinf.train.step` says which modes
have the same bits.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias

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
from jaxinf.train.devices import Devices, place_arrays
from jaxinf.train.freezing import check_frozen_source
from jaxinf.train.lora import Lora, add_adapters
from jaxinf.train.opening import name_flags_in_errors
from jaxinf.train.optimizers import (
    clip_first,
    make_memory_optimizer,
    make_optimizer,
    schedule_free_average,
)
from jaxinf.train.step import compile_train_step, make_loss_fn, micro_batch_weight
from jaxinf.typing import DeferredArray, PyTree


class StepResult(NamedTuple):
    """The results of a step, whose commit may still be in flight.

    The loss is that of the batch before the update. The norm is None if gradients never
    exist at once, as in a streamed step, whose metrics are `stream`.
    """

    loss: float
    norm: float | None
    is_skipped: bool
    stream: Mapping[str, Any] | None = None


Step: TypeAlias = Callable[[Batch], StepResult]
EvaluationFn: TypeAlias = Callable[[PyTree, Any], Any]
"""A function of params and a batch's inputs, which all processes call together."""


def make_initial_params(config: TrainConfig) -> PyTree:
    """Returns new params, or those of a checkpoint as deferred leaves."""
    adapters = config.adapters
    if config.source is None:
        return _init_params(config.model_config, config.seed, adapters)
    assert config.files is not None
    params = deferred_params(config.files, config.model_config, config.seed)
    check_frozen_source(config.frozen, params, config.source)
    return params if adapters is None else add_adapters(adapters, params, config.seed)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _init_params(model: ModelConfig, seed: int, adapters: Lora | None) -> PyTree:
    params = split(make_model(model, rngs=nnx.Rngs(seed)))[1]
    return params if adapters is None else add_adapters(adapters, params, seed)


def materialize(params: PyTree) -> PyTree:
    """Reads deferred leaves onto the JAX device."""
    return jax.tree.map(
        lambda x: x if isinstance(x, jax.Array) else jnp.asarray(np.asarray(x)), params
    )


class InMemoryTraining:
    """Trains params in memory; without a store, the optimizer's state is there, too."""

    @name_flags_in_errors()
    def __init__(
        self, config: TrainConfig, store: Store | None, devices: Devices
    ) -> None:
        self._config, self._store, self._devices = config, store, devices
        if store is None:
            self._tx = make_memory_optimizer(config)
            self._params = materialize(make_initial_params(config))
            self._state = jax.jit(self._tx.init)(self._params)
        else:
            near_storage = smart_update(
                make_optimizer(config),
                store,
                average=config.average,
                compress=config.compression,
                nonfinite=config.nonfinite,
                updates="float32",  # a resumed run has the params of the store
            )
            self._tx = clip_first(config, near_storage)
            self._params, self._state = self._load_or_init(store)
        self._num_skipped = self._count_skipped()

    def _load_or_init(self, store: Store) -> tuple[PyTree, Any]:
        like = self._devices.add_shardings(self._config.abstract[1])
        if store.step > 0:
            params = store.params(like=like)
            return params, self._tx.init(params)
        params = place_arrays(make_initial_params(self._config), like)
        state = self._tx.init(params)
        if any(isinstance(leaf, DeferredArray) for leaf in jax.tree.leaves(params)):
            params = store.params(like=like)
        return params, state

    def compile_step(self, batch: Batch) -> Step:
        config = self._config
        # With clipping, updates wait for all gradients in any case, so a program of
        # their own costs almost nothing. Compression needs finished gradients, too. In
        # memory it keeps the bits, as no jit computes an update and adds it.
        reduces = bool(config.clip_norm or config.compress)
        is_fused = self._store is not None and not reduces
        graphdef, example = config.abstract[0], (self._params, self._state, batch)
        train_step = compile_train_step(
            config, graphdef, self._tx, *example, is_fused=is_fused
        )

        def step(batch: Batch) -> StepResult:
            self._params, self._state, (loss, norm) = jax.block_until_ready(
                train_step(self._params, self._state, batch)
            )
            before, self._num_skipped = self._num_skipped, self._count_skipped()
            return StepResult(float(loss), float(norm), self._num_skipped > before)

        return step

    def _count_skipped(self) -> int:
        """Returns the number of skipped steps; in memory it refuses the first.

        Near storage `smart_update` does that.
        """
        if self._store is not None:
            return int(self._state.skipped_steps)
        num_skipped = int(self._state.total_notfinite)
        if num_skipped and self._config.nonfinite == "error":
            raise NonFiniteGradientError(
                "NaN or Inf in a gradient: the run ends before it reaches the params. "
                "Lower the learning rate or clip the gradients, or give --nonfinite "
                "skip to go on without such batches"
            )
        return num_skipped

    def compile_function(self, fn: EvaluationFn) -> EvaluationFn:
        jitted = jax.jit(fn)
        return lambda params, inputs: jitted(params, self._devices.shard_batch(inputs))

    def evaluation_params(self) -> PyTree:
        """Returns the params to evaluate, which may be their average."""
        if not self._config.evaluates_average:
            return self._params
        if self._store is None:  # `check` refuses --ema
            return schedule_free_average(self._params, self._state)
        return self._store.params(self._params, average=True, state=self._state)

    def optimizer_state(self) -> Any:
        """Returns the state, for a checkpoint to wait for."""
        return self._state


class StreamedTraining:
    """Trains params and state that are in a store, and nowhere else.

    Of the batch only shapes count; `stack` frees the memory of steps and functions.
    """

    @name_flags_in_errors()
    def __init__(
        self,
        config: TrainConfig,
        store: Store,
        devices: Devices,
        batch: Batch,
        stack: contextlib.ExitStack,
    ) -> None:
        self._config, self._store, self._devices = config, store, devices
        self._like = devices.add_shardings(config.abstract[1])
        self._step, self._stack = make_streamed_step(config, store), stack
        stack.callback(self._step.close)
        self._load_or_init(batch)
        self._num_skipped = self._step.skipped_steps
        self._functions: list[StreamedStep] = []  # in the step's memory, in turns

    def _load_or_init(self, batch: Batch) -> None:
        step, config = self._step, self._config
        shardings: PyTree = jax.tree.map(lambda leaf: leaf.sharding, self._like)
        shardings = shardings if jax.tree.leaves(shardings) else None
        if self._store.step > 0:
            step.load(self._like)  # only compared: the store has them
        elif config.source is None:  # no more than a leaf is in memory
            make = functools.partial(make_initial_params, config)
            step.init(make, batch=batch, shardings=shardings)
        else:
            step.load(make_initial_params(config), batch=batch, shardings=shardings)

    @name_flags_in_errors()
    def compile_step(self, batch: Batch) -> Step:
        self._step.compile(batch)
        return self._run_step

    def _run_step(self, batch: Batch) -> StepResult:
        for function in self._functions:
            function.free_memory()
        loss, _ = jax.block_until_ready(self._step(batch))
        before, self._num_skipped = self._num_skipped, self._step.skipped_steps
        metrics, is_skipped = self._step.metrics, self._num_skipped > before
        assert metrics is not None
        return StepResult(float(loss), None, is_skipped, dataclasses.asdict(metrics))

    @name_flags_in_errors()
    def compile_function(self, fn: EvaluationFn) -> EvaluationFn:
        config = self._config
        assert config.memory is not None
        function = stream_function(
            fn,
            self._store,
            memory_bytes=config.memory,
            device_memory_bytes=config.device_memory,
            average=config.evaluates_average,
        )
        self._stack.callback(function.close)
        function.load(self._like)
        self._functions.append(function)

        def call(params: PyTree, inputs: Any) -> Any:
            self._step.free_memory()
            return function(self._devices.shard_batch(inputs))

        return call

    def evaluation_params(self) -> None:
        """Returns None: a streamed function reads the store's params."""

    def optimizer_state(self) -> None:
        """Returns None: a checkpoint waits for the store."""


def make_streamed_step(config: TrainConfig, store: Store) -> StreamedStep:
    assert config.memory is not None
    return stream(
        make_loss_fn(config, config.abstract[0]),
        clip_first(config, make_optimizer(config)),
        store,
        memory_bytes=config.memory,
        device_memory_bytes=config.device_memory,
        policy=config.policy or "recompute",
        micro_batches=config.micro_batches,
        weights=micro_batch_weight if config.micro_batches > 1 else None,
        replan=config.elastic,
        nonfinite=config.nonfinite,
        average=config.average,
        compress=config.compression,
        device_updates=config.device_updates,
    )
