"""Units of params: what a step reads from a store, holds and updates alone.

    memory   [ shard 0 | shard 1 | … ]      devices 0 … read shard 0 in place,
              each on an aligned address     so replicas take no memory of their own

Invariant: a unit consists of whole chunks of the store. On several devices it is held
by its distinct shards, since replicas of a shard have the same bits.
"""

import math
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import Any, TypeAlias

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from jaxinf.engine import assemble_shards, held_shards, shard_counts
from jaxinf.layout import Box
from jaxinf.streaming.program.graph import Piece
from jaxinf.transfer import page_ceil
from jaxinf.typing import Array

PINNED = "pinned_host"
"""The kind of memory of the host from and to which devices copy."""

ASSEMBLING = "putting params of several processes together"

# A leaf with smaller slices is one unit: they are not worth chunks of their own.
MIN_SLICE_BYTES = 256 << 10
_ALIGNED_BYTES = 64  # XLA's CPU client copies arrays at other addresses


@dataclass(frozen=True)
class ParamUnit:
    """A leaf, or its slice at an index of its leading axes, that moves alone.

    Attributes:
      dtype: Dtype of the params on the JAX device.
      sharding: Sharding over the mesh; None for one device.
      moves_by_shard: Whether the store moves each of its shards alone.
    """

    leaf: int
    index: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: np.dtype = field(hash=False)
    sharding: NamedSharding | None = field(default=None, hash=False)
    moves_by_shard: bool = field(default=True, compare=False)

    def piece_within(self, piece: Piece) -> Piece:
        return Piece(piece.leaf, piece.index[len(self.index) :], piece.rows)

    @property
    def whole(self) -> Box:
        return Box.of(None, self.shape)

    @cached_property
    def _box_of_device(self) -> Mapping[Any, Box]:
        """The shard of each device of this process; none without a mesh."""
        if self.sharding is None:
            return {}
        indices = self.sharding.addressable_devices_indices_map(self.shape)
        return {device: Box.of(i, self.shape) for device, i in indices.items()}

    @cached_property
    def shards(self) -> tuple[Box, ...]:
        """Its distinct shards in this process; the whole on one device."""
        return tuple(dict.fromkeys(self._box_of_device.values())) or (self.whole,)

    @property
    def stored_boxes(self) -> tuple[Box, ...]:
        """What the store moves at a time: each shard, or the whole."""
        return self.shards if self.moves_by_shard else (self.whole,)

    @property
    def is_sharded(self) -> bool:
        return self.shards != (self.whole,)

    @cached_property
    def needs_assembly(self) -> bool:
        """Whether a shard has chunks of several processes."""
        return any(len(x) > 1 for x in held_shards(self.sharding, self.shape).holders)

    def in_leaf(self, box: Box) -> Box:
        return Box((*self.index, *box.start), (*(1 for _ in self.index), *box.shape))

    @property
    def place(self) -> Box:
        return self.in_leaf(self.whole)

    def _bytes_of(self, *boxes: Box) -> int:
        return sum(math.prod(box.shape) for box in boxes) * self.dtype.itemsize

    @cached_property
    def num_bytes(self) -> int:
        """Bytes of its shards in this process, replicas counted once."""
        return self._bytes_of(*self.shards)

    @property
    def whole_bytes(self) -> int:
        return self._bytes_of(self.whole)

    @property
    def device_bytes(self) -> int:
        """Bytes of its shards on this process's devices, each replica counted."""
        return self._bytes_of(*self._box_of_device.values())

    @cached_property
    def page_bytes(self) -> int:
        """Bytes in the host's memory, where each of several shards is aligned."""
        held_bytes = sum(_aligned(self._bytes_of(box)) for box in self.shards)
        return page_ceil(max(held_bytes, 1))

    def shard_views(self, memory: Array) -> tuple[Array, ...]:
        """Returns its shards as arrays in `page_bytes` of page-aligned memory."""
        views, start = [], 0
        for box in self.shards:
            stop = start + self._bytes_of(box)
            views.append(memory[start:stop].view(self.dtype).reshape(box.shape))
            start = _aligned(stop)
        return tuple(views)

    def placements(
        self, shards: Sequence[Array | jax.Array], device: Any = None
    ) -> list[tuple[Array | jax.Array, Any]]:
        """Returns shards with the places of their replicas; `device` without a mesh."""
        if self.sharding is None:
            return [(shards[0], device)]
        shard_of = dict(zip(self.shards, shards, strict=True))
        pairs = self._box_of_device.items()
        return [(shard_of[box], SingleDeviceSharding(device)) for device, box in pairs]

    def from_copies(self, copies: Sequence[jax.Array]) -> jax.Array:
        """Returns the array of copies on devices, which are in `placements`' order."""
        if self.sharding is None:
            return copies[0]
        return jax.make_array_from_single_device_arrays(
            self.shape, self.sharding, list(copies)
        )

    def on_devices(self, shards: Sequence[Array]) -> jax.Array:
        """Puts its shards on their devices, which read them in place; blocks.

        If the unit needs assembly, all processes call this alike, each with zeros where
        others hold the chunks; its shards are then filled.
        """
        array = self._put(shards)
        if not self.needs_assembly:
            return array
        array = jax.block_until_ready(assemble_shards(array))
        filled = {Box.of(s.index, self.shape): s.data for s in array.addressable_shards}
        for box, shard in zip(self.shards, shards, strict=True):
            np.copyto(shard, np.asarray(filled[box]))
        return self._put(shards)

    def _put(self, shards: Sequence[Array]) -> jax.Array:
        return self.from_copies(
            [jax.device_put(x, to) for x, to in self.placements(shards)]
        )


