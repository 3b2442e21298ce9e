"""Shards of params and gradients in the host's memory.

    buffer   [ shard 0 | shard 1 | … ]      devices 0 … read shard 0 in place,
              each on an aligned address     so replicas take no memory of their own

Invariant: an array on several devices is handled by its distinct shards. Replicas of a
  shard have the same bits, so one of them is enough.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeAlias

import jax
import numpy as np
from jax.sharding import NamedSharding, SingleDeviceSharding

from jaxinf.typing import Array

__all__ = [
    "Box",
    "Gradient",
    "ShardedGradient",
    "boxes_of",
    "handed_out",
    "make_array",
    "packed_bytes",
    "packed_views",
    "shards_of",
    "whole",
]

_ALIGNED_BYTES = 64  # XLA's CPU client copies arrays at other addresses


@dataclass(frozen=True)
class Box:
    """A part of an array.

    Attributes:
      start: Index of its first element.
      shape: Its shape.
    """

    start: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def slices(self) -> tuple[slice, ...]:
        """The part as an index into the array."""
        return tuple(
            slice(first, first + length)
            for first, length in zip(self.start, self.shape, strict=True)
        )


def boxes_of(sharding: NamedSharding | None, shape: tuple[int, ...]) -> tuple[Box, ...]:
    """Returns the distinct shards of an array; without a sharding the whole."""
    if sharding is None:
        return (Box((0,) * len(shape), shape),)
    return _shares(sharding, shape)[0]


@lru_cache(maxsize=4096)
def _shares(
    sharding: NamedSharding, shape: tuple[int, ...]
) -> tuple[tuple[Box, ...], tuple[tuple[Any, int], ...]]:
    """Returns the distinct shards, and for each device the number of its own."""
    numbers: dict[Box, int] = {}
    own = []
    for device, index in sharding.devices_indices_map(shape).items():
        ranges = [s.indices(n) for s, n in zip(index, shape, strict=True)]
        box = Box(
            tuple(first for first, _, _ in ranges),
            tuple(end - first for first, end, _ in ranges),
        )
        own.append((device, numbers.setdefault(box, len(numbers))))
    return tuple(numbers), tuple(own)


def packed_bytes(boxes: Sequence[Box], dtype: np.dtype) -> int:
    """Bytes of a buffer that holds all shards."""
    if len(boxes) == 1:
        return _num_bytes(boxes[0], dtype)
    return sum(_aligned(_num_bytes(box, dtype)) for box in boxes)


def packed_views(
    memory: Array, boxes: Sequence[Box], dtype: np.dtype
) -> tuple[Array, ...]:
    """Returns the shards' arrays in a buffer of bytes that starts on a page."""
    found, first = [], 0
    for box in boxes:
        end = first + _num_bytes(box, dtype)
        found.append(memory[first:end].view(dtype).reshape(box.shape))
        first = _aligned(end)
    return tuple(found)


def _num_bytes(box: Box, dtype: np.dtype) -> int:
    return int(np.prod(box.shape, dtype=np.int64)) * dtype.itemsize


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNED_BYTES) * _ALIGNED_BYTES


def make_array(
    shards: Sequence[Array | jax.Array], shape: tuple[int, ...], sharding: Any
) -> jax.Array:
    """Puts shards on their devices; those with the host's memory read them in place.

    Args:
      shards: From `packed_views`.
      shape: Shape of the whole.
      sharding: Over several devices, or of one; None for JAX's default one.
    """
    if not isinstance(sharding, NamedSharding):
        return jax.device_put(shards[0], sharding)
    parts = [
        jax.device_put(shards[number], SingleDeviceSharding(device))
        for device, number in _shares(sharding, shape)[1]
    ]
    return jax.make_array_from_single_device_arrays(shape, sharding, parts)


class ShardedGradient:
    """A gradient on several devices: one replica of each shard.

    Args:
      array: The gradient. Its other replicas may be freed.
    """

    def __init__(self, array: jax.Array) -> None:
        self.shape: tuple[int, ...] = array.shape
        self.dtype = np.dtype(array.dtype)
        self._parts: dict[Box, jax.Array] = {}
        for shard in array.addressable_shards:
            ranges = zip(shard.index, self.shape, strict=True)
            start = tuple(one.indices(length)[0] for one, length in ranges)
            self._parts.setdefault(Box(start, tuple(shard.data.shape)), shard.data)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole, on the host."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize

    def parts(self, boxes: Sequence[Box]) -> tuple[Array, ...] | None:
        """Returns the shards as they are, if these are the boxes; blocks."""
        if self._parts.keys() != set(boxes):
            return None
        return tuple(np.asarray(self._parts[box]) for box in boxes)

    def copy_to_host_async(self) -> None:
        """Starts to copy the shards to the host."""
        for part in self._parts.values():
            part.copy_to_host_async()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        """Gathers the whole; blocks."""
        del copy  # one shard is the whole; others are copied
        if len(self._parts) == 1:
            (part,) = self._parts.values()
            return np.asarray(part, dtype)
        array = np.empty(self.shape, self.dtype if dtype is None else dtype)
        for box, part in self._parts.items():
            array[box.slices] = np.asarray(part)
        return array


Gradient: TypeAlias = jax.Array | Array | ShardedGradient
"""A gradient on one device, on the host, or on several devices."""


def shards_of(gradient: Gradient, boxes: Sequence[Box]) -> Sequence[Array]:
    """Returns parts of an array; copies none if they are its own shards. Blocks.

    Args:
      gradient: The array.
      boxes: Parts that cover it, each element once.
    """
    if isinstance(gradient, jax.Array):
        gradient = handed_out(gradient)
    if isinstance(gradient, ShardedGradient):
        found = gradient.parts(boxes)
        if found is not None:
            return found
    array = np.asarray(gradient)
    return [array] if len(boxes) == 1 else [array[box.slices] for box in boxes]


def handed_out(gradient: jax.Array | Array, *, copies: bool = False) -> Gradient:
    """Returns a program's gradient without the replicas on other devices.

    Args:
      gradient: The gradient.
      copies: Whether to start its copy to the host.
    """
    if not isinstance(gradient, jax.Array):
        return gradient
    found = gradient if len(gradient.devices()) == 1 else ShardedGradient(gradient)
    if copies:
        found.copy_to_host_async()
    return found


def whole(gradient: Gradient) -> jax.Array | Array:
    """Returns a gradient as one array; gathers it if it is on several devices."""
    if isinstance(gradient, ShardedGradient):
        return np.asarray(gradient)
    return gradient
