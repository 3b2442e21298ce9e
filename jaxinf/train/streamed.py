"""Training of a model that need not fit in memory, with `jaxinf.stream`.

Invariant: params and optimizer state exist in the store alone.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax

from jaxinf.command_line import UsageError
from jaxinf.engine import Store
from jaxinf.errors import AssignmentError, BudgetError, StreamError
from jaxinf.streaming import StreamedStep, stream
from jaxinf.train.config import TrainConfig
from jaxinf.train.data.loader import Batch
from jaxinf.train.devices import Devices
from jaxinf.train.metrics import NO_TRAFFIC, Costs
from jaxinf.train.modes import Done, Mode, first_params
from jaxinf.train.opening import begin, costs_of, refused_as_usage, stored_bytes
from jaxinf.train.optimizers import behind_clipping, make_optimizer
from jaxinf.train.step import loss_of, weight_of_part
from jaxinf.typing import PyTree

_FLAGS = {"memory_bytes": "--memory", "device_memory_bytes": "--device-memory"}


def streamed(config: TrainConfig, store: Store, devices: Devices, first: Batch) -> Mode:
    """Trains params and state that are in a store.

    Args:
      first: a batch; only its shapes count.
    """
    step, like = streamed_step(config, store), devices.shapes(config.abstract[1])
    with contextlib.ExitStack() as undone:
        undone.callback(step.close)
        with refused_as_usage(), named_flags():
            if store.step > 0:
                step.load(like)  # only compared: the store has them
            else:
                begin(config, store, partial(_make, config, step, like, first))
        undone.pop_all()
    number, skipped = store.step, step.num_skipped
    drive_bytes = stored_bytes(store)

    def run(batch: Batch) -> Done:
        nonlocal number, skipped
        loss, _ = jax.block_until_ready(step(batch))
        before, skipped = skipped, step.num_skipped
        is_skipped = skipped > before
        number += not is_skipped
        costs = _costs(step, None if is_skipped else number, drive_bytes)
        return Done(float(loss), None, is_skipped, costs)

    def compile(batch: Batch) -> Callable[[Batch], Done]:
        with named_flags():
            step.compile(batch)
        return run

    def function(fn: Callable[[PyTree, Any], Any]) -> Callable[[PyTree, Any], Any]:
        made = step.function(fn, average=config.evaluates_average)

        def call(params: PyTree, inputs: Any) -> Any:
            with named_flags():
                return devices.whole(made(devices.spread(inputs)))

        return call

    return Mode(compile=compile, function=function, is_joint=True, close=step.close)


def _make(config: TrainConfig, step: StreamedStep, like: PyTree, first: Batch) -> None:
    """Makes the store of new params, of which no more than a leaf is in memory."""
    shardings: PyTree = jax.tree.map(lambda leaf: leaf.sharding, like)
    shardings = shardings if jax.tree.leaves(shardings) else None
    if config.source is None:
        new = partial(first_params, config)
        step.init(new, batch=first, shardings=shardings)
    else:
        step.load(first_params(config), batch=first, shardings=shardings)


def streamed_step(config: TrainConfig, store: Store) -> StreamedStep:
    """Returns the step of a run whose params and state are in a store.

    Raises:
      UsageError: the run cannot be streamed.
    """
    graphdef, _ = config.abstract
    assert config.memory is not None
    optimizer = make_optimizer(config)
    if config.compress is not None:
        optimizer = behind_clipping(config, optimizer)
    try:
        return stream(
            loss_of(config, graphdef),
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


def _costs(step: StreamedStep, number: int | None, drive_bytes: int) -> Costs:
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
    except BudgetError as error:
        raise StreamError(_as_flags(error._text(_FLAGS))) from error
    except AssignmentError as error:
        text = error._text("--device-updates ", "--elastic")
        raise StreamError(text) from error
    except StreamError as error:
        raise StreamError(_as_flags(str(error))) from error


def _as_flags(text: str) -> str:
    return text.replace("pass replan=True", "give --elastic")
