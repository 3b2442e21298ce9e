"""Frozen leaves, selected by patterns of their paths.

Invariant: a frozen leaf's gradient is zero, and so is its update; it counts in no norm,
and has no state.
"""

import dataclasses
import fnmatch
from collections.abc import Callable
from typing import Any

import jax
import optax

from jaxinf.command_line import UsageError
from jaxinf.program import path_name
from jaxinf.train.data.errors import list_names
from jaxinf.typing import DeferredArray, PyTree


@dataclasses.dataclass(frozen=True)
class FrozenLeaves:
    """The set of frozen leaves, by path; false if it is empty.

    If it is inverted, the patterns match the leaves that are trained instead.
    """

    patterns: tuple[str, ...] = ()
    is_inverted: bool = False

    def __bool__(self) -> bool:
        return bool(self.patterns)

    def __contains__(self, name: str) -> bool:
        return matches_any(name, self.patterns) != self.is_inverted


def matches_any(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def check_frozen(patterns: tuple[str, ...], params: PyTree, model: str) -> None:
    """Refuses a pattern that matches no leaf, and patterns that match every leaf."""
    names = leaves_by_name(params)
    for pattern in patterns:
        if not fnmatch.filter(names, pattern):
            raise UsageError(
                f"--freeze {pattern}: expected a pattern of leaves of {model}, found "
                f"none that it matches; there are {list_names(names)}"
            )
    if all(name in FrozenLeaves(patterns) for name in names):
        raise UsageError(
            f"--freeze {' '.join(patterns)}: expected patterns that leave a leaf to "
            f"train, found that they match all {len(names)} of {model}"
        )


def check_frozen_source(frozen: FrozenLeaves, params: PyTree, source: Any) -> None:
    """Refuses to freeze leaves that a checkpoint lacks: they would stay random."""
    leaves = leaves_by_name(params).items()
    new = [name for name, leaf in leaves if not isinstance(leaf, DeferredArray)]
    if frozen and (random := [name for name in new if name in frozen]):
        raise UsageError(
            f"{'--lora' if frozen.is_inverted else '--freeze'}: {list_names(random)} "
            f"are not in {source}, so they would stay random; train them first, "
            "without it"
        )


def leaves_by_name(params: PyTree) -> dict[str, Any]:
    leaves = jax.tree_util.tree_leaves_with_path(params)
    return {path_name(keys): leaf for keys, leaf in leaves}


def limit_to_trained(
    frozen: FrozenLeaves, optimizer: optax.GradientTransformation
) -> optax.GradientTransformation:
    if not frozen:
        return optimizer

    def labels(params: PyTree) -> PyTree:
        all_trained = jax.tree.map(lambda _: "trained", params)
        return _map_frozen(frozen, lambda _: "frozen", all_trained)

    return optax.multi_transform(
        {"trained": optimizer, "frozen": optax.set_to_zero()}, labels
    )


def stop_frozen_gradients(frozen: FrozenLeaves, params: PyTree) -> PyTree:
    """Returns the params; a loss of them has gradients of zero for frozen leaves."""
    return _map_frozen(frozen, jax.lax.stop_gradient, params)


def mask_frozen(frozen: FrozenLeaves, tree: PyTree) -> PyTree:
    """Returns a tree like the params', with None in place of frozen leaves."""
    return _map_frozen(frozen, lambda leaf: None, tree)


def _map_frozen(
    frozen: FrozenLeaves, change: Callable[[Any], Any], tree: PyTree
) -> PyTree:
    if not frozen:
        return tree
    return jax.tree_util.tree_map_with_path(
        lambda keys, leaf: change(leaf) if path_name(keys) in frozen else leaf, tree
    )
