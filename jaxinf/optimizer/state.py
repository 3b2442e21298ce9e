"""The transformation's state, without the arrays on storage.

Invariant: a state belongs to one step of the store, and advances only with it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxinf import compat
from jaxinf.engine import StoreDescription, check_announced, store_with_id
from jaxinf.errors import StaleStateError
from jaxinf.optimizer.host_side import COMMITTED, SKIPPED
from jaxinf.program import InitProgram
from jaxinf.store import leaf_name
from jaxinf.typing import Array, PyTree

__all__ = [
    "SmartUpdateState",
    "Stored",
    "check_state",
    "first_state",
    "next_state",
    "placeholder_state",
]


@jax.tree_util.register_static
@dataclass(frozen=True)
class Stored:
    """A placeholder in the transform's state for an array that is on storage.

    It is a tree node without leaves. It knows its store by an id and not by a path, so
    that a store may be moved.

    Attributes:
      leaf: the name of the params' leaf, its keys joined by ``/``.
      state: the name of the state, such as ``mu``.
      shape: the array's shape.
      dtype: the array's dtype in optax; the store may keep it in fewer bits.
      store_id: the store's id. It does not count in comparisons, so that the states of
        two runs are trees of one structure.
    """

    leaf: str
    state: str
    shape: tuple[int, ...]
    dtype: np.dtype
    store_id: str = field(compare=False)

    def read(self) -> Array:
        """Reads the array of the last committed step from the open store; blocks.

        Raises:
          ValueError: the store is not open in this process.
        """
        return store_with_id(self.store_id).read(self.state, self.leaf)


class SmartUpdateState(NamedTuple):
    """State of `smart_update`, without the arrays on storage.

    Attributes:
      step: int32, the store's committed step that this state belongs to.
      skipped_steps: int32, steps skipped for a non-finite gradient.
      optimizer: optax's own state, with `Stored` in the place of each stored array;
        counts and hyperparameters are there to read (and hyperparameters to set). Its
        attributes are this state's, too: `state.hyperparams`, `state.gradient_step`.
      error_feedback: float32, a tree like the params: the sum of gradient elements that
        compression has not sent; empty without error feedback.
    """

    step: jax.Array
    skipped_steps: jax.Array
    optimizer: PyTree
    error_feedback: PyTree = ()

    def __getattr__(self, name: str) -> Any:
        # Not for protocols, which would take the state for what the optimizer's is.
        if not name.startswith("_") and hasattr(self.optimizer, name):
            return getattr(self.optimizer, name)
        raise AttributeError(
            f"neither {type(self).__name__} nor the {type(self.optimizer).__name__} in "
            f"it has the attribute {name!r}; optax.tree_utils.tree_get(state, {name!r})"
            " finds what lies deeper"
        )


# With several JAX devices a callback must not raise. The next call that gets the state
# of a store that has stopped does.
compat.register_checked(SmartUpdateState, check_announced)


def first_state(
    program: InitProgram,
    initial: Sequence[jax.Array],
    held: Sequence[Any],
    feedback: PyTree,
    store_id: str,
) -> SmartUpdateState:
    """Makes the state that `init` returns.

    Args:
      program: the optimizer's program.
      initial: its scalar state, for the types.
      held: the store's step, skipped steps and scalar state.
      feedback: error feedback, or empty.
      store_id: the id of the store of the rest.
    """
    compat.register_with_flax(Stored)
    step, skipped, *scalars = held
    layout = program.layout
    leaves: list[Any] = [None] * layout.treedef.num_leaves
    for leaf in program.leaves:
        name, shape = leaf_name(leaf.info.path), leaf.info.shape
        for slot in leaf.slots:
            stored = Stored(name, slot.name, shape, slot.dtype, store_id)
            leaves[slot.state_index] = stored
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
    """Makes the state after a step.

    Args:
      state: the state before the step.
      verdict: the verdict on the step.
      old: leaves of the optimizer's state, then of the error feedback.
      new: the same leaves for a committed step.
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


def placeholder_state(optimizer: PyTree, feedback: PyTree) -> SmartUpdateState:
    """Makes the state with placeholders that ``optax.tree.map_params`` looks at."""
    zero = jnp.int32(0)
    return SmartUpdateState(zero, zero, optimizer, feedback)


def check_state(
    state: SmartUpdateState, description: StoreDescription, *, num_feedback: int
) -> None:
    """Refuses the state of another optimizer.

    Args:
      state: the state given to `update`.
      description: the optimizer's description.
      num_feedback: expected number of leaves of error feedback.

    Raises:
      StaleStateError: names the difference.
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
    """The reverse of `plain`."""
    if jnp.issubdtype(like.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(value, impl=jax.random.key_impl(like))
    return jnp.asarray(value, like.dtype)
