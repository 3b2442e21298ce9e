"""The effect of a gradient with NaN or Inf."""

from collections.abc import Sequence
from typing import Literal, TypeAlias

from jaxinf.documents import first_few
from jaxinf.errors import NonFiniteGradientError

NonFinitePolicy: TypeAlias = Literal["error", "skip", "allow"]
"""The effect of a gradient with NaN or Inf; see `jaxinf.smart_update`."""


def nonfinite_error(
    names: Sequence[str], step: int | None = None, where: object = "the store"
) -> NonFiniteGradientError:
    """Makes the error for a refused step; `step`, if there is a store, stays."""
    leaves, prefix, stays = first_few(dict.fromkeys(names)), "", ""
    if step is not None:
        prefix, stays = f"step {step + 1}: ", f", {where} stays at step {step}"
    return NonFiniteGradientError(
        f"{prefix}NaN or Inf in the gradient of {leaves}; the step was refused{stays}. "
        "Lower the learning rate or clip the gradients, or pass "
        'nonfinite="skip" to go on without such steps, as with a loss scale '
        '(DynamicScale), or "allow" around an optimizer with a rule of its own '
        "(optax.apply_if_finite)"
    )
