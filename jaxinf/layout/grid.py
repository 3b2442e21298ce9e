"""The chunk grid of a leaf: the block in each zarr chunk file; and its choice.

Invariant: the real elements of a chunk are the first `Chunk.num_elements` of its file
in C order; a `LeafGrid` that violates this cannot be made. A chosen chunk shape is (1,
…, 1, r, e[k+1], …, e[n-1]), where e is the shard's shape; r divides e[k] where
dimension k is sharded, so that no chunk spans two shards. The choice is integer
arithmetic only, the same on every machine, for few files with little padding.
"""

import itertools
import math
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

CHUNK_ALIGNMENT_ELEMENTS = 4096
"""A chunk of this many elements is page-aligned in every dtype down to 8 bits."""

DEFAULT_CHUNK_ELEMENTS = 4 * 1024 * 1024
"""16 MiB in float32: large enough to saturate a drive, small enough for a ring."""


@dataclass(frozen=True)
class Box:
    start: tuple[int, ...]
    shape: tuple[int, ...]

    @classmethod
    def of(cls, index: Sequence[slice] | None, shape: Sequence[int]) -> "Box":
        """Returns the box at an index into an array; without one the whole array."""
        slices = index or [slice(None)] * len(shape)
        ranges = [range(n)[part] for part, n in zip(slices, shape, strict=True)]
        return cls(tuple(r.start for r in ranges), tuple(map(len, ranges)))

    @property
    def slices(self) -> tuple[slice, ...]:
        return box_slices(self.start, self.shape)


@dataclass(frozen=True)
class Chunk:
    """One zarr chunk, which is one file, and its block of the leaf."""

    index: tuple[int, ...]  # position in the chunk grid
    start: tuple[int, ...]  # leaf index of the block's first element
    extent: tuple[int, ...]  # shape of the block, clipped to the leaf
    num_elements: int  # of the block, which is a prefix of the file
    stored_elements: int  # of the file; after the prefix is a hole

    @property
    def key(self) -> str:
        """The zarr v3 chunk key, "c/1/0", or "c" for a 0-d leaf."""
        return "/".join(["c", *map(str, self.index)])

    @property
    def slices(self) -> tuple[slice, ...]:
        return box_slices(self.start, self.extent)


