"""The parts of params that programs read, in a store's leaves.

    memory   [ shard 0 | shard 1 | … ]      devices 0 … read shard 0 in place,
              each on an aligned address     so replicas take no memory of their own

Invariant: a unit consists of whole chunks of the store, so it is read, updated and held
alone; on several devices in its distinct shards. Replicas of a shard have the same
bits, so one of them is enough.
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

SHARED = "putting params of several processes together"

# A leaf with smaller slices is one unit: they are not worth chunks of their own.
MIN_SLICE_BYTES = 256 << 10
_ALIGNED_BYTES = 64  # XLA's CPU client copies arrays at other addresses


@dataclass(frozen=True)
class ParamUnit:
    """A part of a leaf that moves alone.

    Attributes:
      index: Position on its leading axes; empty for the whole.
      shape: Shape of the part, without the indexed axes.
      dtype: Dtype of the params on the JAX device.
      sharding: Sharding over the mesh; None for one device.
      is_divided: Whether the store moves each of its shards alone.
    """

    leaf: int
    index: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: np.dtype = field(hash=False)
    sharding: NamedSharding | None = field(default=None, hash=False)
    is_divided: bool = field(default=True, compare=False)

    def part(self, piece: Piece) -> Piece:
        """Returns the piece of the unit's array for a piece of the leaf."""
        return Piece(piece.leaf, piece.index[len(self.index) :], piece.rows)

    # Its parts, and their places in the leaf.

    @property
    def whole(self) -> Box:
        return Box.of(None, self.shape)

    @cached_property
    def _of_devices(self) -> Mapping[Any, Box]:
        """The shard of each device of this process; none without a mesh."""
        if self.sharding is None:
            return {}
        indices = self.sharding.addressable_devices_indices_map(self.shape)
        return {device: Box.of(i, self.shape) for device, i in indices.items()}

    @cached_property
    def shards(self) -> tuple[Box, ...]:
        """Its distinct shards in this process; one on one device."""
        return tuple(dict.fromkeys(self._of_devices.values())) or (self.whole,)

    @property
    def boxes(self) -> tuple[Box, ...]:
        """The parts that the store moves: the shards, or all at once."""
        return self.shards if self.is_divided else (self.whole,)

    @property
    def is_apart(self) -> bool:
        return self.shards != (self.whole,)

    @cached_property
    def is_shared(self) -> bool:
        """Whether several processes have a shard, of whose chunks each has some."""
        return any(len(x) > 1 for x in held_shards(self.sharding, self.shape).holders)

    def in_leaf(self, box: Box) -> Box:
        """Returns a part of the unit as a part of the leaf."""
        return Box((*self.index, *box.start), (*(1 for _ in self.index), *box.shape))

    @property
    def place(self) -> Box:
        """The whole unit as a part of the leaf."""
        return self.in_leaf(self.whole)

    # Its bytes.

    def _bytes_of(self, *boxes: Box) -> int:
        return sum(math.prod(box.shape) for box in boxes) * self.dtype.itemsize

    @cached_property
    def num_bytes(self) -> int:
        """Bytes of the params on this process's JAX devices, replicas once."""
        return self._bytes_of(*self.shards)

    @property
    def whole_bytes(self) -> int:
        return self._bytes_of(self.whole)

    @property
    def device_bytes(self) -> int:
        """Bytes of its shards on this process's devices, each replica counted."""
        return self._bytes_of(*self._of_devices.values())

    @cached_property
    def page_bytes(self) -> int:
        """Bytes in the host's memory, where each of several shards is aligned."""
        held_bytes = sum(_aligned(self._bytes_of(box)) for box in self.shards)
        return page_ceil(max(held_bytes, 1))

    # Its arrays.

    def views(self, memory: Array) -> tuple[Array, ...]:
        """Returns the arrays of its shards in `page_bytes` from a page on."""
        found, first = [], 0
        for box in self.shards:
            end = first + self._bytes_of(box)
            found.append(memory[first:end].view(self.dtype).reshape(box.shape))
            first = _aligned(end)
        return tuple(found)

    def places(
        self, shards: Sequence[Array | jax.Array], device: Any = None
    ) -> list[tuple[Array | jax.Array, Any]]:
        """Returns shards with the devices that they go to, one for each replica."""
        if self.sharding is None:
            return [(shards[0], device)]
        own = dict(zip(self.shards, shards, strict=True))
        pairs = self._of_devices.items()
        return [(own[box], SingleDeviceSharding(device)) for device, box in pairs]

    def of_parts(self, parts: Sequence[jax.Array]) -> jax.Array:
        """Returns the array of what is on its devices, in the order of `places`."""
        if self.sharding is None:
            return parts[0]
        return jax.make_array_from_single_device_arrays(
            self.shape, self.sharding, list(parts)
        )

    def on_devices(self, shards: Sequence[Array]) -> jax.Array:
        """Puts its shards on their devices, which read them in place; blocks.

        Of a shared unit all processes call it alike, each with zeros where others hold
        the chunks; its shards are then filled.
        """
        array = self.of_parts([jax.device_put(x, to) for x, to in self.places(shards)])
        if not self.is_shared:
            return array
        array = jax.block_until_ready(assemble_shards(array))
        found = {Box.of(s.index, self.shape): s.data for s in array.addressable_shards}
        for box, shard in zip(self.shards, shards, strict=True):
            np.copyto(shard, np.asarray(found[box]))
        return self.of_parts([jax.device_put(x, to) for x, to in self.places(shards)])


UnitOf: TypeAlias = Callable[[Piece], ParamUnit]
"""Returns the unit of a store that has a part of the params."""


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNED_BYTES) * _ALIGNED_BYTES


def units_of(
    leaves: Sequence[jax.ShapeDtypeStruct],
    can_move: Callable[[int, tuple[int, ...], tuple[int, ...]], bool],
    undivided: Container[int] = (),
) -> UnitOf:
    """Returns what tells the units of a store.

    Args:
      leaves: Abstract values of the params' leaves; with a mesh they have shardings.
      can_move: Whether a box of a leaf (leaf, origin, extent) consists of whole chunks.
      undivided: Leaves whose shards the store does not move alone in any case.
    """
    can_move = cache(can_move)

    @cache
    def found(leaf: int, index: tuple[int, ...]) -> ParamUnit:
        aval, depth = leaves[leaf], len(index)
        # On its leading axes chunks have the length 1. The first box decides for all,
        # since the last one may be a partial chunk.
        origin = (0,) * len(aval.shape)
        while depth and not can_move(
            leaf, origin, (*(1,) * depth, *aval.shape[depth:])
        ):
            depth -= 1
        own = index[:depth]
        sharding = piece_sharding(aval.sharding, Piece(leaf, own))
        unit = ParamUnit(leaf, own, aval.shape[depth:], np.dtype(aval.dtype), sharding)
        boxes = map(unit.in_leaf, unit.shards)
        is_divided = not unit.is_apart or (
            leaf not in undivided
            and all(can_move(leaf, box.start, box.shape) for box in boxes)
        )
        return replace(unit, is_divided=is_divided)

    return lambda piece: found(piece.leaf, piece.index)


def shared_bytes(units: Iterable[ParamUnit]) -> int:
    """Memory to put a unit together of which several processes have parts.

    Each device of this process has the result, once.
    """
    return max((unit.device_bytes for unit in units if unit.is_shared), default=0)


def part_counts(
    leaves: Sequence[jax.ShapeDtypeStruct], gradients: Iterable[Piece]
) -> list[tuple[int, ...]]:
    """Returns for each leaf the number of parts along each axis, in a new store."""
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
