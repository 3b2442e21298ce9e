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
    """A part of an array."""

    start: tuple[int, ...]
    shape: tuple[int, ...]

    @classmethod
    def of(cls, index: Sequence[slice] | None, shape: Sequence[int]) -> "Box":
        """Returns the part at an index; the whole, if there is none."""
        slices = index or [slice(None)] * len(shape)
        ranges = [range(n)[one] for one, n in zip(slices, shape, strict=True)]
        return cls(tuple(r.start for r in ranges), tuple(map(len, ranges)))

    @property
    def slices(self) -> tuple[slice, ...]:
        """The part as an index into the array."""
        return box_slices(self.start, self.shape)


@dataclass(frozen=True)
class Chunk:
    """One zarr chunk, which is one file, and its block of the leaf.

    Attributes:
      index: position in the chunk grid, one number a dimension.
      start: leaf index of the block's first element.
      extent: shape of the block, clipped to the leaf.
      num_elements: elements of the block: the prefix of the file that is real.
      stored_elements: length of the file in elements; beyond the prefix is a hole.
    """

    index: tuple[int, ...]
    start: tuple[int, ...]
    extent: tuple[int, ...]
    num_elements: int
    stored_elements: int

    @property
    def key(self) -> str:
        """The zarr v3 chunk key, "c/1/0", or "c" for a 0-d leaf."""
        return "/".join(["c", *map(str, self.index)])

    @property
    def slices(self) -> tuple[slice, ...]:
        """The block as an index into the whole leaf."""
        return box_slices(self.start, self.extent)


@dataclass(frozen=True)
class LeafGrid:
    """The regular chunk grid of one leaf.

    Attributes:
      shape: natural shape of the leaf; () for a 0-d leaf.
      chunk_shape: the zarr chunk shape, at least 1 in each dimension.

    Raises:
      ValueError: if the shapes disagree in rank or are out of range, or if the padding
        of an edge chunk would lie between real elements.
    """

    shape: tuple[int, ...]
    chunk_shape: tuple[int, ...]

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
        partial = next((d for d, c in enumerate(chunk_shape) if c > 1), 0)
        for dim in range(partial + 1, len(self.shape)):
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
        """Elements of the leaf."""
        return math.prod(self.shape)

    def chunks(self) -> tuple[Chunk, ...]:
        """Returns all chunks, in C order of their grid index."""
        return self._chunks

    @cached_property
    def _chunks(self) -> tuple[Chunk, ...]:
        found, stored_elements = list[Chunk](), math.prod(self.chunk_shape)
        for index in itertools.product(*map(range, self.grid_shape)):
            start = tuple(map(operator.mul, index, self.chunk_shape))
            left = map(operator.sub, self.shape, start)
            extent = tuple(map(min, self.chunk_shape, left))
            elements = math.prod(extent), stored_elements
            found.append(Chunk(index, start, extent, *elements))
        return tuple(found)


shared_grid = lru_cache(maxsize=1 << 12)(LeafGrid)
"""Makes a `LeafGrid`; most leaves of a large store have the same one."""


def covers(
    grid: LeafGrid, start: tuple[int, ...], extent: tuple[int, ...]
) -> list[int]:
    """Returns the chunks that make up a box of the leaf, such as one shard.

    Args:
      grid: the leaf's chunk grid.
      start: leaf index of the box's first element.
      extent: shape of the box; an empty box has no chunks.

    Returns:
      Positions in `grid.chunks()`, ascending.

    Raises:
      ValueError: if a chunk lies partly inside the box.
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
    """Returns the number of a position in an array of a shape, in C order."""
    offset = 0
    for position, length in zip(index, shape, strict=True):
        offset = offset * length + position
    return offset


def box_slices(start: Sequence[int], extent: Sequence[int]) -> tuple[slice, ...]:
    """Returns a box as an index into the whole array."""
    return tuple(slice(s, s + e) for s, e in zip(start, extent, strict=True))


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
      max_chunk_elements: wanted limit of a chunk's stored elements; 4 Mi by default.
        It is exceeded, up to 16 times, where dimensions that are no multiples of powers
        of two would otherwise force very many files; and where it is below 4,096.

    Returns:
      A grid whose chunks hold a multiple of 4,096 elements each, except for 0-d leaves
      and where shard boundaries leave no such grid with few files. Chunks along the cut
      dimension are about the same size.

    Raises:
      ValueError: if a shard count does not divide its dimension.
    """
    if max_chunk_elements is None:
        max_chunk_elements = DEFAULT_CHUNK_ELEMENTS
    counts = _checked_counts(shape, shard_counts)
    if not shape:
        return LeafGrid((), ())
    limit = max(_OVERSIZE_LIMIT * max_chunk_elements, CHUNK_ALIGNMENT_ELEMENTS)
    candidates = _candidates(shape, counts, max_chunk_elements)
    grids = [
        LeafGrid(shape, chunk) for chunk in candidates if math.prod(chunk) <= limit
    ]
    return min(grids, key=lambda grid: _cost(grid, max_chunk_elements))


def _checked_counts(
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
    """Returns all divisors, the smallest first."""
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return tuple(sorted({*small, *(number // n for n in small)}))
