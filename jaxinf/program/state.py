"""Divides the leaves of an optax state into stored slots and scalar state.

A *slot* (Keras' term) is an array that an optimizer keeps for a leaf of the params,
such as mu. The *state* is the whole tree that ``tx.init`` returns.

Invariant: a state leaf is either the slot of exactly one params leaf (its key path
ends with that leaf's, and the shapes agree) or scalar state, which stays in JAX.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import jax
import numpy as np

from jaxinf import compat
from jaxinf.errors import UnsupportedTransformError
from jaxinf.program.average import AveragedState
from jaxinf.program.kernel import Kernel
from jaxinf.program.tree import LeafInfo, leaf_infos
from jaxinf.typing import AVERAGE, FLOAT32, FLOAT_DTYPES, KeyPath, PyTree

SCALAR_STATE_LIMIT_BYTES = 64 << 10
Path: TypeAlias = tuple[Any, ...]  # of keys of a tree, as JAX has them
_SLOT_DTYPES = (*FLOAT_DTYPES, *map(np.dtype, ("int32", "uint32", "bool")))


@dataclass(frozen=True)
class StateSlot:
    """A slot of a leaf.

    Attributes:
      name: For example ``mu``; unique among the slots of a leaf.
      dtype: Dtype that ``tx.init`` on float32 params gives it.
      state_index: Index in ``jax.tree.leaves`` of the state.
    """

    name: str
    dtype: np.dtype
    state_index: int


@dataclass(frozen=True)
class LeafKernel:
    """One leaf: its description, its slots, and the kernel of their update or init."""

    info: LeafInfo
    slots: tuple[StateSlot, ...]
    kernel: Kernel


@dataclass(frozen=True)
class StateLayout:
    """The division of a state into slots and scalar state.

    Attributes:
      scalar_indices: Indices of the scalar state among the state's leaves.
      scalar_paths: Its key paths as `compat.keystr` prints them, for errors.
      scalar_keys: Its key paths in the form that a store keeps.
      avals, keys: Shape, dtype and key path of each leaf of the state.
    """

    treedef: Any
    slots: tuple[tuple[StateSlot, ...], ...]
    scalar_indices: tuple[int, ...]
    scalar_paths: tuple[str, ...]
    scalar_keys: tuple[KeyPath, ...]
    avals: tuple[jax.ShapeDtypeStruct, ...] = field(repr=False)
    keys: tuple[KeyPath, ...] = field(repr=False)


def float32_avals(params: PyTree) -> PyTree:
    """Returns the params' avals as an optimizer is traced with them: in float32."""
    infos = leaf_infos(params)
    avals = [jax.ShapeDtypeStruct(info.shape, FLOAT32) for info in infos]
    return jax.tree.unflatten(jax.tree.structure(params), avals)


def divide_state(state: PyTree, params: PyTree) -> StateLayout:
    """Divides the state of an optimizer for `params` into slots and scalar state.

    Raises:
      UnsupportedTransformError: The scalar state is longer than 64 KiB, or a slot has
        the average's name.
    """
    infos = leaf_infos(params)
    leaves, treedef = jax.tree_util.tree_flatten_with_path(state)
    param_keys = [path for path, _ in jax.tree_util.tree_flatten_with_path(params)[0]]
    paths, avals = [path for path, _ in leaves], [aval for _, aval in leaves]
    by_keys = dict(zip(param_keys, enumerate(infos), strict=True))
    params_leaves = [_find_params_leaf(path, aval, by_keys) for path, aval in leaves]
    names = _name_slots(paths, params_leaves, param_keys)
    if isinstance(state, AveragedState) and f"{AVERAGE}_1" in names.values():
        raise UnsupportedTransformError(
            f"optimizer state: expected another name than {AVERAGE}, that of the "
            "params' average; rename the field of the transformation's state, or leave "
            "the average out"
        )
    slots: list[list[StateSlot]] = [[] for _ in infos]
    for index, leaf in enumerate(params_leaves):
        if leaf is not None:
            dtype = np.dtype(avals[index].dtype)
            slots[leaf].append(StateSlot(names[index], dtype, index))
    scalars = [index for index, leaf in enumerate(params_leaves) if leaf is None]
    texts = [compat.keystr(paths[index]) for index in scalars]
    _check_scalar_bytes(texts, [avals[index] for index in scalars])
    keys = tuple(state_keys(state))
    return StateLayout(
        treedef=treedef,
        slots=tuple(map(tuple, slots)),
        scalar_indices=tuple(scalars),
        scalar_paths=tuple(texts),
        scalar_keys=tuple(keys[index] for index in scalars),
        avals=tuple(avals),
        keys=keys,
    )


def state_keys(state: PyTree) -> list[KeyPath]:
    """Returns the key path of every leaf, without the level that an average adds."""
    paths = [path for path, _ in jax.tree_util.tree_flatten_with_path(state)[0]]
    keys = [compat.path_keys(path) for path in paths]
    if not isinstance(state, AveragedState):
        return keys
    return [path[1:] if path[0] == ("field", "inner") else path for path in keys]


