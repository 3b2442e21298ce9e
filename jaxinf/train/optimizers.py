"""Makes the optax optimizer of a config.

Invariant: optax is the only definition of an optimizer. This module chooses and
configures one, and both modes use the same result.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
import optax.contrib

from jaxinf.command_line import UsageError, did_you_mean
from jaxinf.errors import UnsupportedTransformError
from jaxinf.program import trace_init, trace_update
from jaxinf.streaming import check_init, passes_for, trace_optimizer
from jaxinf.train.config import TrainConfig
from jaxinf.train.freezing import train_others
from jaxinf.train.schedules import (
    make_schedule,
    num_warmup_steps,
    peak_learning_rate,
    weight_decay,
)
from jaxinf.typing import PyTree

_MOMENTUM = 0.9

_NUMBERS = {"none": None, "true": True, "false": False}


@functools.cache
def optax_optimizers() -> Mapping[str, Callable[..., optax.GradientTransformation]]:
    """Returns the optimizers of optax, then of ``optax.contrib``, by name.

    An optimizer is a function whose first argument is a learning rate; functions that
    only scale by one are parts of optimizers.
    """
    found = {}
    for namespace in (optax.contrib, optax):
        for name, value in vars(namespace).items():
            if name.startswith(("_", "scale_by_")) or inspect.isclass(value):
                continue
            if callable(value) and _first_parameter(value) in _RATES:
                found[name] = value
    return dict(sorted(found.items()))


def check_optimizer(config: TrainConfig) -> None:
    """Refuses an unknown optimizer, or one that cannot train here.

    Raises:
      UsageError: names the flag, the value found and the remedy.
    """
    _find(config.optimizer)
    if config.learning_rate is None and config.optimizer not in ("adam", "adamw"):
        raise UsageError(
            f"--learning-rate: expected with --optimizer {config.optimizer}, which has "
            "no default here"
        )
    optimizer = make_optimizer(dataclasses.replace(config, lora=None))
    shapes = {"kernel": (256, 256), "bias": (256,)}
    params = {
        name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()
    }
    try:
        state = jax.eval_shape(optimizer.init, params)
        jax.eval_shape(optimizer.update, params, state, params)
        if config.mode != "memory":
            first = trace_init(optimizer, params)
            if config.mode == "stream":
                check_init(first)
                passes_for(
                    trace_optimizer(optimizer, params), is_alone=not config.distributed
                )
            else:
                trace_update(optimizer, params)
    except UnsupportedTransformError as error:
        raise UsageError(
            f"--optimizer {config.optimizer}: it cannot run in --mode {config.mode} "
            f"(--mode memory trains with it). {error}"
        ) from error
    except Exception as error:  # optax may raise anything for bad arguments
        raise UsageError(
            f"--optimizer {' '.join((config.optimizer, *config.optimizer_args))}: "
            f"expected one that trains on gradients and params alone, optax says: "
            f"{error}"
        ) from error


def make_optimizer(config: TrainConfig) -> optax.GradientTransformation:
    """Makes the optimizer with its schedule, behind clipping.

    If gradients are compressed, the clipping is left out, because it must come first.

    Raises:
      UsageError: there is no such optimizer, or it has no such arguments.
    """
    chosen = _find(config.optimizer)
    options = _defaults(config) | _parse_all(config, chosen)
    if config.optimizer == "sgd":  # with 0 none is stored
        options["momentum"] = options["momentum"] or None
    parameters = inspect.signature(chosen).parameters
    missing = [
        f"{name}=…"
        for name, parameter in parameters.items()
        if parameter.default is parameter.empty and name not in (*options, *_RATES)
    ]
    if missing:
        raise UsageError(
            f"--optimizer-args: expected {' '.join(missing)} too, which optax has no "
            f"default for in {config.optimizer}"
        )
    try:
        optimizer = chosen(_rate(config, next(iter(parameters.values()))), **options)
    except (TypeError, ValueError) as error:
        raise UsageError(f"--optimizer {config.optimizer}: {error}") from error
    if config.clip_norm and config.compress is None:
        optimizer = optax.chain(make_clipping(config), optimizer)
    return train_others(config.frozen, optimizer)


def make_clipping(config: TrainConfig) -> optax.GradientTransformation:
    """Makes the clipping by the global norm, or an identity if it is off."""
    if not config.clip_norm:
        return optax.identity()
    return optax.clip_by_global_norm(config.clip_norm)


def behind_clipping(
    config: TrainConfig, tx: optax.GradientTransformation
) -> optax.GradientTransformationExtraArgs:
    """Puts the clipping in front of an optimizer; the state is the optimizer's own."""
    clipping, clipped = make_clipping(config), optax.with_extra_args_support(tx)

    def update(
        updates: PyTree, state: Any, params: PyTree | None = None, **extra_args: Any
    ) -> tuple[PyTree, Any]:
        updates, _ = clipping.update(updates, optax.EmptyState(), params)
        return clipped.update(updates, state, params, **extra_args)

    return optax.GradientTransformationExtraArgs(clipped.init, update)