@dataclass(frozen=True)
class LeafGrid:
    """The regular chunk grid of one leaf.

    Shapes of different ranks or out of range are a ValueError, and so is padding of an
    edge chunk between real elements.
    """

    shape: tuple[int, ...]  # of the leaf
    chunk_shape: tuple[int, ...]  # at least 1 in each dimension

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(map(operator.index, self.shape)))
        chunk_shape = tuple(map(operator.index, self.chunk_shape))
        object.__setattr__(self, "chunk_shape", chunk_shape)
        where = f"chunk grid of a leaf of shape {self.shape}: chunk shape {chunk_shape}"
        if len(self.shape) != len(chunk_shape):
            raise ValueError(
                f"{where} has {len(chunk_shape)} lengths; give one for each"
            )
        if min(self.shape, default=0) < 0 or min(chunk_shape, default=1) < 1:
            raise ValueError(f"{where}: expected lengths >= 0, and of a chunk >= 1")
        cut_dim = next((d for d, c in enumerate(chunk_shape) if c > 1), 0)
        for dim in range(cut_dim + 1, len(self.shape)):
            if self.shape[dim] % chunk_shape[dim]:
                raise ValueError(
                    f"{where} pads dimension {dim} between real elements, expected "
                    "padding at the end of a file only; take a chunk length that "
                    f"divides {self.shape[dim]}"
                )

    @property
    def grid_shape(self) -> tuple[int, ...]:
        """Chunks along each dimension; 0 along a dimension of length 0."""
        return tuple(
            -(-length // chunk)
            for length, chunk in zip(self.shape, self.chunk_shape, strict=True)
        )

    @property
    def num_chunks(self) -> int:
        """Number of chunk files: 0 for an empty leaf, 1 for a 0-d one."""
        return math.prod(self.grid_shape)

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    def chunks(self) -> tuple[Chunk, ...]:
        """Returns all chunks, in C order of their grid index."""
        return self._chunks

    @cached_property
    def _chunks(self) -> tuple[Chunk, ...]:
        chunks, stored_elements = list[Chunk](), math.prod(self.chunk_shape)
        for index in itertools.product(*map(range, self.grid_shape)):
            start = tuple(map(operator.mul, index, self.chunk_shape))
            left = map(operator.sub, self.shape, start)
            extent = tuple(map(min, self.chunk_shape, left))
            elements = math.prod(extent), stored_elements
            chunks.append(Chunk(index, start, extent, *elements))
        return tuple(chunks)


shared_grid = lru_cache(maxsize=1 << 12)(LeafGrid)
"""Makes a `LeafGrid`, one for all leaves of the same shapes."""


def chunks_of_box(
    grid: LeafGrid, start: tuple[int, ...], extent: tuple[int, ...]
) -> list[int]:
    """Returns the chunks of a box of a leaf, ascending: positions in `grid.chunks()`.

    A chunk that lies partly inside the box is a ValueError; an empty box has no chunks.
    """
    where = f"box at {start} of extent {extent} in a leaf of shape {grid.shape}"
    sides = zip(start, extent, grid.shape, strict=True)
    assert all(0 <= at <= at + length <= limit for at, length, limit in sides), where
    if 0 in extent:
        return []
    ranges = [
        range(first // chunk, -(-(first + length) // chunk))
        for first, length, chunk in zip(start, extent, grid.chunk_shape, strict=True)
    ]
    for dim, (first, length) in enumerate(zip(start, extent, strict=True)):
        chunk, end = grid.chunk_shape[dim], first + length
        if first % chunk or (end % chunk and end != grid.shape[dim]):
            raise ValueError(
                f"{where}: a chunk of chunk shape {grid.chunk_shape} lies only partly "
                f"inside along dimension {dim}; use the sharding the grid was made "
                "for, or another grid (jaxinf store copy)"
            )
    return [ravel(index, grid.grid_shape) for index in itertools.product(*ranges)]


def ravel(index: Sequence[int], shape: Sequence[int]) -> int:
    """Returns the flat index, in C order, of an index into an array of a shape."""
    offset = 0
    for position, length in zip(index, shape, strict=True):
        offset = offset * length + position
    return offset


def box_slices(start: Sequence[int], extent: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(s, s + e) for s, e in zip(start, extent, strict=True))


# Costs are in elements moved. A file's opening and requests cost about as much as 16 Ki
# elements. An unaligned file has a buffered tail to flush, which is the more likely the
# fewer factors of two its length has. Padding is a hole: only other readers pay for it.
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
      shard_counts: Shards along each dimension, which divide it; None is one shard.
      max_chunk_elements: Wanted limit of a chunk's stored elements, 4 Mi by default.
        Chunks have up to 16 times as many where odd dimensions would otherwise take
        very many files; a limit below 4,096 is exceeded as well.

    Returns:
      A grid whose chunks are about the same size and hold a multiple of 4,096 elements
      each, except for 0-d leaves and where shard boundaries leave no such grid with few
      files.
    """
    if max_chunk_elements is None:
        max_chunk_elements = DEFAULT_CHUNK_ELEMENTS
    counts = _check_counts(shape, shard_counts)
    if not shape:
        return LeafGrid((), ())
    limit = max(_OVERSIZE_LIMIT * max_chunk_elements, CHUNK_ALIGNMENT_ELEMENTS)
    candidates = _candidates(shape, counts, max_chunk_elements)
    grids = [
        LeafGrid(shape, chunk) for chunk in candidates if math.prod(chunk) <= limit
    ]
    return min(grids, key=lambda grid: _cost(grid, max_chunk_elements))


def _check_counts(
    shape: tuple[int, ...], shard_counts: tuple[int, ...] | None
) -> tuple[int, ...]:
    counts = (1,) * len(shape) if shard_counts is None else tuple(shard_counts)
    where = f"leaf of shape {shape}, shard counts {counts}"
    assert min(counts, default=1) >= 1, where
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
    """Returns the shortest aligned length that gives as few chunks as the longest."""
    unit = CHUNK_ALIGNMENT_ELEMENTS // math.gcd(CHUNK_ALIGNMENT_ELEMENTS, inner)
    longest = max(max_elements // inner // unit, 1) * unit
    num_cuts = -(-length // longest)
    return -(-length // (num_cuts * unit)) * unit


def _cost(grid: LeafGrid, max_elements: int) -> int:
    stored_elements = math.prod(grid.chunk_shape)
    alignment = math.gcd(stored_elements, CHUNK_ALIGNMENT_ELEMENTS)
    misaligned_bits = (CHUNK_ALIGNMENT_ELEMENTS // alignment).bit_length() - 1
    # At least one file, so that an empty leaf's grid is sensible, too.
    num_chunks = max(grid.num_chunks, 1)
    padding = num_chunks * stored_elements - grid.num_elements
    file_cost = _FILE_COST + misaligned_bits * _MISALIGNED_BIT_COST
    cost = num_chunks * file_cost + padding // _PADDING_DISCOUNT
    return cost * (_OVERSIZE_COST if stored_elements > max_elements else 1)


@lru_cache(maxsize=1024)
def divisors(number: int) -> tuple[int, ...]:
    """Returns all divisors, the smallest first."""
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return tuple(sorted({*small, *(number // n for n in small)}))
