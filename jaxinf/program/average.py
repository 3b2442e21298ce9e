"""Averages of params: an optimizer whose state has one slot more for each leaf.

Invariant: the average follows the params that ``optax.apply_updates`` gives, in the
order of operations of ``optax.incremental_update``, and changes no update.
"""

import functools
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxinf.terminal import check_choice
from jaxinf.typing import FLOAT32, PyTree

AverageFormat: TypeAlias = Literal["fp32", "bf16"]
"""The form of an average on storage; see `jaxinf.ema`."""

Decay: TypeAlias = float | Callable[[jax.Array], jax.Array | float]


@dataclass(frozen=True)
class Average:
    """An average of params, made by `jaxinf.ema`; attributes are its arguments."""

    decay: Decay
    every: int = 1
    debias: bool = False
    form: AverageFormat = "fp32"


class AveragedState(NamedTuple):
    """The state of an optimizer with an average.

    Attributes:
      inner: The optimizer's own state; its attributes are this state's, too.
      average_count: int32, the updates since the average exists.
      average_weight: float32, the part of a debiased average that does not come from
        the first params; 0 in others.
    """

    inner: PyTree
    average: PyTree
    average_count: jax.Array
    average_weight: jax.Array

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("_"):
            return getattr(self.inner, name)
        raise AttributeError(name)


def ema(
    decay: Decay,
    *,
    every: int = 1,
    debias: bool = False,
    form: AverageFormat = "fp32",
) -> Average:
    """Describes an exponential moving average of params that is kept near storage.

    It is updated in the pass that updates the params: ``average = (1 - decay) * params
    + decay * average`` with the new master params, in the bits of a jitted
    ``optax.incremental_update(params, average, 1 - decay)``. It begins as a copy of the
    params. With gradient accumulation, updates are counted where they are emitted;
    refused ones do not count.

    Args:
      decay: A number from 0 to 1, or ``decay(count)``, traced by JAX: `count` is int32,
        the updates before this one: 0, 1, …. A warm-up is ``lambda count:
        jnp.minimum(0.999, (1 + count) / (10 + count))``.
      every: It takes every so many updates into account. In between its files are
        linked, neither read nor written.
      debias: Whether the first params have no weight: the average is that of an Adam
        moment, which begins at zero and is divided by its weight.
      form: ``"fp32"``, or ``"bf16"``: rounded stochastically. Leaves of fewer than
        4,096 elements stay in fp32.

    Raises:
      ValueError: An argument is out of range; names it.
      TypeError: `decay` is neither a number nor a function.
    """
    if type(every) is not int or every < 1:
        raise ValueError(f"ema: every={every!r}: expected a number from 1")
    check_choice("ema: form", form, AverageFormat)
    is_number = isinstance(decay, int | float | np.number)
    if isinstance(decay, bool) or not (is_number or callable(decay)):
        raise TypeError(
            "ema: decay: expected a number or a function of the count, found "
            f"{type(decay).__name__}"
        )
    if not (callable(decay) or 0 <= decay <= 1):  # nor NaN
        raise ValueError(f"ema: decay={decay}: expected a number from 0 to 1")
    return Average(cast(Decay, decay), every, debias, form)


def parse_ema(text: str) -> Average:
    """Reads ``DECAY[,NAME=VALUE…]``, the names being `ema`'s.

    Raises:
      ValueError: The text does not parse, or a value is out of range.
    """
    decay_text, *words = text.strip().split(",")
    parsers = {"every": int, "debias": _FLAGS.__getitem__, "form": str}
    try:
        pairs = [word.partition("=") for word in words]
        options: dict[str, Any] = {k: parsers[k](value) for k, _, value in pairs}
        decay = float(decay_text)
    except (KeyError, ValueError):
        raise ValueError(
            f"{text!r}: expected DECAY, such as 0.999, and then every=N, debias=true "
            "or form=bf16, separated by commas"
        ) from None
    return ema(decay, **options)


_FLAGS = {"true": True, "false": False}


def with_average(
    tx: optax.GradientTransformation | optax.MultiSteps, average: Average | None
) -> optax.GradientTransformationExtraArgs:
    """Adds an average to the state of `tx`, which gets the params in float32."""
    if isinstance(tx, optax.MultiSteps):
        tx = tx.gradient_transformation()
    tx = optax.with_extra_args_support(tx)
    if average is None:
        return tx

    def init(params: PyTree) -> AveragedState:
        copy = jax.tree.map(lambda leaf: jnp.asarray(leaf, FLOAT32), params)
        count, weight = jnp.zeros((), jnp.int32), jnp.zeros((), FLOAT32)
        return AveragedState(tx.init(params), copy, count, weight)

    def update(
        updates: PyTree,
        state: optax.OptState,
        params: PyTree | None = None,
        **extra_args: Any,
    ) -> tuple[PyTree, AveragedState]:
        assert isinstance(state, AveragedState), "init made it"
        updates, inner = tx.update(updates, state.inner, params, **extra_args)
        conditions = _find_emissions(state.inner, inner)
        count = jnp.asarray(optax.safe_increment(state.average_count))
        if conditions:
            conditions = [functools.reduce(operator.and_, conditions)]
            count = jnp.where(conditions[0], count, state.average_count)
        weight, step_size = state.average_weight, _step_size(average.decay, count)
        if average.debias:
            weight = weight + step_size * (1 - weight)
            step_size = jnp.where(weight > 0, step_size / weight, 0)
        new_params = _apply_updates(params, updates)
        mean = optax.incremental_update(new_params, state.average, step_size)
        if average.every > 1:
            conditions.append(count % average.every == 0)
        if conditions:
            is_due = functools.reduce(operator.and_, conditions)
            mean, weight = jax.tree.map(
                lambda new, old: jnp.where(is_due, new, old),
                (mean, weight),
                (state.average, state.average_weight),
            )
        return updates, AveragedState(inner, mean, count, weight)

    return optax.GradientTransformationExtraArgs(init, update)


def _step_size(decay: Decay, count: jax.Array) -> Any:
    if not callable(decay):
        return 1 - float(decay)
    return 1 - jnp.asarray(decay(jnp.maximum(count - 1, 0)), FLOAT32)


def _apply_updates(params: PyTree | None, updates: PyTree) -> PyTree:
    return jax.tree.map(
        lambda u, p: p if u is None else p + jnp.asarray(u).astype(FLOAT32),
        *(updates, params),
        is_leaf=lambda x: x is None,
    )


def _find_emissions(old: PyTree, new: PyTree) -> list[jax.Array]:
    """Returns conditions of an update that changes params; none if each one does.

    An ``optax.MultiSteps`` counts its emissions, and an ``optax.apply_if_finite`` tells
    whether the last update was finite.
    """
    kinds = (optax.MultiStepsState, optax.ApplyIfFiniteState)

    def holding(state: PyTree) -> list[Any]:
        """Returns the states of transformations that may hold updates back."""
        nodes = jax.tree.leaves(state, is_leaf=lambda node: isinstance(node, kinds))
        states = [node for node in nodes if isinstance(node, kinds)]
        return states + [inner for node in states for inner in holding(tuple(node))]

    return [
        after.gradient_step != before.gradient_step
        if isinstance(after, optax.MultiStepsState)
        else after.last_finite
        for before, after in zip(holding(old), holding(new), strict=True)
    ]