_RATES = ("learning_rate", "max_learning_rate")


def _first_parameter(function: Callable[..., Any]) -> str:
    try:
        return next(iter(inspect.signature(function).parameters), "")
    except ValueError:  # built in
        return ""


def _find(name: str) -> Callable[..., optax.GradientTransformation]:
    known = optax_optimizers()
    if name in known:
        return known[name]
    raise UsageError(
        f"--optimizer: expected an optimizer of optax or optax.contrib, got {name!r}; "
        f"{did_you_mean(name, known) or 'known are ' + ', '.join(known)}"
    )


def _defaults(config: TrainConfig) -> dict[str, Any]:
    """Returns options with a default of ours."""
    decay = weight_decay(config)
    if decay is not None:
        return {"weight_decay": decay}
    return {"momentum": _MOMENTUM} if config.optimizer == "sgd" else {}


def _rate(config: TrainConfig, parameter: inspect.Parameter) -> Any:
    """Returns the schedule, or a number for optimizers that take only a number."""
    if "Callable" in str(parameter.annotation):
        return make_schedule(config)
    num_warmup = num_warmup_steps(config)
    if config.schedule != "constant" or num_warmup:
        raise UsageError(
            f"--optimizer {config.optimizer}: expected one learning rate for the whole "
            f"run, got --schedule {config.schedule} --warmup-steps "
            f"{num_warmup}; give --schedule constant --warmup-steps 0"
        )
    return peak_learning_rate(config)


# --- --optimizer-args --------------------------------------------------------------


def _parse_all(config: TrainConfig, chosen: Callable[..., Any]) -> dict[str, Any]:
    parameters = inspect.signature(chosen).parameters
    names = [name for name in parameters if name not in _RATES]
    options: dict[str, Any] = {}
    for word in config.optimizer_args:
        key, equals, text = word.partition("=")
        if not equals or not text:
            raise UsageError(f"--optimizer-args: expected KEY=VALUE, got {word!r}")
        if key in _RATES:
            raise UsageError(f"--optimizer-args {word}: give --learning-rate instead")
        if key not in names:
            raise UsageError(
                f"--optimizer-args {word}: {config.optimizer} has no {key}; it has "
                f"{', '.join(names)}"
            )
        if key in options:
            raise UsageError(f"--optimizer-args {word}: {key} is given twice")
        options[key] = _parse(word, text, parameters[key])
    return options


def _parse(word: str, text: str, parameter: inspect.Parameter) -> Any:
    """Parses a value of the type that the argument's default and annotation show."""
    default = parameter.default
    number = _number(text)
    if isinstance(default, bool):
        kind, fits = "true or false", isinstance(number, bool)
    elif parameter.annotation is int:
        kind, fits = "an integer", type(number) is int
    elif isinstance(default, int | float):
        kind, fits = "a number", type(number) in (int, float)
    elif type(default) is tuple:
        number = tuple(_number(part, part) for part in text.split(","))
        kind = f"{len(default)} values with commas between them"
        fits = len(number) == len(default)
    elif isinstance(default, str) or "dtype" in parameter.name:
        kind, fits, number = "a word", True, _number(text, text)
    elif default is None or default is parameter.empty:
        kind, fits = "a number, true, false or none", number is not Ellipsis
    else:
        raise UsageError(
            f"--optimizer-args {word}: {parameter.name} is a function or a "
            "transformation; it can only be set in a program"
        )
    if not fits:
        raise UsageError(f"--optimizer-args {word}: expected {kind}, got {text!r}")
    return number


def _number(text: str, otherwise: Any = ...) -> Any:
    if text.lower() in _NUMBERS:
        return _NUMBERS[text.lower()]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return otherwise
