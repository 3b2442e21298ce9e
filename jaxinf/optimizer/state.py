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
class StoredNode:
    """A stored array's node in the state that JAX sees: a tree without leaves.

    Attributes:
      leaf: The name of the params' leaf, its keys joined by ``/``.
      slot: The array's name among those of the leaf, such as ``mu``.
      dtype: The array's dtype in optax; the store may keep it in fewer bits.
    """

    leaf: str
    slot: str
    shape: tuple[int, ...]
    dtype: np.dtype


class StoredArray:
    """A stored array as attributes of the state show it: it has no values.

    Optax, NumPy, JAX and ``jax.tree.map``, which want values, get the error that says
    how to read it. Optax's functions that look for other state pass over it, as it has
    no leaves.
    """

    def __init__(self, node: StoredNode) -> None:
        self._node = node
        self.shape, self.dtype = node.shape, node.dtype

    def __repr__(self) -> str:
        return f"StoredArray({self._node.slot} of {self._node.leaf})"

    def __getattr__(self, name: str) -> NoReturn:
        raise _NoAttribute(self._refusal if name.isalpha() else name)

    def __eq__(self, other: object) -> bool:
        raise StoreError(self._refusal)

    __hash__ = object.__hash__

    @property  # JAX asks for it before it looks at the value
    def __jax_array__(self) -> NoReturn:
        raise StoreError(self._refusal)

    def __array__(self, *_: Any, **__: Any) -> NoReturn:
        raise StoreError(self._refusal)

    @property
    def _refusal(self) -> str:
        node = self._node
        return (
            f"{node.slot} of leaf {node.leaf} is in the store, not in JAX, which "
            "cannot compute with it. Outside of jit take the whole state of optax, "
            "store.state(like=plain.init(params)) with the optimizer that smart_update "
            f"was given, or store.read({node.slot!r}, {node.leaf!r}); in jit compute "
            "with the gradients instead"
        )


def _refuse_values(node: StoredNode, _: Any) -> NoReturn:
    raise StoreError(StoredArray(node)._refusal)


# JAX unflattens a tree where it has computed with the leaves.
jax.tree_util.register_pytree_node(
    StoredArray, lambda array: ((), array._node), _refuse_values
)


class _NoAttribute(StoreError, AttributeError):
    """The refusal to give an attribute of a stored array."""


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
      optimizer: Optax's own state, with a `StoredArray` in the place of each stored
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
        fields = step, skipped_steps, _with_nodes(optimizer), error_feedback
        return tuple.__new__(cls, fields)

    @classmethod
    def _make(cls, iterable: Iterable[Any]) -> "SmartUpdateState":  # pyright: ignore
        return cls(*iterable)

    @property
    def optimizer(self) -> PyTree:  # pyright: ignore
        return _with_arrays(self[2])

    def __getattr__(self, name: str) -> Any:
        # Not for protocols, which would take the state for what the optimizer's is.
        if not name.startswith("_") and hasattr(self[2], name):
            return _with_arrays(getattr(self[2], name))
        raise AttributeError(
            f"neither {type(self).__name__} nor the {type(self[2]).__name__} in "
            f"it has the attribute {name!r}; optax.tree_utils.tree_get(state, {name!r})"
            " finds what lies deeper"
        )


def _raise_kept_exception() -> None:
    """Raises the exception of a callback that must not raise.

    With several JAX devices it is a failure of the store, on one an interrupt.
    """
    raise_kept_interrupt()
    raise_announced()


compat.register_with_check(SmartUpdateState, _raise_kept_exception)


def scalar_tree(state: SmartUpdateState) -> PyTree:
    """Returns optax's state as JAX sees it, whose leaves are the scalar state."""
    return state[2]


class InitResult(NamedTuple):
    """What `init` computes and reads.

    Attributes:
      stored: Step, skipped steps and scalar state of the store's last step.
      feedback: The error feedback of each leaf; may be empty.
    """

    initial: Sequence[jax.Array]
    stored: Sequence[Any]
    feedback: Sequence[jax.Array]


def first_state(
    program: InitProgram, result: InitResult, feedback: PyTree
) -> SmartUpdateState:
    """Makes the state that `init` returns; `feedback` is that of `result` as a tree."""
    compat.register_with_flax(StoredArray)
    layout = program.layout
    leaves: list[Any] = [None] * layout.treedef.num_leaves
    for leaf in program.leaves:
        name, shape = leaf_name(leaf.info.path), leaf.info.shape
        for slot in leaf.slots:
            leaves[slot.state_index] = StoredNode(name, slot.name, shape, slot.dtype)
    step, skipped_steps, *scalars = result.stored
    triples = zip(layout.scalar_indices, scalars, result.initial, strict=True)
    for index, value, like in triples:
        leaves[index] = jnp.asarray(typed_like(value, like), like.dtype)
    return SmartUpdateState(
        jnp.asarray(step, jnp.int32),
        jnp.asarray(skipped_steps, jnp.int32),
        jax.tree.unflatten(layout.treedef, leaves),
        feedback,
    )


def next_state(
    state: SmartUpdateState,
    verdict: jax.Array,
    *,
    scalars: Sequence[jax.Array],
    feedback: Sequence[jax.Array],
) -> SmartUpdateState:
    """Makes the state after a step.

    Args:
      scalars, feedback: The leaves of a committed step.
    """
    is_committed = verdict == COMMITTED

    def committed(tree: PyTree, new: Sequence[jax.Array]) -> PyTree:
        old, treedef = jax.tree.flatten(tree)
        pairs = zip(new, old, strict=True)
        return treedef.unflatten([jnp.where(is_committed, n, o) for n, o in pairs])

    return SmartUpdateState(
        state.step + is_committed.astype(jnp.int32),
        state.skipped_steps + (verdict == SKIPPED).astype(jnp.int32),
        committed(scalar_tree(state), scalars),
        committed(state.error_feedback, feedback),
    )


def check_state(
    state: SmartUpdateState, description: StoreDescription, *, num_feedback: int
) -> None:
    """Refuses another optimizer's state, and error feedback of another number."""
    parts = scalar_tree(state), state.error_feedback
    found = tuple(len(jax.tree.leaves(part)) for part in parts)
    expected = len(description.scalar_paths), num_feedback
    if found != expected:
        raise StaleStateError(
            f"the state given to update has {found[0]} scalars and error feedback of "
            f"{found[1]} leaves, this optimizer's has {expected[0]} "
            f"({list(description.scalar_paths)}) and {expected[1]}; make it with the "
            "init of the same transformation"
        )


def _with_arrays(tree: PyTree) -> PyTree:
    """Puts a `StoredArray` in the place of each node.

    Dicts without nodes are not copied: hyperparameters are set in them.
    """

    def stays(node: Any) -> bool:
        has_no_nodes = isinstance(node, dict) and _first_stored(node) is None
        return has_no_nodes or isinstance(node, StoredNode)

    return jax.tree.map(
        lambda node: StoredArray(node) if isinstance(node, StoredNode) else node,
        tree,
        is_leaf=stays,
    )


def _with_nodes(tree: PyTree) -> PyTree:
    """Reverses `_with_arrays`."""
    if not isinstance(_first_stored(tree), StoredArray):
        return tree
    return jax.tree.map(
        lambda leaf: leaf._node if isinstance(leaf, StoredArray) else leaf,
        tree,
        is_leaf=lambda node: isinstance(node, StoredArray),
    )


def _first_stored(tree: PyTree) -> StoredNode | StoredArray | None:
    kinds = StoredNode, StoredArray
    nodes = jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, kinds))
    return next((node for node in nodes if isinstance(node, kinds)), None)