UnitOf: TypeAlias = Callable[[Piece], ParamUnit]
"""Returns the unit of a store that has a piece of the params."""


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNED_BYTES) * _ALIGNED_BYTES


def units_of(
    leaves: Sequence[jax.ShapeDtypeStruct],
    can_move: Callable[[int, tuple[int, ...], tuple[int, ...]], bool],
    undivided: Container[int] = (),
) -> UnitOf:
    """Returns the function that finds a store's units.

    Args:
      can_move: Whether a box of a leaf (leaf, origin, extent) consists of whole chunks.
      undivided: Leaves whose shards the store does not move alone in any case.
    """
    can_move = cache(can_move)

    @cache
    def unit_at(leaf: int, index: tuple[int, ...]) -> ParamUnit:
        aval, depth = leaves[leaf], len(index)
        # On its leading axes chunks have the length 1. The first box decides for all,
        # since the last one may be a partial chunk.
        origin = (0,) * len(aval.shape)
        while depth and not can_move(
            leaf, origin, (*(1,) * depth, *aval.shape[depth:])
        ):
            depth -= 1
        index = index[:depth]
        sharding = piece_sharding(aval.sharding, Piece(leaf, index))
        dtype = np.dtype(aval.dtype)
        unit = ParamUnit(leaf, index, aval.shape[depth:], dtype, sharding)
        boxes = map(unit.in_leaf, unit.shards)
        moves_by_shard = not unit.is_sharded or (
            leaf not in undivided
            and all(can_move(leaf, box.start, box.shape) for box in boxes)
        )
        return replace(unit, moves_by_shard=moves_by_shard)

    return lambda piece: unit_at(piece.leaf, piece.index)


def assembly_bytes(units: Iterable[ParamUnit]) -> int:
    """Returns the devices' memory to assemble the largest unit that needs it."""
    return max((unit.device_bytes for unit in units if unit.needs_assembly), default=0)


def part_counts(
    leaves: Sequence[jax.ShapeDtypeStruct], gradients: Iterable[Piece]
) -> list[tuple[int, ...]]:
    """Returns the parts along each axis into which a new store divides each leaf."""
    depths = {piece.leaf: len(piece.index) for piece in gradients}
    counts = []
    for leaf, aval in enumerate(leaves):
        depth, shape = depths.get(leaf, 0), aval.shape
        while depth and 4 * np.prod(shape[depth:], dtype=np.int64) < MIN_SLICE_BYTES:
            depth -= 1
        counts.append((*shape[:depth], *shard_counts(aval.sharding, shape)[depth:]))
    return counts


def piece_sharding(sharding: NamedSharding | None, piece: Piece) -> Any:
    """Returns the sharding of a piece, from that of its leaf; None stays None.

    Axes of the mesh that divide an indexed dimension, or one of which only some rows
    are taken, hold replicas of the piece.
    """
    if sharding is None:
        return None
    spec = tuple(sharding.spec)[len(piece.index) :]
    if piece.rows is not None and spec:
        spec = (None, *spec[1:])
    return NamedSharding(sharding.mesh, PartitionSpec(*spec))
