"""Places of the parts of params that programs read, in a store's leaves.

Invariant: a unit consists of whole chunks of the store, so it is read, updated and held
alone.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from jaxinf.stream.graph import Piece

__all__ = ["Places", "Unit", "shard_counts"]

# A leaf with smaller slices is one unit: they are not worth chunks of their own.
_MIN_SLICE_BYTES = 256 << 10


@dataclass(frozen=True)
class Unit:
    """A part of a leaf that moves alone.

    Attributes:
      leaf: The leaf's number.
      index: Position on its leading axes; empty for the whole.
      shape: Shape of the part, without the indexed axes.
      dtype: Dtype of the params on the JAX device.
    """

    leaf: int
    index: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def num_bytes(self) -> int:
        """Bytes of the params on the JAX device."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize

    @property
    def origin(self) -> tuple[int, ...]:
        """Index in the leaf of its first element."""
        return (*self.index, *(0 for _ in self.shape))

    @property
    def extent(self) -> tuple[int, ...]:
        """Its shape in the leaf."""
        return (*(1 for _ in self.index), *self.shape)


class Places:
    """The units of a store.

    Args:
      shapes, dtypes: Shapes and dtypes of the params' leaves.
      can_move: Whether a box of a leaf (leaf, origin, extent) consists of whole chunks.
    """

    def __init__(
        self,
        shapes: Sequence[tuple[int, ...]],
        dtypes: Sequence[np.dtype],
        can_move: Callable[[int, tuple[int, ...], tuple[int, ...]], bool],
    ) -> None:
        self._shapes = shapes
        self._dtypes = dtypes
        self._can_move = can_move
        self._units: dict[tuple[int, tuple[int, ...]], Unit] = {}
        self._depths: dict[tuple[int, int], int] = {}

    def unit(self, piece: Piece) -> Unit:
        """Returns the smallest unit that contains `piece`."""
        key = (piece.leaf, piece.index)
        if key not in self._units:
            self._units[key] = self._find(*key)
        return self._units[key]

    @staticmethod
    def part(unit: Unit, piece: Piece) -> Piece:
        """Returns the piece of the unit's array for a piece of the leaf."""
        return Piece(piece.leaf, piece.index[len(unit.index) :], piece.rows)

    def _find(self, leaf: int, index: tuple[int, ...]) -> Unit:
        own = index[: self._depth(leaf, len(index))]
        shape = self._shapes[leaf][len(own) :]
        return Unit(leaf, own, shape, np.dtype(self._dtypes[leaf]))

    def _depth(self, leaf: int, most: int) -> int:
        """Counts the leading axes, up to `most`, on which chunks have the length 1."""
        key = (leaf, most)
        if key not in self._depths:
            shape = self._shapes[leaf]
            depth = most
            # The first box decides for all, since the last one may be a partial chunk.
            while depth and not self._can_move(
                leaf, (0,) * len(shape), (*(1,) * depth, *shape[depth:])
            ):
                depth -= 1
            self._depths[key] = depth
        return self._depths[key]


def shard_counts(
    shapes: Sequence[tuple[int, ...]], gradients: Iterable[Piece]
) -> Mapping[int, tuple[int, ...]]:
    """Returns for each leaf the number of parts along each axis, in a new store.

    Args:
      shapes: Shapes of the leaves.
      gradients: The pieces of complete gradients.
    """
    depths = {piece.leaf: len(piece.index) for piece in gradients}
    counts = {}
    for leaf, shape in enumerate(shapes):
        depth = depths.get(leaf, 0)
        while depth and 4 * np.prod(shape[depth:], dtype=np.int64) < _MIN_SLICE_BYTES:
            depth -= 1
        counts[leaf] = (*shape[:depth], *(1 for _ in shape[depth:]))
    return counts
