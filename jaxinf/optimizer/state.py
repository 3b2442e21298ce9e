"""The transformation's state, without the arrays on storage.

Invariant: a state belongs to one step of the store, and advances only with it.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

from jaxinf import compat
from jaxinf.engine import StoreDescription, raise_announced
from jaxinf.errors import StaleStateError, StoreError
from jaxinf.optimizer.host_side import COMMITTED, SKIPPED
from jaxinf.processes import raise_kept_interrupt
from jaxinf.program import InitProgram, typed_like
from jaxinf.store import leaf_name
from jaxinf.typing import PyTree


@jax.tree_util.register_static
@dataclass(frozen=True)
class Stored:
    """A stored array's node in the state that JAX sees: a tree without leaves.

    Attributes:
      leaf: the name of the params' leaf, its keys joined by ``/``.
      state: the name of the state, such as ``mu``.
      shape: the array's shape.
      dtype: the array's dtype in optax; the store may keep it in fewer bits.
    """

    leaf: str
    state: str
    shape: tuple[int, ...]
    dtype: np.dtype


class StoredArray:
    """A stored array as attributes of the state show it: it has no values.

    Optax, NumPy and JAX, which want values, get the error that says how to read it, and
    so does ``jax.tree.map``. Optax's functions that look for other state pass over it,
    as it has no leaves.
    """

    def __init__(self, node: Stored) -> None:
        self._node = node
        self.shape, self.dtype = node.shape, node.dtype

    def __repr__(self) -> str:
        return f"StoredArray({self._node.state} of {self._node.leaf})"

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
        node = self._node
        return (
            f"{node.state} of leaf {node.leaf} is in the store, not in JAX, which "
            "cannot compute with it. Outside of jit take the whole state of optax, "
            "store.state(like=plain.init(params)) with the optimizer that smart_update "
            f"was given, or store.read({node.state!r}, {node.leaf!r}); in jit compute "
            "with the gradients instead"
        )


def _refuse_values(node: Stored, _: Any) -> NoReturn:
    raise StoreError(StoredArray(node)._refusal)


# JAX makes trees anew where it has computed with their leaves.
jax.tree_util.register_pytree_node(
    StoredArray, lambda array: ((), array._node), _refuse_values
)


class _NoAttribute(StoreError, AttributeError):
    """The refusal of a stored array where its attributes are asked for."""


class _Fields(NamedTuple):
    step: jax.Array
    skipped_steps: jax.Array
    optimizer: PyTree
    error_feedback: PyTree = ()


class SmartUpdateState(_Fields):
    """State of `smart_update`, without the arrays on storage.

    Attributes:
      step: int32, the store's committed step that this state belongs to.
      skipped_steps: int32, steps skipped for a non-finite gradient.
      optimizer: optax's own state, with a `StoredArray` in the place of each stored
        array; counts and hyperparameters are there to read (and hyperparameters to
        set). Its attributes are this state's, too: `state.hyperparams`,
        `state.gradient_step`, `state.acc_grads`. JAX sees nothing of a stored array.
      error_feedback: float32, a tree like the params: the sum of gradient elements that
        compression has not sent; empty without error feedback.
    """

    def __new__(
        cls,
        step: jax.Array,
        skipped_steps: jax.Array,
        optimizer: PyTree,
        error_feedback: PyTree = (),
    ) -> "SmartUpdateState":
        fields = step, skipped_steps, _hidden(optimizer), error_feedback
        return tuple.__new__(cls, fields)

    @classmethod
    def _make(cls, iterable: Iterable[Any]) -> "SmartUpdateState":  # pyright: ignore
        return cls(*iterable)

    @property
    def optimizer(self) -> PyTree:  # pyright: ignore
        return _shown(self[2])

    def __getattr__(self, name: str) -> Any:
        # Not for protocols, which would take the state for what the optimizer's is.
        if not name.startswith("_") and hasattr(self[2], name):
            return _shown(getattr(self[2], name))
        raise AttributeError(
            f"neither {type(self).__name__} nor the {type(self[2]).__name__} in "
            f"it has the attribute {name!r}; optax.tree_utils.tree_get(state, {name!r})"
            " finds what lies deeper"
        )


def _check() -> None:
    """Raises an exception of a callback that must not raise.

    With several JAX devices it is a failure of the store, on one an interrupt.
    """
    raise_kept_interrupt()
    raise_announced()


compat.register_checked(SmartUpdateState, _check)


def in_jax(state: SmartUpdateState) -> PyTree:
    """Returns optax's state as JAX sees it, whose leaves are the scalar state."""
    return state[2]


def first_state(
    program: InitProgram,
    initial: Sequence[jax.Array],
    held: Sequence[Any],
    feedback: PyTree,
) -> SmartUpdateState:
    """Makes the state that `init` returns.

    Args:
      initial: initial scalar state, for the types.
    """
    compat.register_with_flax(StoredArray)
    step, skipped, *scalars = held
    layout = program.layout
    leaves: list[Any] = [None] * layout.treedef.num_leaves
    for leaf in program.leaves:
        name, shape = leaf_name(leaf.info.path), leaf.info.shape
        for slot in leaf.slots:
            leaves[slot.state_index] = Stored(name, slot.name, shape, slot.dtype)
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
    optimizer = jax.tree.structure(in_jax(state))
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
    parts = in_jax(state), state.error_feedback
    found = tuple(len(jax.tree.leaves(part)) for part in parts)
    expected = len(description.scalar_paths), num_feedback
    if found != expected:
        raise StaleStateError(
            f"the state given to update has {found[0]} scalars and error feedback of "
            f"{found[1]} leaves, this optimizer's has {expected[0]} "
            f"({list(description.scalar_paths)}) and {expected[1]}; make it with the "
            "init of the same transformation"
        )


def _shown(tree: PyTree) -> PyTree:
    """Returns a tree that refuses to compute with stored arrays.

    Dicts of other state are not copied: hyperparameters are set in them.
    """

    def stays(node: Any) -> bool:
        is_other = isinstance(node, dict) and _first_stored(node) is None
        return is_other or isinstance(node, Stored)

    return jax.tree.map(
        lambda node: StoredArray(node) if isinstance(node, Stored) else node,
        tree,
        is_leaf=stays,
    )


def _hidden(tree: PyTree) -> PyTree:
    """Reverses `_shown`."""
    if not isinstance(_first_stored(tree), StoredArray):
        return tree
    return jax.tree.map(
        lambda leaf: leaf._node if isinstance(leaf, StoredArray) else leaf,
        tree,
        is_leaf=lambda node: isinstance(node, StoredArray),
    )


def _first_stored(tree: PyTree) -> Stored | StoredArray | None:
    """Returns one of a tree's stored arrays."""
    kinds = Stored, StoredArray
    nodes = jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, kinds))
    return next((node for node in nodes if isinstance(node, kinds)), None)
