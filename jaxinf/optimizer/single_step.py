"""``optax.MultiSteps(inner, 1)`` without a sum of gradients.

Invariant: updates are those of the inner optimizer; the state has the fields of
``optax.MultiStepsState``.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxinf.optimizer.state import Zeros
from jaxinf.typing import PyTree

__all__ = ["single_step"]


def single_step(
    inner: optax.GradientTransformationExtraArgs,
) -> optax.GradientTransformationExtraArgs:
    """Returns the transformation; see the module."""

    def init(params: PyTree) -> optax.MultiStepsState:
        zero = jnp.zeros((), jnp.int32)
        sums = jax.tree.map(lambda leaf: Zeros(jnp.shape(leaf)), params)
        return optax.MultiStepsState(zero, zero, inner.init(params), sums, ())

    def update(
        updates: PyTree,
        state: optax.OptState,
        params: PyTree | None = None,
        **extra_args: Any,
    ) -> tuple[PyTree, optax.MultiStepsState]:
        assert isinstance(state, optax.MultiStepsState), "init made it"
        updates, within = inner.update(
            updates, state.inner_opt_state, params, **extra_args
        )
        number = optax.safe_increment(state.gradient_step)
        return updates, state._replace(inner_opt_state=within, gradient_step=number)

    return optax.GradientTransformationExtraArgs(init, update)
