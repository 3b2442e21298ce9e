"""The transformation's state, without the arrays on storage.

Invariant: a state belongs to one step of the store, and advances only with it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

from jaxinf import compat
from jaxinf.engine import (
    StoreDescription,
    check_announced,
    store_with_id,
)
from jaxinf.errors import StaleStateError
from jaxinf.interrupts import raise_kept
from jaxinf.optimizer.callback import FAILED
from jaxinf.optimizer.host_side import COMMITTED, SKIPPED
from jaxinf.program import InitProgram
from jaxinf.store import leaf_name
from jaxinf.typing import Array, PyTree


@dataclass(frozen=True, eq=False)
class StoredArray:
    """A placeholder for an array that is on storage, as a leaf of a tree.

    Attributes of a `SmartUpdateState` consist of it: `state.acc_grads`, `state.mu`. It
    has no values: NumPy and JAX refuse it with a ValueError that says how to read it.
    It knows its store by an id and not by a path, so that a store may be moved.

    Attributes:
      leaf: the name of the params' leaf, its keys joined by ``/``.
      state: the name of the state, such as ``mu``.
      shape: the array's shape.
      dtype: the array's dtype in optax; the store may keep it in fewer bits.
      store_id: the store's id. It does not count in comparisons with placeholders, so
        that the states of two runs are trees of one structure.
    """

    leaf: str
    state: str
    shape: tuple[int, ...]
    dtype: np.dtype
    store_id: str

    def read(self) -> Array:
        """Reads the array of the last committed step from the open store; blocks.

        Raises:
          ValueError: the store is not open in this process.
        """
        return store_with_id(self.store_id).read(self.state, self.leaf)

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(self._refusal if name.isalpha() else name)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, StoredArray):
            raise ValueError(self._refusal)
        return _compared(self) == _compared(other)

    def __hash__(self) -> int:
        return hash(_compared(self))

    @property  # JAX gets it before it looks at the value
    def __jax_array__(self) -> NoReturn:
        raise ValueError(self._refusal)

    def __array__(self, *_: Any, **__: Any) -> NoReturn:
        raise ValueError(self._refusal)

    @property
    def _refusal(self) -> str:
        return (
            f"{self.state} of leaf {self.leaf} is in the store, not in JAX, which "
            "cannot compute with it. Outside of jit read it, with read() of this "
            f"placeholder or store.read({self.state!r}, {self.leaf!r}); in jit compute "
            "with the gradients instead"
        )


def _compared(placeholder: StoredArray) -> tuple[Any, ...]:
    return placeholder.leaf, placeholder.state, placeholder.shape, placeholder.dtype


@jax.tree_util.register_static
class Stored(StoredArray):
    """A `StoredArray` in the transform's state: a tree node without leaves."""


class SmartUpdateState(NamedTuple):
    """State of `smart_update`, without the arrays on storage.

    Attributes:
      step: int32, the store's committed step that this state belongs to.
      skipped_steps: int32, steps skipped for a non-finite gradient.
      origin: int32, the origin of the state: 0, an update, or an `init` that saw the
        params of the store's step. 1, an `init` that saw others, or none: the next
        update must be given params, so that they can be compared. More: an update after
        the store went back, since another one was discarded.
      optimizer: optax's own state, with `Stored` in the place of each stored array;
        counts and hyperparameters are there to read (and hyperparameters to set). Its
        attributes are this state's, too: `state.hyperparams`, `state.gradient_step`.
        One of stored arrays alone, such as `state.acc_grads`, is a tree like the params
        with a `StoredArray` for each leaf.
      error_feedback: float32, a tree like the params: the sum of gradient elements that
        compression has not sent; empty without error feedback.
    """

    step: jax.Array
    skipped_steps: jax.Array
    origin: jax.Array
    optimizer: PyTree
    error_feedback: PyTree = ()

    def __getattr__(self, name: str) -> Any:
        # Not for protocols, which would take the state for what the optimizer's is.
        if not name.startswith("_") and hasattr(self.optimizer, name):
            return _shown(getattr(self.optimizer, name))
        raise AttributeError(
            f"neither {type(self).__name__} nor the {type(self.optimizer).__name__} in "
            f"it has the attribute {name!r}; optax.tree_utils.tree_get(state, {name!r})"
            " finds what lies deeper"
        )


def _check() -> None:
    """Raises what came during a callback that must not raise.

    With several JAX devices that is a failure of the store, on one an interrupt.
    """
    raise_kept()
    check_announced()


compat.register_checked(SmartUpdateState, _check)


def first_state(
    program: InitProgram,
    initial: Sequence[jax.Array],
    held: Sequence[Any],
    feedback: PyTree,
    store_id: str,
) -> SmartUpdateState:
    """Makes the state that `init` returns.

    Args:
      initial: its scalar state, for the types.
    """
    compat.register_with_flax(Stored)
    step, skipped, origin, *scalars = held
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
        jnp.asarray(origin, jnp.int32),
        jax.tree.unflatten(layout.treedef, leaves),
        feedback,
    )


def next_state(
    state: SmartUpdateState,
    verdict: jax.Array,
    origin: jax.Array,
    old: Sequence[jax.Array],
    new: Sequence[jax.Array],
) -> SmartUpdateState:
    """Makes the state after a step.

    Args:
      state: the state before the step.
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
        jnp.where(verdict == FAILED, state.origin, origin),
        optimizer.unflatten(kept[:num]),
        jax.tree.structure(state.error_feedback).unflatten(kept[num:]),
    )


def placeholder_state(optimizer: PyTree, feedback: PyTree) -> SmartUpdateState:
    """Makes the state with placeholders that ``optax.tree.map_params`` looks at."""
    zero = jnp.int32(0)
    return SmartUpdateState(zero, zero, zero, optimizer, feedback)


def check_state(
    state: SmartUpdateState, description: StoreDescription, *, num_feedback: int
) -> None:
    """Refuses the state of another optimizer.

    Args:
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


def _shown(tree: PyTree) -> PyTree:
    """Returns a tree of placeholders alone with leaves in their place."""
    nodes = jax.tree.leaves(tree, is_leaf=_is_placeholder)
    if not nodes or not all(map(_is_placeholder, nodes)):
        return tree  # not a copy: hyperparameters are set in it
    return jax.tree.map(_leaf_of, tree, is_leaf=_is_placeholder)


def _is_placeholder(node: Any) -> bool:
    return isinstance(node, Stored)


def _leaf_of(node: Stored) -> StoredArray:
    return StoredArray(node.leaf, node.state, node.shape, node.dtype, node.store_id)


def _typed(value: Any, like: jax.Array) -> jax.Array:
    """The reverse of `key_data`."""
    if jnp.issubdtype(like.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(value, impl=jax.random.key_impl(like))
    return jnp.asarray(value, like.dtype)
