"""The chunk grid of one leaf: the block of the leaf in each zarr chunk file.

Invariant: the real elements of a chunk are the first `Chunk.num_elements` of its file
in C order. A `LeafGrid` that violates this cannot be made.
"""

import itertools
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

CHUNK_ALIGNMENT_ELEMENTS = 4096
"""A chunk of this many elements is page-aligned in every dtype down to 8 bits."""

DEFAULT_CHUNK_ELEMENTS = 4 * 1024 * 1024
"""16 MiB in float32: large enough to saturate a drive, small enough for a ring."""


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
        where = f"chunk grid of a leaf of shape {self.shape}"
        if len(self.shape) != len(chunk_shape):
            raise ValueError(
                f"{where}: chunk shape {chunk_shape} has {len(chunk_shape)} lengths, "
                f"expected {len(self.shape)}; give one chunk length a dimension"
            )
        if min(self.shape, default=0) < 0 or min(chunk_shape, default=1) < 1:
            raise ValueError(
                f"{where}: expected lengths of at least 0 and chunk lengths of at "
                f"least 1, found chunk shape {chunk_shape}"
            )
        self._check_prefix(where)

    def _check_prefix(self, where: str) -> None:
        partial = next((d for d, c in enumerate(self.chunk_shape) if c > 1), 0)
        for dim in range(partial + 1, len(self.shape)):
            if self.shape[dim] % self.chunk_shape[dim]:
                raise ValueError(
                    f"{where}: chunk shape {self.chunk_shape} pads dimension {dim} "
                    "between real elements, expected padding at the end of a file "
                    f"only; take a chunk length that divides {self.shape[dim]}"
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

    @property
    def aligned(self) -> bool:
        """Whether the chunk files are whole pages in every dtype down to 8 bits.

        False for 0-d leaves, and where shard boundaries leave no aligned grid.
        """
        return math.prod(self.chunk_shape) % CHUNK_ALIGNMENT_ELEMENTS == 0

    def chunks(self) -> tuple[Chunk, ...]:
        """Returns all chunks, in C order of their grid index."""
        return self._chunks

    @cached_property
    def _chunks(self) -> tuple[Chunk, ...]:
        places = itertools.product(*map(range, self.grid_shape))
        return tuple(map(self.chunk, places))

    def chunk(self, index: tuple[int, ...]) -> Chunk:
        """Returns the chunk at an index inside the grid."""
        start = tuple(i * c for i, c in zip(index, self.chunk_shape, strict=True))
        extent = tuple(
            min(chunk, length - first)
            for chunk, length, first in zip(
                self.chunk_shape, self.shape, start, strict=True
            )
        )
        stored_elements = math.prod(self.chunk_shape)
        return Chunk(index, start, extent, math.prod(extent), stored_elements)


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
            at = ranges[dim][0] if first % chunk else ranges[dim][-1]
            index = tuple(at if d == dim else r[0] for d, r in enumerate(ranges))
            raise ValueError(
                f"{where}: chunk {grid.chunk(index).key} of chunk shape "
                f"{grid.chunk_shape} lies only partly inside along dimension {dim}; "
                "use the sharding the grid was made for, or convert the store"
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
