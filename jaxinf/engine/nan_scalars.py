"""Finds scalars of a step that are NaN and that an update computes with.

A learning rate of NaN turns all state into NaN, whatever the gradients are. Inf is
accepted, because some optimizers start with it.

Invariant: a scalar is checked only in a branch that the step takes.
"""

from collections.abc import Sequence

from jaxinf.engine.opened import OpenStore
from jaxinf.engine.update_request import UpdateRequest
from jaxinf.errors import NonFiniteScalarError
from jaxinf.kernels.specialise import scalars_used
from jaxinf.store import ScalarState


def nan_scalars(
    opened: OpenStore, requests: Sequence[UpdateRequest]
) -> tuple[str, ...]:
    """Returns the scalars that are NaN and used, by leaf and number, for an error."""
    seen: dict[int, bool] = {}
    found = []
    for request in requests:
        for number, scalar in enumerate(request.inputs.scalars):
            is_nan = seen.get(id(scalar))
            if is_nan is None:
                is_nan = seen[id(scalar)] = bool(scalar != scalar)
            if is_nan and number in scalars_used(
                request.kernel, request.inputs.scalars
            ):
                name = opened.directory.manifest.leaves[request.leaf].name
                found.append(f"scalar {number} of the update of leaf {name}")
    return tuple(found)


def nan_scalar_error(
    opened: OpenStore, step: int, found: Sequence[str], scalars: Sequence[ScalarState]
) -> NonFiniteScalarError:
    """Makes the error for a step that would compute with NaN.

    Args:
      scalars: the optimizer's scalars, which may name the value.
    """
    held = [
        scalar.path
        for scalar in scalars
        if scalar.value.dtype.kind in "fcV"
        and bool((scalar.value != scalar.value).any())
    ]
    named = f"{', '.join(held)} of the optimizer's state" if held else found[0]
    return NonFiniteScalarError(
        f"{opened.options.path}: step {step}: expected numbers to update with, found "
        f"NaN in {named}; the step was refused, the store stays at step "
        f"{opened.finished.step}. Look at the learning rate and its schedule"
    )
