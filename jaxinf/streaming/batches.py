"""Micro-batches: a batch in equal parts, and what their results are together.

The order in which programs run for the parts is that of `plan/order.py`.

Invariant: parts have one shape, so the programs of one serve all.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxinf.errors import StreamError
from jaxinf.program import path_name
from jaxinf.streaming.program.meshes import is_sharded, on_this_process
from jaxinf.streaming.program.trace import abstract
from jaxinf.typing import PyTree


def parts_of(batch: PyTree, count: int) -> list[PyTree]:
    """Divides a batch along the first axis of its leaves; scalars go to each part.

    Raises:
      StreamError: It cannot be divided; names the leaf.
    """
    if count == 1:
        return [batch]
    length = _length(batch, count) // count

    def part(leaf: Any, number: int) -> Any:
        if not np.ndim(leaf):
            return leaf
        first, end = number * length, (number + 1) * length
        if is_sharded(leaf):  # with explicit axes, indexing does not know the result's
            return lax.slice_in_dim(leaf, first, end)
        return leaf[first:end]

    return [
        jax.tree.map(lambda leaf, n=number: part(leaf, n), batch)
        for number in range(count)
    ]


def first_part(batch: PyTree, count: int) -> PyTree:
    """Returns shapes and dtypes of each of the parts; arguments as `parts_of`."""
    shapes = abstract(batch)
    if count == 1:
        return shapes
    length = _length(shapes, count) // count

    def part(path: Any, leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        if not leaf.shape:
            return leaf
        aval = leaf.update(shape=(length, *leaf.shape[1:]))
        _check_shards(path_name(path, "the batch"), aval, count)
        return aval

    return jax.tree_util.tree_map_with_path(part, shapes)


def _check_shards(name: str, part: jax.ShapeDtypeStruct, count: int) -> None:
    if part.sharding is None:
        return
    try:
        part.sharding.shard_shape(part.shape)
    except ValueError as error:
        raise StreamError(
            f"micro_batches={count}: expected parts that divide over the mesh, found "
            f"{part.shape[0]} rows of {name} for each part, sharded by "
            f"{part.sharding.spec}; take fewer parts or a larger batch"
        ) from error


def shares_of(
    batch: PyTree, count: int, weights: Callable[[PyTree], Any] | None
) -> tuple[float, ...]:
    """Returns each part's weight in relation to the mean weight; 1 if all are equal.

    The part's loss and gradient are multiplied by it, and the mean is taken over all.

    Args:
      weights: Returns the weight of a part; None for equal ones.

    Raises:
      StreamError: A weight is negative or not finite, or all are 0.
    """
    if weights is None:
        return (1.0,) * count
    made = [jnp.asarray(weights(part)) for part in parts_of(batch, count)]
    found = [np.asarray(on_this_process(weight), np.float64) for weight in made]
    if any(weight.shape for weight in found):
        shapes = sorted({weight.shape for weight in found})
        raise StreamError(
            f"weights: expected a number for each part of the batch, found {shapes}; "
            "return a scalar, such as the number of tokens that count"
        )
    total = float(sum(found))
    if not all(0 <= weight < math.inf for weight in found) or not 0 < total < math.inf:
        raise StreamError(
            "weights: expected finite numbers of at least 0 that are not all 0, found "
            f"{[float(weight) for weight in found]}; give a batch in which something "
            "counts"
        )
    return tuple(float(weight) * count / total for weight in found)


def together(
    results: Sequence[tuple[Any, PyTree]], shares: Sequence[float]
) -> tuple[Any, PyTree]:
    """Returns the mean loss, and each aux with a first axis for the parts.

    Args:
      shares: From `shares_of`.
    """
    if len(results) == 1:
        return results[0]
    losses, auxes = zip(*results, strict=True)
    if losses[0] is not None and any(share != 1 for share in shares):
        losses = [
            loss * np.asarray(share, loss.dtype) if share else jnp.zeros_like(loss)
            for loss, share in zip(losses, shares, strict=True)
        ]
    loss = jnp.mean(jnp.stack(losses))
    return loss, jax.tree.map(lambda *leaves: jnp.stack(leaves), *auxes)


def _length(batch: PyTree, count: int) -> int:
    """The length of the first axis of all leaves that have one."""
    shapes = {
        path_name(path, "the batch"): np.shape(leaf)
        for path, leaf in jax.tree.leaves_with_path(batch)
    }
    arrays = {name: shape for name, shape in shapes.items() if shape}
    longest = max((shape[0] for shape in arrays.values()), default=0)
    for name, shape in arrays.items():
        if shape[0] != longest or shape[0] % count:
            raise StreamError(
                f"micro_batches={count}: expected leaves whose first axis has one "
                f"length that {count} divides, found {name} of shape {shape}"
                + ("" if shape[0] == longest else f" beside others of {longest}")
                + "; give another batch, or another number (scalars are not divided)"
            )
    if not arrays:
        raise StreamError(
            f"micro_batches={count}: expected a batch to divide, found no arrays; "
            "leave it out"
        )
    return longest