def _find_params_leaf(
    path: Path, aval: Any, by_keys: Mapping[Path, tuple[int, LeafInfo]]
) -> int | None:
    # The longest matching path: params may hold both a/b and b.
    suffixes = (path[start:] for start in range(len(path) + 1))
    match = next((by_keys[suffix] for suffix in suffixes if suffix in by_keys), None)
    if match is None:
        return None
    leaf, info = match
    # A count differs from the slot of a 0-d or bare leaf only in its dtype.
    is_anonymous = not info.shape or not info.path
    dtypes = FLOAT_DTYPES if is_anonymous else _SLOT_DTYPES
    fits = tuple(aval.shape) == info.shape and aval.dtype in dtypes
    return leaf if fits else None


def _name_slots(
    paths: Sequence[Path],
    params_leaves: Sequence[int | None],
    param_keys: Sequence[Path],
) -> dict[int, str]:
    """Names slots, by index in the state: one name a prefix, unique within a leaf."""
    leaves_of: dict[Path, set[int]] = {}
    prefix_of: dict[int, Path] = {}
    for index, (path, leaf) in enumerate(zip(paths, params_leaves, strict=True)):
        if leaf is not None:
            prefix = path[: len(path) - len(param_keys[leaf])]
            prefix_of[index] = prefix
            leaves_of.setdefault(prefix, set()).add(leaf)
    bases = {prefix: _base_name(prefix) for prefix in leaves_of}
    reserved = {"params", *bases.values()}
    leaves_with: dict[str, set[int]] = {"params": set(range(len(param_keys)))}
    names: dict[Path, str] = {}
    for prefix, leaves in leaves_of.items():
        name, count = bases[prefix], 0
        while leaves_with.get(name, set()) & leaves or (count and name in reserved):
            count += 1
            name = f"{bases[prefix]}_{count}"
        leaves_with.setdefault(name, set()).update(leaves)
        names[prefix] = name
    return {index: names[prefix] for index, prefix in prefix_of.items()}


def _base_name(prefix: Path) -> str:
    fields = [name for kind, name in compat.path_keys(prefix) if kind == "field"]
    name = fields[-1] if fields else "_".join(compat.path_names(prefix))
    return re.sub(r"[^A-Za-z0-9_]+", "_", name) or "state"


def _check_scalar_bytes(paths: Sequence[str], avals: Sequence[Any]) -> None:
    sizes = [math.prod(aval.shape) * aval.dtype.itemsize for aval in avals]
    if sum(sizes) > SCALAR_STATE_LIMIT_BYTES:
        num_bytes, path = max(zip(sizes, paths, strict=True), key=lambda pair: pair[0])
        raise UnsupportedTransformError(
            f"optimizer state{path}: expected state of the shape of its params leaf "
            f"(kept on storage) or at most {SCALAR_STATE_LIMIT_BYTES} bytes in all of "
            f"other state (kept in JAX), found {sum(sizes)} bytes, {num_bytes} of them "
            "here; use a transformation without factored or per-row state"
        )


ReadableState: TypeAlias = Literal["", "sums", "all"]
"""The slots that a prologue may read: none, sums of gradients, or all."""


@dataclass(frozen=True)
class PrologueState:
    """The slots that a prologue needs, so that a step reads them before its updates.

    These are all slots for optimizers that reduce over them, such as LAMB; or the sums
    of gradients of an ``optax.MultiSteps``, in the last micro-step, for their norm.

    Attributes:
      slots: The slots, each with its leaf, in the order of the leaves.
      counter: Index in the scalar state of a count. A step whose new count is 0 needs
        the slots; in others finite numbers may take their place. None if each step
        needs them.
    """

    slots: tuple[tuple[int, StateSlot], ...]
    counter: int | None


def find_prologue_state(
    layout: StateLayout, may_read: ReadableState
) -> Iterator[PrologueState]:
    """Yields the sums of an ``optax.MultiSteps`` with its count, then all slots."""
    pairs = [(leaf, slot) for leaf, slots in enumerate(layout.slots) for slot in slots]
    for counter, keys in enumerate(layout.scalar_keys if may_read else ()):
        prefix = (*keys[:-1], ("field", "acc_grads"))
        sums = tuple(
            (leaf, slot)
            for leaf, slot in pairs
            if layout.keys[slot.state_index][: len(prefix)] == prefix
        )
        is_count = keys[-1:] == (("field", "mini_step"),)
        if is_count and [leaf for leaf, _ in sums] == [*range(len(layout.slots))]:
            yield PrologueState(sums, counter)
    needed = tuple((leaf, slot) for leaf, slot in pairs if slot.name != AVERAGE)
    if may_read == "all" and needed:
        yield PrologueState(needed, counter=None)
