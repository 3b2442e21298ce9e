"""The parts of params that programs read, in a store's leaves.

    memory   [ shard 0 | shard 1 | … ]      devices 0 … read shard 0 in place,
              each on an aligned address     so replicas take no memory of their own

Invariant: a unit consists of whole chunks of the store, so it is read, updated and held
alone; on several devices in its distinct shards.
"""

import math
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, SingleDeviceSharding

from jaxinf.engine import has_shared_parts, put_together, shard_counts
from jaxinf.streaming.program.graph import Piece, piece_sharding
from jaxinf.streaming.program.shards import Box
from jaxinf.transfer import page_ceil
from jaxinf.typing import Array

SHARED = "putting params of several processes together"

# A leaf with smaller slices is one unit: they are not worth chunks of their own.
MIN_SLICE_BYTES = 256 << 10
_ALIGNED_BYTES = 64  # XLA's CPU client copies arrays at other addresses


@dataclass(frozen=True)
class Unit:
    """A part of a leaf that moves alone.

    Attributes:
      index: Position on its leading axes; empty for the whole.
      shape: Shape of the part, without the indexed axes.
      dtype: Dtype of the params on the JAX device.
      sharding: Its sharding over the mesh; None for one device.
      is_divided: Whether the store moves each of its shards alone.
    """

    leaf: int
    index: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: np.dtype
    sharding: NamedSharding | None = None
    is_divided: bool = field(default=True, compare=False)

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.leaf, self.index, self.shape))

    # Its parts.

    @property
    def whole(self) -> Box:
        return Box.whole(self.shape)

    @cached_property
    def _of_devices(self) -> Mapping[Any, Box]:
        """The shard of each device of this process; none without a mesh."""
        if self.sharding is None:
            return {}
        indices = self.sharding.addressable_devices_indices_map(self.shape)
        return {device: Box.of(i or (), self.shape) for device, i in indices.items()}

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
        return self.sharding is not None and has_shared_parts(self.sharding, self.shape)

    # Its place in the leaf.

    @property
    def place(self) -> tuple[int, ...]:
        """Its leaf, and where it begins there: units of a step differ in it."""
        return (self.leaf, *self.index)

    def origin_of(self, box: Box) -> tuple[int, ...]:
        """Index in the leaf of a part's first element."""
        return (*self.index, *box.start)

    def extent_of(self, box: Box) -> tuple[int, ...]:
        """Shape of a part in the leaf."""
        return (*(1 for _ in self.index), *box.shape)

    @property
    def origin(self) -> tuple[int, ...]:
        return self.origin_of(self.whole)

    @property
    def extent(self) -> tuple[int, ...]:
        return self.extent_of(self.whole)

    # Its bytes.

    def _bytes_of(self, box: Box) -> int:
        return math.prod(box.shape) * self.dtype.itemsize

    @cached_property
    def num_bytes(self) -> int:
        """Bytes of the params on this process's JAX devices, replicas once."""
        return sum(map(self._bytes_of, self.shards))

    @property
    def whole_bytes(self) -> int:
        return self._bytes_of(self.whole)

    @property
    def device_bytes(self) -> int:
        """Bytes of its shards on this process's devices, each replica counted."""
        return sum(map(self._bytes_of, self._of_devices.values()))

    @cached_property
    def held_bytes(self) -> int:
        """Bytes in the host's memory, where each of several shards is aligned."""
        if len(self.shards) == 1:
            return self.num_bytes
        return sum(_aligned(self._bytes_of(box)) for box in self.shards)

    @cached_property
    def page_bytes(self) -> int:
        return page_ceil(max(self.held_bytes, 1))

    # Its arrays.

    def views(self, memory: Array) -> tuple[Array, ...]:
        """Returns the arrays of its shards in `held_bytes` from a page on."""
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
        return [
            (own[box], SingleDeviceSharding(device))
            for device, box in self._of_devices.items()
        ]

    def of_parts(self, parts: Sequence[jax.Array]) -> jax.Array:
        """Returns the array of what is on its devices, in the order of `places`."""
        if self.sharding is None:
            return parts[0]
        return jax.make_array_from_single_device_arrays(
            self.shape, self.sharding, list(parts)
        )

    def on_devices(self, shards: Sequence[Array]) -> jax.Array:
        """Puts its shards on their devices, which read them in place; blocks."""
        places = self.places(shards)
        return self.of_parts([jax.device_put(shard, place) for shard, place in places])

    def put_together(self, shards: Sequence[Array]) -> jax.Array:
        """As `on_devices`, of shards of which each process has some chunks; blocks.

        All processes call it alike. Devices read the shards in place, which are filled.

        Args:
          shards: Of this process, with zeros where others hold the chunks.
        """
        array = jax.block_until_ready(put_together(self.on_devices(shards)))
        found = {Box.of(s.index, self.shape): s.data for s in array.addressable_shards}
        for box, shard in zip(self.shards, shards, strict=True):
            np.copyto(shard, np.asarray(found[box]))
        return self.on_devices(shards)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNED_BYTES) * _ALIGNED_BYTES


class StoreUnits:
    """The units of a store.

    Args:
      leaves: Abstract values of the params' leaves; with a mesh they have shardings.
      can_move: Whether a box of a leaf (leaf, origin, extent) consists of whole chunks.
      undivided: Leaves whose shards the store does not move alone in any case.
    """

    def __init__(
        self,
        leaves: Sequence[jax.ShapeDtypeStruct],
        can_move: Callable[[int, tuple[int, ...], tuple[int, ...]], bool],
        undivided: Container[int] = (),
    ) -> None:
        self._leaves = leaves
        self._can_move = cache(can_move)
        self._undivided = undivided
        self._units: dict[Any, Unit] = {}

    def unit(self, piece: Piece) -> Unit:
        key = piece.leaf, piece.index
        if key not in self._units:
            self._units[key] = self._find(*key)
        return self._units[key]

    @staticmethod
    def part(unit: Unit, piece: Piece) -> Piece:
        """Returns the piece of the unit's array for a piece of the leaf."""
        return Piece(piece.leaf, piece.index[len(unit.index) :], piece.rows)

    def _find(self, leaf: int, index: tuple[int, ...]) -> Unit:
        aval, depth = self._leaves[leaf], len(index)
        # On its leading axes chunks have the length 1. The first box decides for all,
        # since the last one may be a partial chunk.
        origin = (0,) * len(aval.shape)
        while depth and not self._can_move(
            leaf, origin, (*(1,) * depth, *aval.shape[depth:])
        ):
            depth -= 1
        own = index[:depth]
        sharding = piece_sharding(aval.sharding, Piece(leaf, own))
        unit = Unit(leaf, own, aval.shape[depth:], np.dtype(aval.dtype), sharding)
        is_divided = not unit.is_apart or (
            leaf not in self._undivided
            and all(
                self._can_move(leaf, unit.origin_of(box), unit.extent_of(box))
                for box in unit.shards
            )
        )
        return replace(unit, is_divided=is_divided)


def shared_bytes(units: Iterable[Unit]) -> int:
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
