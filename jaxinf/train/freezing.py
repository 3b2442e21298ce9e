"""Leaves that stay as they are, by patterns of their paths.

Invariant: a frozen leaf's gradient is zero, and so is its update; it counts in no norm,
and has no state.
"""

import fnmatch
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxinf_models import abstract_params

from jaxinf import compat
from jaxinf.command_line import UsageError
from jaxinf.train.config import TrainConfig
from jaxinf.typing import PyTree

__all__ = ["check_frozen", "train_others", "trained", "with_zeros", "without_gradients"]

_MOST_NAMES = 8


def check_frozen(config: TrainConfig) -> None:
    """Refuses patterns that match no leaf of the model, or all together.

    Raises:
      UsageError: names the pattern, and leaves that there are.
    """
    if not config.freeze:
        return
    _, params = abstract_params(config.model_config)
    names = [_name(keys) for keys, _ in jax.tree_util.tree_leaves_with_path(params)]
    shown = ", ".join(names[:_MOST_NAMES])
    if len(names) > _MOST_NAMES:
        shown += f" and {len(names) - _MOST_NAMES} more"
    for pattern in config.freeze:
        if not fnmatch.filter(names, pattern):
            raise UsageError(
                f"--freeze {pattern}: expected a pattern of leaves of "
                f"{config.model_name}, found none that it matches; there are {shown}"
            )
    if all(_is_frozen(config.freeze, name) for name in names):
        raise UsageError(
            f"--freeze {' '.join(config.freeze)}: expected patterns that leave a leaf "
            f"to train, found that they match all {len(names)} of {config.model_name}"
        )


def train_others(
    patterns: Sequence[str], optimizer: optax.GradientTransformation
) -> optax.GradientTransformation:
    """Limits an optimizer to the leaves that no pattern matches."""
    if not patterns:
        return optimizer

    def labels(params: PyTree) -> PyTree:
        return _by_name(
            lambda name, _: "frozen" if _is_frozen(patterns, name) else "trained",
            params,
        )

    return optax.multi_transform(
        {"trained": optimizer, "frozen": optax.set_to_zero()}, labels
    )


def with_zeros(
    optimizer: optax.GradientTransformation,
) -> optax.GradientTransformation:
    """Lets a plain optimizer take None for gradients; its updates have None there."""

    def update(
        updates: PyTree, state: Any, params: PyTree | None = None
    ) -> tuple[PyTree, Any]:
        def map_given(function: Callable[[Any, Any], Any], others: PyTree) -> PyTree:
            return jax.tree.map(function, updates, others, is_leaf=lambda x: x is None)

        whole = map_given(lambda g, p: jnp.zeros_like(p) if g is None else g, params)
        whole, state = optimizer.update(whole, state, params)
        return map_given(lambda g, u: None if g is None else u, whole), state

    return optax.GradientTransformation(optimizer.init, update)


def without_gradients(patterns: Sequence[str], params: PyTree) -> PyTree:
    """Returns the params; a loss of them has gradients of zero for frozen leaves."""
    if not patterns:
        return params
    return _by_name(
        lambda name, leaf: (
            jax.lax.stop_gradient(leaf) if _is_frozen(patterns, name) else leaf
        ),
        params,
    )


def trained(patterns: Sequence[str], tree: PyTree) -> PyTree:
    """Returns a tree like the params', with None in place of frozen leaves."""
    if not patterns:
        return tree
    return _by_name(
        lambda name, leaf: None if _is_frozen(patterns, name) else leaf, tree
    )


def _is_frozen(patterns: Sequence[str], name: str) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _by_name(function: Callable[[str, Any], Any], params: PyTree) -> PyTree:
    return jax.tree_util.tree_map_with_path(
        lambda keys, leaf: function(_name(keys), leaf), params
    )


def _name(keys: Any) -> str:
    return "/".join(map(compat.key_name, keys))
