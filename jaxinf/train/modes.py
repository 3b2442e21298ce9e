"""The ways to train, each a function that returns what the loop calls.

                       params         optimizer's state
    `near_storage`     in memory      in the store
    `in_memory`        in memory      in memory, by plain optax
    `streamed`         in the store   in the store

Invariant: a step has the same effect in each; `step` says which have the same bits.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import optax
from flax import nnx
from jaxinf_models import ModelConfig, deferred_params, make_model, split

from jaxinf.command_line import UsageError
from jaxinf.engine import Store
from jaxinf.optimizer import smart_update
from jaxinf.train.config import TrainConfig
from jaxinf.train.data.loader import Batch
from jaxinf.train.devices import Devices, placed
from jaxinf.train.freezing import check_source
from jaxinf.train.lora import Lora, with_new
from jaxinf.train.metrics import NO_TRAFFIC, Costs
from jaxinf.train.opening import begin, costs_of, open_run, stored_bytes
from jaxinf.train.optimizers import behind_clipping, make_optimizer
from jaxinf.train.step import Boundaries, compile_train_step
from jaxinf.typing import DeferredArray, JsonValue, PyTree

# Share of the budget for pieces read and traced programs during an import.
_IMPORT_BYTES, _IMPORT_LEAF_BYTES = 4 << 20, 64 << 10


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

    # With clipping, updates wait for all gradients in any case, so a separate jit
    # costs almost nothing. Compression needs finished gradients, too.
    needs_all = config.clip_norm or config.compress
    return with_params(
        *(config, tx, params, state, "halves" if needs_all else "fused"),
        num_skipped=lambda state: int(state.skipped_steps),
        costs=costs,
        average=functools.partial(store.params, average=True),
    )


def with_params(
    config: TrainConfig,
    tx: optax.GradientTransformation,
    params: PyTree,
    state: Any,
    boundaries: Boundaries,
    *,
    num_skipped: Callable[[Any], int],
    average: Callable[..., PyTree],
    costs: Callable[[Any], Costs] = lambda state: lambda: NO_TRAFFIC,
) -> Mode:
    """Trains params in memory by an optax transformation.

    Args:
      num_skipped: returns the number of steps that a state has skipped.
      average: returns the average of params, given them and `state`.
      costs: returns those of the step that made a state; by default none.
    """
    skipped = num_skipped(state)

    def compile(batch: Batch) -> Callable[[Batch], Done]:
        graphdef, _ = config.abstract
        example = params, state, batch
        train_step = compile_train_step(config, graphdef, tx, boundaries, *example)

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
        return average(params, state=state) if config.evaluates_average else params

    return Mode(
        compile=compile, function=jax.jit, params=evaluated, state=lambda: state
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


def import_weights(config: TrainConfig, kept: Mapping[str, JsonValue]) -> int:
    """Makes the store from a checkpoint's weights, one leaf at a time.

    Args:
      kept: as of `open_run`.

    Returns:
      The step of the store.

    Raises:
      UsageError: the store has a run already.
    """
    params = first_params(config)
    aside_bytes = _IMPORT_BYTES + _IMPORT_LEAF_BYTES * len(jax.tree.leaves(params))
    aside_bytes = min(aside_bytes, config.buffer_bytes // 4)
    config = dataclasses.replace(config, memory=config.buffer_bytes - aside_bytes)
    with contextlib.closing(open_run(config, Devices(), kept)) as store:
        tx = store_optimizer(config, store)
        if store.step:
            raise UsageError(
                f"--steps 0: {config.store} is at step {store.step} already; give a "
                "--store that is new"
            )
        begin(config, store, functools.partial(tx.init, params))
        return store.step


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
