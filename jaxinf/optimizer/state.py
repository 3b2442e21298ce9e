"""The transformation's state: what is not on storage.

Invariant: a state is of one step of the store, and moves to the next only with it.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxinf.engine import StoreDescription
from jaxinf.errors import StaleStateError
from jaxinf.optimizer.host_side import COMMITTED, SKIPPED
from jaxinf.program import InitProgram
from jaxinf.typing import PyTree

__all__ = [
    "SmartUpdateState",
    "Stored",
    "check_state",
    "first_state",
    "next_state",
    "raw",
]


class Stored(NamedTuple):
    """Stands in the transform's state where optax has an array that is on storage."""


class SmartUpdateState(NamedTuple):
    """State of `smart_update`: what is not on storage.

    Attributes:
      step: int32, the store's committed step that this state belongs to.
      skipped_steps: int32, steps skipped for a non-finite gradient.
      optimizer: optax's own state, with `Stored` in the place of each stored array;
        counts and hyperparameters are there to read (and hyperparameters to set).
      error_feedback: float32, a tree like the params: what compression has left out of
        the gradients so far; empty without error feedback.
    """

    step: jax.Array
    skipped_steps: jax.Array
    optimizer: PyTree
    error_feedback: PyTree = ()


def raw(value: jax.Array) -> jax.Array:
    """Typed PRNG keys as the numbers that they are."""
    if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        return jax.random.key_data(value)
    return value


def first_state(
    program: InitProgram,
    initial: Sequence[jax.Array],
    held: Sequence[Any],
    feedback: PyTree,
) -> SmartUpdateState:
    """The state that `init` gives.

    Args:
      program: of the optimizer.
      initial: its scalar state, for the types.
      held: what the store has: step, skipped steps, scalar state.
      feedback: error feedback, or empty.
    """
    step, skipped, *scalars = held
    layout = program.layout
    leaves: list[Any] = [Stored()] * layout.treedef.num_leaves
    for index, value, like in zip(layout.scalar_indices, scalars, initial, strict=True):
        leaves[index] = _typed(value, like)
    return SmartUpdateState(
        jnp.asarray(step, jnp.int32),
        jnp.asarray(skipped, jnp.int32),
        jax.tree.unflatten(layout.treedef, leaves),
        feedback,
    )


def next_state(
    state: SmartUpdateState,
    verdict: jax.Array,
    old: Sequence[jax.Array],
    new: Sequence[jax.Array],
) -> SmartUpdateState:
    """The state after a step.

    Args:
      state: before it.
      verdict: on the step.
      old: leaves of the optimizer's state, then of the error feedback.
      new: likewise, if the step is committed.
    """
    is_committed = verdict == COMMITTED
    kept = [jnp.where(is_committed, n, o) for n, o in zip(new, old, strict=True)]
    optimizer = jax.tree.structure(state.optimizer)
    num = optimizer.num_leaves
    return SmartUpdateState(
        state.step + is_committed.astype(jnp.int32),
        state.skipped_steps + (verdict == SKIPPED).astype(jnp.int32),
        optimizer.unflatten(kept[:num]),
        jax.tree.structure(state.error_feedback).unflatten(kept[num:]),
    )


def check_state(
    state: SmartUpdateState, description: StoreDescription, *, num_feedback: int
) -> None:
    """Refuses the state of another optimizer.

    Args:
      state: given to `update`.
      description: of the optimizer.
      num_feedback: leaves of error feedback that it should have.

    Raises:
      StaleStateError: says what differs.
    """
    num_scalars = len(jax.tree.leaves(state.optimizer))
    if num_scalars != len(description.scalar_paths):
        raise StaleStateError(
            f"the state given to update has {num_scalars} scalars "
            f"({jax.tree.structure(state.optimizer)}), the optimizer's has "
            f"{list(description.scalar_paths)}; make it with the init of the same "
            "transformation"
        )
    found = len(jax.tree.leaves(state.error_feedback))
    if found != num_feedback:
        raise StaleStateError(
            f"the state given to update has error feedback of {found} leaves, this "
            f"compression's has {num_feedback}; make it with the init of the same "
            "transformation"
        )


def _typed(value: Any, like: jax.Array) -> jax.Array:
    """The reverse of `raw`."""
    if jnp.issubdtype(like.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(value, impl=jax.random.key_impl(like))
    return jnp.asarray(value, like.dtype)
