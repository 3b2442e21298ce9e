"""Transformations around others whose meaning a program cannot be read from.

Invariant: they are known by the types of their states, which are optax's own.
"""

from collections.abc import Sequence
from typing import Any, Literal, TypeAlias, get_args

import jax
import optax

from jaxinf.errors import NonFiniteGradientError, UnsupportedTransformError
from jaxinf.program.average import AveragedState
from jaxinf.typing import PyTree

NonFinitePolicy: TypeAlias = Literal["error", "skip", "allow"]
"""The effect of a gradient with NaN or Inf; see `jaxinf.smart_update`."""

_INJECTED = (optax.InjectHyperparamsState, optax.InjectStatefulHyperparamsState)


def check_nonfinite(nonfinite: NonFinitePolicy | None) -> None:
    """Refuses an unknown policy.

    Raises:
      ValueError: Names the known ones.
    """
    if nonfinite not in (None, *get_args(NonFinitePolicy)):
        raise ValueError(
            f'nonfinite={nonfinite!r}: expected "error", "skip" or "allow"'
        )


def effect_of_nonfinite(
    given: NonFinitePolicy | None, *, is_guarded: bool
) -> NonFinitePolicy:
    """Returns the policy of a run.

    Args:
      given: The caller's; None for the default.
      is_guarded: See the function of that name.
    """
    return given or ("allow" if is_guarded else "error")


def refused_gradient(
    names: Sequence[str], step: int | None = None, where: object = "the store"
) -> NonFiniteGradientError:
    """Makes the error for a step that is refused.

    Args:
      names: The leaves whose gradients have NaN or Inf.
      step: The step that stays; None without a store.
      where: The store's path.
    """
    names = list(dict.fromkeys(names))
    more = f" and {len(names) - 5} more leaves" if len(names) > 5 else ""
    at = stays = ""
    if step is not None:
        at, stays = f"step {step + 1}: ", f", {where} stays at step {step}"
    return NonFiniteGradientError(
        f"{at}NaN or Inf in the gradient of {', '.join(names[:5])}{more}; the step was "
        f"refused{stays}. Lower the learning rate or clip the gradients, or pass "
        'nonfinite="skip" to go on without such steps, as with a loss scale '
        "(DynamicScale)"
    )


def is_guarded(state: PyTree) -> bool:
    """Whether an ``optax.apply_if_finite`` keeps NaN from params and state.

    It does unless it is around a part of the optimizer only, or behind stored state.

    Args:
      state: The optimizer's state, or its shapes.
    """
    if isinstance(state, optax.ApplyIfFiniteState):
        return True
    if isinstance(state, AveragedState):
        return is_guarded(state.inner)
    if isinstance(state, _INJECTED):
        return is_guarded(state.inner_state)
    if isinstance(state, optax.MultiStepsState):
        return not jax.tree.leaves(state.acc_grads) and is_guarded(
            state.inner_opt_state
        )
    for part in state if type(state) is tuple else ():  # a chain
        if is_guarded(part):
            return True
        if any(leaf.shape for leaf in jax.tree.leaves(part)):
            return False
    return False


def refuse_lookahead(state: PyTree) -> None:
    """Refuses an ``optax.lookahead``.

    Args:
      state: The optimizer's state, or its shapes.

    Raises:
      UnsupportedTransformError: There is one.
    """

    def is_lookahead(node: Any) -> bool:
        return isinstance(node, optax.LookaheadState)

    if any(map(is_lookahead, jax.tree.leaves(state, is_leaf=is_lookahead))):
        raise UnsupportedTransformError(
            "optax.lookahead: expected an update for each of the params, found fast "
            "params, for which there are gradients, and slow ones, which follow them; "
            "use its fast optimizer, and average the params with jaxinf.ema "
            '(docs/integrations.md, "EMA of params")'
        )
