"""Trees of JAX: keys of paths, and a class that is looked into with us.

Invariant: names of leaves depend on the kinds and values of keys, not on JAX's text.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax.tree_util import (
    DictKey,
    FlattenedIndexKey,
    GetAttrKey,
    SequenceKey,
)


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


def register_checked(kind: type[tuple[Any, ...]], check: Callable[[], None]) -> None:
    """Registers a ``NamedTuple`` as a tree of its fields that JAX looks into with us.

    Args:
      kind: the class.
      check: is called each time that JAX flattens one, as each call of a jitted
        function does with its arguments; its exception is that call's.
    """
    fields = kind._fields  # pyright: ignore[reportAttributeAccessIssue]
    keys = tuple(map(GetAttrKey, fields))

    def flatten_with_keys(value: tuple[Any, ...]) -> tuple[Any, None]:
        check()
        return tuple(zip(keys, value, strict=True)), None

    jax.tree_util.register_pytree_with_keys(
        kind, flatten_with_keys, lambda _, children: kind(*children)
    )
