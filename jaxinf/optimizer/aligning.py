"""Lines up the gradients and params that a program gives with the optimizer's leaves.

Invariant: the optimizer's leaves are the floating-point arrays of the params. A leaf
for which the program has None instead of a gradient stays as it is, and so do others.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxinf.program import is_trained, trained
from jaxinf.typing import PyTree


@dataclass(frozen=True)
class Shapes:
    """A tree of shapes and dtypes, which can be hashed."""

    treedef: Any
    leaves: tuple[jax.ShapeDtypeStruct, ...]

    @classmethod
    def of(cls, tree: PyTree) -> "Shapes":
        leaves, treedef = jax.tree.flatten(tree)
        avals = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves]
        return cls(treedef, tuple(avals))

    @property
    def tree(self) -> PyTree:
        return self.treedef.unflatten(self.leaves)


@dataclass(frozen=True)
class Aligned:
    """Gradients and params by the optimizer's leaves.

    Attributes:
      gradients: a tree like that of the optimizer's leaves; None where there is none.
      params: the optimizer's leaves; None if the program gives no params.
      shapes: shapes and dtypes of the leaves, if gradients are missing and there are no
        params to tell them.
    """

    gradients: PyTree
    params: PyTree | None
    shapes: "Shapes | None"
    _treedef: Any
    _parts: Sequence[tuple[Any, Sequence[Any]]]

    def updates(self, made: PyTree) -> PyTree:
        """Returns the updates in the tree of the program's gradients."""
        updates = iter(jax.tree.leaves(made))
        found = []
        for gradient, leaves in self._parts:
            if gradient is None:
                found.append(None)
            elif leaves and is_trained(leaves[0]):
                found.append(next(updates))
            else:
                found.append(jax.tree.map(jnp.zeros_like, leaves[0]))
        return self._treedef.unflatten(found)


def align(updates: PyTree, params: PyTree | None, shapes: Shapes | None) -> Aligned:
    """Lines up gradients and params.

    Args:
      updates: the gradients. None may stand for that of a leaf or of a subtree, which
        has no update then.
      params: the params; None if they are not available.
      shapes: those of the params of the last `init`, if it is known.

    Raises:
      ValueError: the gradients' tree is not the params'.
    """
    flat, treedef = jax.tree.flatten(updates, is_leaf=lambda x: x is None)
    known = params
    if params is None and shapes is not None and any(x is None for x in flat):
        known = shapes.tree
    if known is None:
        parts = [(x, [] if x is None else [x]) for x in flat]
        return Aligned(trained(updates), None, None, treedef, parts)
    parts = [(g, jax.tree.leaves(part)) for g, part in _pairs(flat, treedef, known)]
    known = trained(known)
    gradients = [
        gradient for gradient, leaves in parts for leaf in leaves if is_trained(leaf)
    ]
    tree = jax.tree.structure(known).unflatten(gradients)
    if params is None:
        return Aligned(tree, None, shapes, treedef, parts)
    return Aligned(tree, known, None, treedef, parts)


def _pairs(
    flat: Sequence[Any], treedef: Any, params: PyTree
) -> list[tuple[Any, PyTree]]:
    """Pairs each gradient with the part of the params that has its place."""
    leaves = jax.tree.leaves(params)
    if len(leaves) == len(flat) and not any(x is None for x in flat):
        return list(zip(flat, leaves, strict=True))  # whatever contains them
    pairs = list(zip(flat, treedef.flatten_up_to(params), strict=True))
    if any(g is not None and not jax.tree_util.all_leaves([p]) for g, p in pairs):
        raise ValueError(
            "update: expected a gradient, or None, for each leaf of the params, found "
            f"gradients of the structure {treedef} and params of "
            f"{jax.tree.structure(params)}"
        )
    return pairs
