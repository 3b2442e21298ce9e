"""Leaves that stay as they are, by patterns of their paths.

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
from jaxinf.train.data.errors import shown_names
from jaxinf.typing import DeferredArray, PyTree


@dataclasses.dataclass(frozen=True)
class Frozen:
    """The leaves that stay as they are; false if there are none.

    Attributes:
      all_but: whether the leaves that they match are those that are trained.
    """

    patterns: tuple[str, ...] = ()
    all_but: bool = False

    def __bool__(self) -> bool:
        return bool(self.patterns)

    def __contains__(self, name: str) -> bool:
        return matches(name, self.patterns) != self.all_but


def matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def check_frozen(patterns: tuple[str, ...], params: PyTree, model: str) -> None:
    """Refuses patterns that match no leaf of the model, or all together."""
    names = leaves_by_name(params)
    for pattern in patterns:
        if not fnmatch.filter(names, pattern):
            raise UsageError(
                f"--freeze {pattern}: expected a pattern of leaves of {model}, found "
                f"none that it matches; there are {shown_names(names)}"
            )
    if all(name in Frozen(patterns) for name in names):
        raise UsageError(
            f"--freeze {' '.join(patterns)}: expected patterns that leave a leaf to "
            f"train, found that they match all {len(names)} of {model}"
        )


def check_source(frozen: Frozen, params: PyTree, source: Any) -> None:
    """Refuses to freeze leaves that a checkpoint lacks, as they stay random."""
    named = leaves_by_name(params).items()
    new = [name for name, leaf in named if not isinstance(leaf, DeferredArray)]
    if frozen and (random := [name for name in new if name in frozen]):
        raise UsageError(
            f"{'--lora' if frozen.all_but else '--freeze'}: {shown_names(random)} are "
            f"not in {source}, so they would stay random; train them first, without it"
        )


def leaves_by_name(params: PyTree) -> dict[str, Any]:
    named = jax.tree_util.tree_leaves_with_path(params)
    return {path_name(keys): leaf for keys, leaf in named}


def train_others(
    frozen: Frozen, optimizer: optax.GradientTransformation
) -> optax.GradientTransformation:
    """Limits an optimizer to the leaves that are not frozen."""
    if not frozen:
        return optimizer

    def labels(params: PyTree) -> PyTree:
        all_trained = jax.tree.map(lambda _: "trained", params)
        return _changed(frozen, lambda _: "frozen", all_trained)

    return optax.multi_transform(
        {"trained": optimizer, "frozen": optax.set_to_zero()}, labels
    )


def without_gradients(frozen: Frozen, params: PyTree) -> PyTree:
    """Returns the params; a loss of them has gradients of zero for frozen leaves."""
    return _changed(frozen, jax.lax.stop_gradient, params)


def trained(frozen: Frozen, tree: PyTree) -> PyTree:
    """Returns a tree like the params', with None in place of frozen leaves."""
    return _changed(frozen, lambda leaf: None, tree)


def _changed(frozen: Frozen, change: Callable[[Any], Any], tree: PyTree) -> PyTree:
    if not frozen:
        return tree
    return jax.tree_util.tree_map_with_path(
        lambda keys, leaf: change(leaf) if path_name(keys) in frozen else leaf, tree
    )
