"""The transformation's state, without the arrays on storage.

Invariant: a state belongs to one step of the store, and advances only with it.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

from jaxinf import compat
from jaxinf.engine import StoreDescription, check_announced
from jaxinf.errors import StaleStateError, StoreError
from jaxinf.optimizer.host_side import COMMITTED, SKIPPED
from jaxinf.processes import raise_kept
from jaxinf.program import InitProgram, typed_like
from jaxinf.store import leaf_name
from jaxinf.typing import PyTree


class StoredArray:
    """A stored array's place in the state: it has no values.

    It is a node of the tree without leaves, so that JAX holds nothing of it, and
    functions over trees pass over it as over None. Whoever wants values gets the error
    that says how to read them.

    Attributes:
      shape: the array's shape.
      dtype: the array's dtype in optax; the store may keep it in fewer bits.
    """

    def __init__(
        self, leaf: str, state: str, shape: tuple[int, ...], dtype: np.dtype
    ) -> None:
        self._leaf, self._state, self.shape, self.dtype = leaf, state, shape, dtype

    def __repr__(self) -> str:
        return f"StoredArray({self._state} of {self._leaf})"

    def __getattr__(self, name: str) -> NoReturn:
        raise _NoAttribute(self._refusal if name.isalpha() else name)

    def __eq__(self, other: object) -> bool:
        raise StoreError(self._refusal)

    __hash__ = object.__hash__

    @property  # JAX gets it before it looks at the value
    def __jax_array__(self) -> NoReturn:
        raise StoreError(self._refusal)

    def __array__(self, *_: Any, **__: Any) -> NoReturn:
        raise StoreError(self._refusal)

    @property
    def _refusal(self) -> str:
        state, leaf = self._state, self._leaf
        return (
            f"{state} of leaf {leaf} is in the store, not in JAX, which cannot compute "
            "with it. Outside of jit take the whole state of optax, "
            "store.state(like=plain.init(params)) with the optimizer that smart_update "
            f"was given, or store.read({state!r}, {leaf!r}); in jit compute with the "
            "gradients instead"
        )


jax.tree_util.register_pytree_node(
    StoredArray,
    lambda array: ((), (array._leaf, array._state, array.shape, array.dtype)),
    lambda description, _: StoredArray(*description),
)


class _NoAttribute(StoreError, AttributeError):
    """The refusal of a stored array where its attributes are asked for."""


class SmartUpdateState(NamedTuple):
    """State of `smart_update`, without the arrays on storage.

    Attributes:
      step: int32, the store's committed step that this state belongs to.
      skipped_steps: int32, steps skipped for a non-finite gradient.
      optimizer: optax's own state, with a `StoredArray` in the place of each stored
        array; counts and hyperparameters are there to read (and hyperparameters to
        set). Its attributes are this state's, too: `state.hyperparams`,
        `state.gradient_step`, `state.acc_grads`.
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
) -> SmartUpdateState:
    """Makes the state that `init` returns.

    Args:
      initial: its scalar state, for the types.
    """
    compat.register_with_flax(StoredArray)
    step, skipped, *scalars = held
    layout = program.layout
    leaves: list[Any] = [None] * layout.treedef.num_leaves
    for leaf in program.leaves:
        name, shape = leaf_name(leaf.info.path), leaf.info.shape
        for slot in leaf.slots:
            leaves[slot.state_index] = StoredArray(name, slot.name, shape, slot.dtype)
    for index, value, like in zip(layout.scalar_indices, scalars, initial, strict=True):
        leaves[index] = jnp.asarray(typed_like(value, like), like.dtype)
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


def check_state(
    state: SmartUpdateState, description: StoreDescription, *, num_feedback: int
) -> None:
    """Refuses the state of another optimizer, and other numbers of feedback."""
    parts = state.optimizer, state.error_feedback
    found = tuple(len(jax.tree.leaves(part)) for part in parts)
    expected = len(description.scalar_paths), num_feedback
    if found != expected:
        raise StaleStateError(
            f"the state given to update has {found[0]} scalars and error feedback of "
            f"{found[1]} leaves, this optimizer's has {expected[0]} "
            f"({list(description.scalar_paths)}) and {expected[1]}; make it with the "
            "init of the same transformation"
        )
