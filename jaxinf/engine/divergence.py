"""Checks that the caller's params and state agree with the store.

Invariant: zeros and denormals count as equal, as JAX on a CPU flushes denormals.
"""

import warnings
from pathlib import Path

import numpy as np

from jaxinf.errors import DivergedParamsError, StaleStateError, StoreMismatchError
from jaxinf.typing import Array

UPDATE, RESUMED = 0, 1
"""Origins of a state, as in `jaxinf.SmartUpdateState`; later ones are updates, too."""

RESTART = (
    'or begin anew with smart_update(…, on_existing="restart"), which keeps the old '
    "run as a checkpoint"
)
"""A remedy in several messages."""

FROM_STORE = (
    "To go on from the store, open it again: params = store.params(like=params), state "
    "= tx.init(params)"
)
"""Another one: an open store that has made steps refuses a second `init`."""


def same_values(a: Array, b: Array, *, bound: float = 0.0) -> bool:
    """Compares element by element; NaNs are equal, and so are zeros and denormals.

    JAX on a CPU flushes denormals and NumPy does not, so that is no difference.

    Args:
      bound: a difference that does not count.
    """
    wide_a, wide_b = a.astype(np.float32), b.astype(np.float32)
    same = wide_a == wide_b
    if same.all():
        return True
    tiny = np.finfo(np.float32).tiny
    same |= (np.abs(wide_a) < tiny) & (np.abs(wide_b) < tiny)
    same |= np.isnan(wide_a) & np.isnan(wide_b)
    if bound:
        same |= np.abs(wide_a - wide_b) <= bound
    return bool(same.all())


def diverged_error(
    name: str, given: Array, held: Array, *, is_first: bool
) -> DivergedParamsError:
    """Makes the error for params that differ from the store's master.

    Args:
      is_first: whether they are given to the first step.
    """
    if is_first:
        return diverged_at_first(f"leaf {name}")
    return DivergedParamsError(
        f"leaf {name}: the params given to update are not those the store's master is "
        f"of (at one place they are {given}, the store's {held}); apply the returned "
        "updates unchanged (smart_update last in the chain, then "
        "optax.apply_updates), or take store.params(like=params)"
    )


def diverged_at_first(where: str) -> DivergedParamsError:
    """Makes the error for params of a first step that `init` has not seen."""
    return DivergedParamsError(
        f"{where}: the params given to the first update are not those that init was "
        "given. Call tx.init with the params that you train, after other weights have "
        "been put in their place: on a new store, or on this one with smart_update(…, "
        'on_existing="restart")'
    )


def warn_of_unseen(path: Path, steps: int) -> None:
    """Warns if the caller's params were not compared with the master.

    Args:
      steps: number of the last steps for which they were not given.
    """
    if steps:
        warnings.warn(
            f"{path}: the last {steps} updates were given no params, so the store's "
            "params are not compared with yours, and differ from them if updates were "
            "changed after update, or params replaced. Give them: tx.update(grads, "
            "state, params)",
            stacklevel=3,
        )


def check_known(path: Path, step: int, origin: int) -> None:
    """Refuses to go on without params from the state of an `init`.

    Raises:
      StoreMismatchError: the state is of an `init` on a store with steps.
    """
    if origin == RESUMED:
        raise StoreMismatchError(
            f"{path}: update was given no params, and the state of an init that found "
            f"step {step} there, so they cannot be compared with the store's. Give "
            "them, tx.update(grads, state, params), with params = store.params("
            f"like=params) or those of your own checkpoint of that step; {RESTART}"
        )


def stale_state(path: Path, step: int, at: int) -> StaleStateError:
    """Makes the error for a state that is not the one of the store's last step."""
    if step == at:
        return StaleStateError(
            f"{path}: the optimizer state given to update is of a step {step} that was "
            "given up: update was called again with the state before it, so the store "
            f"went back and made another step {at}. Go on with the params and the "
            f"state that the last call returned. {FROM_STORE}"
        )
    return StaleStateError(
        f"{path}: the optimizer state given to update is of step {step}, the store is "
        f"at step {at}. Each call of update is a step of the store, also one "
        "whose results are thrown away (jitted.lower(…).compile() compiles without "
        "one); give each call the state that the last one returned, and each model a "
        f"store of its own (one store per init). {FROM_STORE}; or open the "
        "checkpoint of that step"
    )
