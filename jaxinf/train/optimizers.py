"""The optax optimizer of a config, its learning rates, and the defaults of both.

Invariant: optax is the only definition of an optimizer, and all modes use the same. A
default is a function of the config alone, never of the number of steps. So a run with a
constant rate that is made longer keeps its steps.
"""

import ast
import dataclasses
import inspect
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import optax.contrib
from jaxinf_models import num_params

from jaxinf.command_line import UsageError, did_you_mean
from jaxinf.compress import sparsify
from jaxinf.store import SCHEDULE_FREE, schedule_free_params
from jaxinf.train.config import TrainConfig
from jaxinf.train.freezing import limit_to_trained
from jaxinf.typing import JsonValue, PyTree

_MOMENTUM = 0.9
_RATES = ("learning_rate", "max_learning_rate")

# nano: measured over 1,000 steps of the default run, 2e-3 ends at 1.97, 3e-3 at 1.99
# and 5e-3 at 2.43. The others: Brown et al. 2020 (GPT-3), table 2.1, at the sizes that
# lie between these bounds.
_LEARNING_RATES = {
    20e6: 2e-3,
    250e6: 6e-4,
    600e6: 3e-4,
    1.2e9: 2.5e-4,
    5e9: 2e-4,
    math.inf: 1.2e-4,
}
_WEIGHT_DECAY = 0.1  # GPT-3, and every GPT-2 reproduction since
_NUM_WARMUP_STEPS = 50
_COSINE_FLOOR = 0.1  # of the peak, as in GPT-3
# Of all steps, as in Hägele et al. 2024 (arXiv:2405.18392), section 4.
_STABLE_SHARE = 0.8

# Weights that are learned already. A tenth of the rates above lies within the 2e-5 to
# 5e-5 of Devlin et al. 2019 (BERT) for 250 M and more, and near the 2e-5 of Llama 2
# (Touvron et al. 2023, section 3.1) at 7 B. Decay would pull weights from theirs to 0.
# Adapters are new, and have the rates above.
_FINE_TUNING_SHARE = 0.1
_FINE_TUNING_DECAY = 0.0
_FINE_TUNING_WARMUP_STEPS = 30  # 3 % of the default number of steps


def check_optimizer(config: TrainConfig) -> None:
    """Refuses an unknown optimizer, or arguments that optax does not take.

    One that cannot run near storage is refused when its store is made.
    """
    _find_optimizer(config.optimizer)
    if config.learning_rate is None and config.optimizer not in ("adam", "adamw"):
        raise UsageError(
            f"--learning-rate: expected with --optimizer {config.optimizer}, which has "
            "no default here"
        )
    params = jax.eval_shape(
        lambda: {"kernel": jnp.ones((256, 256)), "bias": jnp.ones(256)}
    )
    try:
        optimizer = make_optimizer(dataclasses.replace(config, lora=None))
        state = jax.eval_shape(optimizer.init, params)
        jax.eval_shape(optimizer.update, params, state, params)
    except UsageError:
        raise
    except Exception as error:  # optax may raise anything for bad arguments
        raise UsageError(
            f"--optimizer {' '.join((config.optimizer, *config.optimizer_args))}: "
            "expected arguments that optax takes, and an optimizer that trains on "
            f"gradients and params alone; optax says: {error}"
        ) from error


def make_optimizer(config: TrainConfig) -> optax.GradientTransformation:
    """Makes the optimizer with its schedule, behind clipping.

    If gradients are compressed, the clipping is left out, because it must come first:
    see `clip_first`. Raises what optax does for values that it cannot take.
    """
    factory = _find_optimizer(config.optimizer)
    arguments = _optimizer_arguments(config, factory)
    optimizer = factory(_learning_rate(config, factory), **arguments)
    if config.clip_norm and config.compress is None:
        optimizer = optax.chain(_clipping(config), optimizer)
    return limit_to_trained(config.frozen, optimizer)


def make_memory_optimizer(config: TrainConfig) -> optax.GradientTransformation:
    """Makes the optimizer of mode memory, which skips and compresses as others do."""
    tx = make_optimizer(config)
    if config.compression is not None:
        tx = optax.chain(_clipping(config), sparsify(config.compression), tx)
    return optax.apply_if_finite(tx, max_consecutive_errors=2**31 - 1)


def clip_first(
    config: TrainConfig, tx: optax.GradientTransformation
) -> optax.GradientTransformation:
    """Puts clipping before a compression; the state is that of the optimizer."""
    if config.compress is None:
        return tx
    clipping, clipped = _clipping(config), optax.with_extra_args_support(tx)

    def update(
        updates: PyTree, state: Any, params: PyTree | None = None, **extra_args: Any
    ) -> tuple[PyTree, Any]:
        updates, _ = clipping.update(updates, optax.EmptyState(), params)
        return clipped.update(updates, state, params, **extra_args)

    return optax.GradientTransformationExtraArgs(clipped.init, update)


def _clipping(config: TrainConfig) -> optax.GradientTransformation:
    norm = config.clip_norm
    return optax.clip_by_global_norm(norm) if norm else optax.identity()


