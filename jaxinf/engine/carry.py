"""Arrays that a caller gives a step to commit with it.

Invariant: a step carries what its own update was given, and nothing of a step before.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxinf.documents import first_few
from jaxinf.errors import StoreMismatchError
from jaxinf.program import key_data, leaf_path, typed_like
from jaxinf.store import (
    CARRY,
    CarriedArray,
    CommitRecord,
    check_carry,
    dtype_of,
    read_carry,
)
from jaxinf.typing import Array, PyTree

_OF_NUMPY = (bool, int, float, np.ndarray, np.generic)


def carried_leaves(tree: PyTree, what: str = CARRY) -> dict[tuple[str, ...], Any]:
    """Returns a tree's arrays by their paths, typed keys as numbers; traceable.

    Args:
      what: name of the tree, for messages.

    Raises:
      TypeError: a leaf is no array of numbers; names it.
      ValueError: two leaves have one path, as of the keys 1 and "1".
    """
    found = {}
    for keys, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        path = leaf_path(keys)
        where = "/".join((what, *path))
        if isinstance(leaf, _OF_NUMPY):
            leaf = jnp.asarray(leaf)
        is_array = hasattr(leaf, "shape") and hasattr(leaf, "dtype")
        data = data_of(leaf) if is_array else np.empty(0, object)
        dtype = np.dtype(data.dtype)
        if dtype.kind not in "biuf" and dtype.name != "bfloat16":
            kind = dtype.name if is_array else type(leaf).__name__
            raise TypeError(
                f"{where}: expected real numbers, bools or typed keys, found {kind}; "
                "leave it out of the tree"
            )
        if path in found:
            raise ValueError(f"{where}: expected one leaf of this name, found two")
        found[path] = data
    return found


def check_carried(
    store: Path, carried: Mapping[tuple[str, ...], Any], states: Iterable[str]
) -> None:
    """Refuses what a step cannot carry: ValueError.

    Args:
      carried: result of `carried_leaves`; nothing but shapes and dtypes is read.
      states: names of the store's states.
    """
    try:
        check_carry(_form_of(carried))
    except ValueError as error:
        raise ValueError(f"{store}: carry: {error}") from None
    if carried and CARRY in states:
        raise ValueError(
            f"{store}: carry: expected no state of the optimizer of this name, found "
            "one, whose files it would share; rename that field"
        )


def carry_fields(carried: Mapping[tuple[str, ...], Array]) -> dict[str, Any]:
    """Returns the fields of a record that carries these arrays; copies them."""
    raw = [value.tobytes() for value in carried.values()]
    carry = tuple(
        CarriedArray.of(path, value.shape, value.dtype.name, own)
        for (path, value), own in zip(carried.items(), raw, strict=True)
    )
    return {"carry": carry, "carried": tuple(raw)}


def carry_form(carry: Iterable[CarriedArray]) -> tuple[CarriedArray, ...]:
    """Returns names, shapes and dtypes alone, which most steps share."""
    return tuple(CarriedArray(x.path, x.shape, x.dtype, "") for x in carry)


def read_carried(
    store: Path, folder: Path, record: CommitRecord, like: PyTree
) -> PyTree:
    """Returns what a step carries, in the form of a tree; blocks.

    Args:
      folder: the step's.
    """
    carry, wanted = record.carry, carried_leaves(like, "like")
    where = f"{store}: carried: step {record.step}"
    if not carry:
        raise StoreMismatchError(
            f"{where}: expected arrays that it carries, found none; give them to each "
            "step, tx.update(grads, state, params, carry=tree), or jaxinf.stream(…, "
            "carry=fn), and read them if store.step is not 0"
        )
    if {*carry_form(carry)} != {*_form_of(wanted)}:
        raise StoreMismatchError(
            f"{where}: expected a tree `like` of its arrays, {_shown(carry)}, found "
            f"{_shown(_form_of(wanted))}; give the tree that update was given"
        )
    values = {
        one.path: np.frombuffer(raw, dtype_of(one.dtype)).reshape(one.shape)
        for one, raw in zip(carry, read_carry(folder, carry), strict=True)
    }
    leaves, treedef = jax.tree.flatten(like)
    return treedef.unflatten(
        [
            array_like(values[path], leaf if hasattr(leaf, "dtype") else data)
            for (path, data), leaf in zip(wanted.items(), leaves, strict=True)
        ]
    )


def _form_of(carried: Mapping[tuple[str, ...], Any]) -> tuple[CarriedArray, ...]:
    return tuple(
        CarriedArray(path, tuple(x.shape), np.dtype(x.dtype).name, "")
        for path, x in carried.items()
    )


def _shown(form: Iterable[CarriedArray]) -> str:
    return first_few(["/".join(x.path) + f" {x.dtype}{list(x.shape)}" for x in form])


# --- leaves, also of an optax state ---------------------------------------------------


def array_like(value: Array, like: Any) -> jax.Array:
    """Returns an array of the store in the form of `like`, and in its place."""
    if jnp.issubdtype(like.dtype, jax.dtypes.prng_key):
        return typed_like(value, like)
    sharding = getattr(like, "sharding", None)
    if not getattr(like, "committed", True):
        sharding = None
    return jax.device_put(np.asarray(value, like.dtype), sharding)


def data_of(leaf: Any) -> Any:
    """A leaf as an array or a shape, without reading it; typed keys as numbers."""
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return jax.eval_shape(key_data, leaf)
    return key_data(leaf) if hasattr(leaf, "dtype") else np.asarray(leaf)
