"""Indices of a table as indices of a block of its rows.

Invariant: an index is in one block, or in none if it is out of bounds.
"""

import jax
import jax.numpy as jnp
from jax import lax


def own_rows(
    indices: jax.Array,
    start: jax.Array,
    length: int,
    num_rows: int,
    *,
    is_clipped: bool,
) -> tuple[jax.Array, jax.Array]:
    """Returns indices as rows of a block, and which of them are in the block.

    Args:
      start: The first row of the block.
      length: Number of rows of the block.
      is_clipped: Whether indices out of bounds are those of the first or last row.
    """
    if jnp.issubdtype(indices.dtype, jnp.unsignedinteger):
        if indices.dtype.itemsize >= 4:  # larger ones are out of bounds all the same
            indices = lax.min(indices, lax.full_like(indices, num_rows))
        indices = lax.convert_element_type(indices, jnp.int32)
    elif indices.dtype.itemsize < 4:
        indices = lax.convert_element_type(indices, jnp.int32)
    if is_clipped:
        last = lax.full_like(indices, num_rows - 1)
        indices = lax.clamp(lax.full_like(indices, 0), indices, last)
    first = lax.broadcast(lax.convert_element_type(start, indices.dtype), indices.shape)
    row = lax.sub(indices, first)
    is_own = lax.bitwise_and(
        lax.ge(row, lax.full_like(row, 0)), lax.lt(row, lax.full_like(row, length))
    )
    return row, lax.bitwise_and(is_own, lax.ge(indices, lax.full_like(indices, 0)))