def schedule_free_average(params: PyTree, state: Any) -> PyTree:
    """Returns the average of params that a schedule-free optimizer in memory keeps."""
    b1, z = (optax.tree.get(state, name) for name in ("b1", SCHEDULE_FREE))
    return jax.tree.map(  # a frozen leaf's z is no array
        lambda y, z: schedule_free_params(y, z, b1) if hasattr(z, "dtype") else y,
        *(params, z),
    )


def _find_optimizer(name: str) -> Callable[..., Any]:
    """Returns a function of optax whose first argument is a learning rate.

    Functions that only scale by one are parts of optimizers.
    """
    for namespace in (optax, optax.contrib):
        factory = vars(namespace).get(name) if name.islower() else None
        if not callable(factory) or name.startswith("scale_by_"):
            continue
        if next(iter(inspect.signature(factory).parameters), "") in _RATES:
            return factory
    known = {*dir(optax), *dir(optax.contrib)}
    raise UsageError(
        f"--optimizer: expected an optimizer of optax or optax.contrib, got {name!r}; "
        f"{did_you_mean(name, known) or 'docs/optimizers.md names them'}"
    )


def _optimizer_arguments(
    config: TrainConfig, factory: Callable[..., Any]
) -> dict[str, Any]:
    """Reads ``--optimizer-args``, with the trainer's defaults of some optimizers."""
    parameters = inspect.signature(factory).parameters
    names = [name for name in parameters if name not in _RATES]
    arguments: dict[str, Any] = {}
    for word in config.optimizer_args:
        key, _, text = word.partition("=")
        if not text or key not in names or key in arguments:
            raise UsageError(
                f"--optimizer-args {word}: expected KEY=VALUE, each key once; "
                f"{config.optimizer} has {', '.join(names)} (and --learning-rate)"
            )
        arguments[key] = _parse_literal(text)
        is_number = type(parameters[key].default) in (int, float)
        if is_number and isinstance(arguments[key], bool):
            raise UsageError(f"--optimizer-args {word}: expected a number")
    if config.optimizer in ("adamw", "lion"):
        default = _WEIGHT_DECAY if config.source is None else _FINE_TUNING_DECAY
        arguments["weight_decay"] = float(arguments.get("weight_decay", default))
    if config.optimizer == "sgd":  # with 0 none is stored
        arguments["momentum"] = arguments.get("momentum", _MOMENTUM) or None
    return arguments


def _parse_literal(text: str) -> Any:
    """Returns a number, a truth value, None, a tuple of these, or the text itself."""
    is_word = text.lower() in ("none", "true", "false")
    try:
        return ast.literal_eval(text.capitalize() if is_word else text)
    except (ValueError, SyntaxError):
        return text


def peak_learning_rate(config: TrainConfig) -> float:
    """Returns the configured rate, or the default for a model of this size."""
    if config.learning_rate is not None:
        return config.learning_rate
    size = num_params(config.model_config)
    rate = next(rate for bound, rate in _LEARNING_RATES.items() if size < bound)
    is_whole = config.source is not None and config.lora is None
    return rate * _FINE_TUNING_SHARE if is_whole else rate


def num_warmup_steps(config: TrainConfig) -> int:
    if config.warmup_steps is not None:
        return config.warmup_steps
    return _NUM_WARMUP_STEPS if config.source is None else _FINE_TUNING_WARMUP_STEPS


def make_schedule(config: TrainConfig) -> optax.Schedule:
    """Makes the learning rate as a function of the number of updates before."""
    peak, num_warmup = peak_learning_rate(config), num_warmup_steps(config)
    num_left = max(1, config.steps - num_warmup)
    if config.schedule == "constant":
        after = optax.constant_schedule(peak)
    elif config.schedule == "cosine":
        after = optax.cosine_decay_schedule(peak, num_left, alpha=_COSINE_FLOOR)
    else:
        share = _STABLE_SHARE if config.schedule == "wsd" else 0
        num_stable = max(0, round(share * config.steps) - num_warmup)
        num_falling = max(1, num_left - num_stable)
        after = optax.linear_schedule(peak, 0.0, num_falling, num_stable)
    # Starts at peak / (n + 1), because a first step at rate 0 would waste a batch.
    warmup = optax.linear_schedule(peak / (num_warmup + 1), peak, num_warmup)
    return optax.join_schedules([warmup, after], [num_warmup]) if num_warmup else after


def _learning_rate(config: TrainConfig, factory: Callable[..., Any]) -> Any:
    """Returns the schedule, or a number for optimizers that take only a number."""
    first = next(iter(inspect.signature(factory).parameters.values()))
    if "Callable" in str(first.annotation):
        return make_schedule(config)
    num_warmup = num_warmup_steps(config)
    if config.schedule != "constant" or num_warmup:
        raise UsageError(
            f"--optimizer {config.optimizer}: expected one learning rate for the whole "
            f"run, got --schedule {config.schedule} --warmup-steps "
            f"{num_warmup}; give --schedule constant --warmup-steps 0"
        )
    return peak_learning_rate(config)


def resolve_settings(config: TrainConfig) -> dict[str, JsonValue]:
    """Returns the settings whose defaults depend on others, as the run has them.

    The weight decay is None if the optimizer has none.
    """
    arguments = _optimizer_arguments(config, _find_optimizer(config.optimizer))
    return {
        "task": config.task_name,
        "learning_rate": peak_learning_rate(config),
        "weight_decay": arguments.get("weight_decay"),
        "warmup_steps": num_warmup_steps(config),
    }
