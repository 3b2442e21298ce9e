"""Further arrays that a step commits for its caller, such as batch statistics.

Invariant: a step carries what its own update was given, and nothing of earlier steps.
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
    Slot,
    StoreDirectory,
    check_carry,
    dtype_of,
    read_carry,
)
from jaxinf.typing import Array, PyTree

_HOST_TYPES = (bool, int, float, np.ndarray, np.generic)


def carried_leaves(tree: PyTree, what: str = CARRY) -> dict[tuple[str, ...], Any]:
    """Returns a tree's arrays by path, typed keys as numbers; may be traced by JAX.

    Refuses leaves that are no arrays of numbers, or have one path, as keys 1 and "1".
    """
    arrays = {}
    for keys, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        path = leaf_path(keys)
        where = "/".join((what, *path))
        if isinstance(leaf, _HOST_TYPES):
            leaf = jnp.asarray(leaf)
        is_array = hasattr(leaf, "shape") and hasattr(leaf, "dtype")
        data = numeric_data(leaf) if is_array else np.empty(0, object)
        dtype = np.dtype(data.dtype)
        if dtype.kind not in "biuf" and dtype.name != "bfloat16":
            kind = dtype.name if is_array else type(leaf).__name__
            raise TypeError(
                f"{where}: expected real numbers, bools or typed keys, found {kind}; "
                "leave it out of the tree"
            )
        if path in arrays:
            raise ValueError(f"{where}: expected one leaf of this name, found two")
        arrays[path] = data
    return arrays


def check_carried(
    store: Path, carried: Mapping[tuple[str, ...], Any], states: Iterable[str]
) -> None:
    """Refuses arrays that a step cannot carry beside its states: ValueError."""
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
    """Returns the fields of a `CommitRecord` that carries copies of these arrays."""
    contents = [value.tobytes() for value in carried.values()]
    carry = tuple(
        CarriedArray.of(path, value.shape, value.dtype.name, content)
        for (path, value), content in zip(carried.items(), contents, strict=True)
    )
    return {"carry": carry, "carried": tuple(contents)}


def carry_form(carry: Iterable[CarriedArray]) -> tuple[CarriedArray, ...]:
    """Returns paths, shapes and dtypes without checksums; most steps have the same."""
    return tuple(CarriedArray(x.path, x.shape, x.dtype, "") for x in carry)


def read_carried(
    directory: StoreDirectory, slot: Slot, record: CommitRecord, like: PyTree
) -> PyTree:
    """Returns the arrays that the step in a slot carries as a tree like `like`."""
    carry, wanted = record.carry, carried_leaves(like, "like")
    where = f"{directory.path}: carried: step {record.step}"
    if not carry:
        raise StoreMismatchError(
            f"{where}: expected arrays that it carries, found none; give them to each "
            "step, tx.update(grads, state, params, carry=tree), or jaxinf.stream(…, "
            "carry=fn), and read them if store.step is not 0"
        )
    if {*carry_form(carry)} != {*_form_of(wanted)}:
        raise StoreMismatchError(
            f"{where}: expected a tree `like` of its arrays, {_form_text(carry)}, "
            f"found {_form_text(_form_of(wanted))}; give the tree that update was given"
        )
    contents = read_carry(directory.step_path(slot), carry)
    values = {
        array.path: np.frombuffer(raw, dtype_of(array.dtype)).reshape(array.shape)
        for array, raw in zip(carry, contents, strict=True)
    }
    leaves, treedef = jax.tree.flatten(like)
    return treedef.unflatten(
        [
            put_like(values[path], leaf if hasattr(leaf, "dtype") else data)
            for (path, data), leaf in zip(wanted.items(), leaves, strict=True)
        ]
    )


def _form_of(carried: Mapping[tuple[str, ...], Any]) -> tuple[CarriedArray, ...]:
    return tuple(
        CarriedArray(path, tuple(x.shape), np.dtype(x.dtype).name, "")
        for path, x in carried.items()
    )


def _form_text(form: Iterable[CarriedArray]) -> str:
    return first_few(["/".join(x.path) + f" {x.dtype}{list(x.shape)}" for x in form])


def put_like(value: Array, like: Any) -> jax.Array:
    """Returns an array of the store with the dtype and the sharding of `like`."""
    if jnp.issubdtype(like.dtype, jax.dtypes.prng_key):
        return typed_like(value, like)
    sharding = getattr(like, "sharding", None)
    if not getattr(like, "committed", True):
        sharding = None
    return jax.device_put(np.asarray(value, like.dtype), sharding)


def numeric_data(leaf: Any) -> Any:
    """Returns a leaf as an array or a shape, not read; typed keys as numbers."""
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return jax.eval_shape(key_data, leaf)
    return key_data(leaf) if hasattr(leaf, "dtype") else np.asarray(leaf)
