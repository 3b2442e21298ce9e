"""Micro-batches: equal parts of a batch, and what their results are together.

Invariant: parts have one shape, so the programs of one serve all.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
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
    """Divides a batch along the first axis of its leaves; scalars go to each part."""
    if count == 1:
        return [batch]
    length = _length(batch, count) // count

    def part(number: int, leaf: Any) -> Any:
        if not np.ndim(leaf):
            return leaf
        first, end = number * length, (number + 1) * length
        if is_sharded(leaf):  # with explicit axes, indexing does not know the result's
            return lax.slice_in_dim(leaf, first, end)
        return leaf[first:end]

    return [jax.tree.map(partial(part, number), batch) for number in range(count)]


def first_part(batch: PyTree, count: int) -> PyTree:
    shapes = abstract(batch)
    if count == 1:
        return shapes
    length = _length(shapes, count) // count

    def part(path: Any, leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        if not leaf.shape:
            return leaf
        aval = leaf.update(shape=(length, *leaf.shape[1:]))
        if (sharding := aval.sharding) is None:
            return aval
        try:
            sharding.shard_shape(aval.shape)
        except ValueError as error:
            raise StreamError(
                f"micro_batches={count}: expected parts that divide over the mesh, "
                f"found {length} rows of {path_name(path, 'the batch')} for each part, "
                f"sharded by {sharding.spec}; take fewer parts or a larger batch"
            ) from error
        return aval

    return jax.tree_util.tree_map_with_path(part, shapes)


def relative_weights(
    batch: PyTree, count: int, weights: Callable[[PyTree], Any] | None
) -> tuple[float, ...]:
    """Returns each part's weight in relation to the mean weight; 1 if all are equal.

    The part's loss and gradient are multiplied by it, and the mean is taken over all.
    """
    if weights is None:
        return (1.0,) * count
    arrays = [on_this_process(jnp.asarray(weights(p))) for p in parts_of(batch, count)]
    numbers = np.array([np.asarray(array, np.float64) for array in arrays])
    total = sum(numbers)
    is_valid = numbers.shape == (count,) and (numbers >= 0).all()
    if not (is_valid and 0 < total < math.inf):
        raise StreamError(
            "weights: expected a finite number of at least 0 for each part of the "
            f"batch, and not all 0, found {numbers.tolist()}; return a scalar, such as "
            "the number of tokens that count, and give a batch in which some do"
        )
    return tuple((numbers * count / total).tolist())


def combine_parts(
    results: Sequence[tuple[Any, PyTree]], shares: Sequence[float]
) -> tuple[Any, PyTree]:
    """Returns the mean loss, and each aux with a first axis for the parts."""
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
    shapes = {
        path_name(path, "the batch"): np.shape(leaf)
        for path, leaf in jax.tree.leaves_with_path(batch)
        if np.ndim(leaf)
    }
    lengths = {shape[0] for shape in shapes.values()}
    if len(lengths) != 1 or max(lengths) % count:
        listed = ", ".join(f"{name} of shape {shape}" for name, shape in shapes.items())
        raise StreamError(
            f"micro_batches={count}: expected leaves whose first axis has one length "
            f"that {count} divides, found {listed or 'no arrays'}; give another batch, "
            "or another number (scalars are not divided)"
        )
    return lengths.pop()
