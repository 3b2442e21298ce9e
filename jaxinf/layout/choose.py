"""The choice of a chunk grid: few files, little padding, aligned wherever possible.

Invariant: a chunk shape is (1, …, 1, r, e[k+1], …, e[n-1]), where e is the shard's
shape; r divides e[k] where dimension k is sharded, so that no chunk spans two shards.
The choice is integer arithmetic only: the same on every machine.
"""

import math
from collections.abc import Iterator
from functools import lru_cache

from jaxinf.layout.grid import (
    CHUNK_ALIGNMENT_ELEMENTS,
    DEFAULT_CHUNK_ELEMENTS,
    LeafGrid,
)

# Costs are in elements moved. A file costs its opening and its requests, about what
# moving 16 Ki elements does. An unaligned file has a buffered tail to flush, the more
# likely the fewer factors of two its length has. Padding is a hole: only foreign
# readers pay for it.
_FILE_COST = 16 * 1024
_MISALIGNED_BIT_COST = 20 * 1024
_PADDING_DISCOUNT = 64

# Chunks above the maximum are cut in subgroups, so they cost no memory, only balance.
_OVERSIZE_LIMIT = 16
_OVERSIZE_COST = 4


def choose_grid(
    shape: tuple[int, ...],
    *,
    shard_counts: tuple[int, ...] | None = None,
    max_chunk_elements: int | None = None,
) -> LeafGrid:
    """Chooses the chunk grid of a leaf.

    Args:
      shape: natural shape of the leaf.
      shard_counts: shards along each dimension; None is one shard.
      max_chunk_elements: wanted limit of a chunk's stored elements. It is exceeded, up
        to 16 times, where dimensions that are no multiples of powers of two would
        otherwise force very many files; and where it is below 4,096. By default
        4 Mi.

    Returns:
      A grid whose chunks hold a multiple of 4,096 elements each (`LeafGrid.aligned`),
      except for 0-d leaves and where shard boundaries leave no such grid with few
      files. Chunks along the cut dimension are about the same size.

    Raises:
      ValueError: if a shard count is not positive or does not divide its dimension.
    """
    if max_chunk_elements is None:
        max_chunk_elements = DEFAULT_CHUNK_ELEMENTS
    counts = _checked_counts(shape, shard_counts)
    if not shape:
        return LeafGrid((), ())
    limit = max(_OVERSIZE_LIMIT * max_chunk_elements, CHUNK_ALIGNMENT_ELEMENTS)
    grids = [
        LeafGrid(shape, chunk_shape)
        for chunk_shape in _candidates(shape, counts, max_chunk_elements)
        if math.prod(chunk_shape) <= limit
    ]
    return min(grids, key=lambda grid: _cost(grid, max_chunk_elements))


def _checked_counts(
    shape: tuple[int, ...], shard_counts: tuple[int, ...] | None
) -> tuple[int, ...]:
    counts = (1,) * len(shape) if shard_counts is None else tuple(shard_counts)
    where = f"leaf of shape {shape}, shard counts {counts}"
    if len(counts) != len(shape) or min(counts, default=1) < 1:
        raise ValueError(f"{where}: expected one positive count a dimension")
    for dim, (length, count) in enumerate(zip(shape, counts, strict=True)):
        if length % count:
            raise ValueError(
                f"{where}: dimension {dim} of length {length} does not divide evenly "
                f"into {count} shards; pad the leaf or shard another dimension"
            )
    return counts


def _candidates(
    shape: tuple[int, ...], counts: tuple[int, ...], max_elements: int
) -> Iterator[tuple[int, ...]]:
    # An empty leaf has no files; its grid is that of the leaf with lengths of 1.
    box = [max(n // count, 1) for n, count in zip(shape, counts, strict=True)]
    for dim in range(len(box)):
        inner = math.prod(box[dim + 1 :])
        if counts[dim] > 1:
            lengths = divisors(box[dim])
        else:
            lengths = (_balanced_length(box[dim], inner, max_elements),)
        for length in lengths:
            yield (1,) * dim + (length, *box[dim + 1 :])


def _balanced_length(length: int, inner: int, max_elements: int) -> int:
    """Returns the shortest aligned cut that gives as few chunks as the longest does."""
    unit = CHUNK_ALIGNMENT_ELEMENTS // math.gcd(CHUNK_ALIGNMENT_ELEMENTS, inner)
    longest = max(max_elements // inner // unit, 1) * unit
    num_cuts = -(-length // longest)
    return -(-length // (num_cuts * unit)) * unit


def _cost(grid: LeafGrid, max_elements: int) -> int:
    stored_elements = math.prod(grid.chunk_shape)
    common = math.gcd(stored_elements, CHUNK_ALIGNMENT_ELEMENTS)
    misaligned_bits = (CHUNK_ALIGNMENT_ELEMENTS // common).bit_length() - 1
    # At least one file: an empty leaf's grid should be sensible too.
    num_chunks = max(grid.num_chunks, 1)
    padding = num_chunks * stored_elements - grid.num_elements
    file_cost = _FILE_COST + misaligned_bits * _MISALIGNED_BIT_COST
    cost = num_chunks * file_cost + padding // _PADDING_DISCOUNT
    return cost * (_OVERSIZE_COST if stored_elements > max_elements else 1)


@lru_cache(maxsize=1024)
def divisors(number: int) -> tuple[int, ...]:
    """Returns all divisors, the smallest first, by trial division of what is left."""
    divisors, prime = [1], 2
    while number > 1:
        if prime * prime > number:
            prime = number
        power, multiples = 1, list(divisors)
        while number % prime == 0:
            number //= prime
            power *= prime
            divisors += [power * m for m in multiples]
        prime += 1
    return tuple(sorted(divisors))
