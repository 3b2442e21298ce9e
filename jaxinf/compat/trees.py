"""Trees: keys of JAX's paths, a class that is checked when flattened, Flax and Orbax.

Invariant: names of leaves depend on the kinds and values of keys, not on JAX's text.
Flax and Orbax are not imported.
"""

import sys
from collections.abc import Callable
from typing import Any

import jax
from jax.tree_util import DictKey, FlattenedIndexKey, GetAttrKey, SequenceKey

ORBAX_HANDLER = (
    "orbax.checkpoint._src.handlers.pytree_checkpoint_handler.PyTreeCheckpointHandler"
)
"""Orbax's handler of a pytree, as a checkpoint's metadata names it."""

ORBAX_DICT_KEY = 2
"""``KeyType.DICT`` of Orbax's metadata of trees."""


def path_keys(path: tuple[Any, ...]) -> tuple[tuple[str, Any], ...]:
    """Converts a key path to a `jaxinf.typing.KeyPath`, without JAX's classes."""
    return tuple(map(_kind_and_value, path))


def path_names(path: tuple[Any, ...]) -> tuple[str, ...]:
    """Returns the entries of a key path as strings."""
    return tuple(str(value) for _, value in path_keys(path))


def _kind_and_value(key: Any) -> tuple[str, Any]:
    match key:
        case DictKey() | FlattenedIndexKey():
            return "key", key.key
        case SequenceKey():
            return "key", key.idx
        case GetAttrKey():
            return "field", key.name
    return "other", str(key)


def register_with_check(kind: type[tuple[Any, ...]], check: Callable[[], None]) -> None:
    """Registers a ``NamedTuple`` as a tree that is checked when JAX flattens it.

    Each call of a jitted function flattens its arguments, and raises the exception of
    `check`.
    """
    fields = kind._fields  # pyright: ignore[reportAttributeAccessIssue]
    keys = tuple(map(GetAttrKey, fields))

    def flatten_with_keys(value: tuple[Any, ...]) -> tuple[Any, None]:
        check()
        return tuple(zip(keys, value, strict=True)), None

    jax.tree_util.register_pytree_with_keys(
        kind, flatten_with_keys, lambda _, children: kind(*children)
    )


def register_with_flax(node: type) -> None:
    """Lets Flax's serialization pass over nodes of a tree that have no arrays.

    Nothing is done, and Flax is not imported, where a program does not use it.
    """
    flax = sys.modules.get("flax.serialization")
    if flax is not None:
        flax.register_serialization_state(
            node, lambda node: {}, lambda node, state: node, override=True
        )
