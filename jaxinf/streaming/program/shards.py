"""Gradients on several devices, handled by the distinct shards of this process.

Invariant: replicas of a shard have the same bits, so one of them is enough.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeAlias

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxinf.typing import Array

__all__ = [
    "Box",
    "Gradient",
    "ShardedGradient",
    "gathered",
    "handed_out",
    "shards_of",
    "whole",
]


@dataclass(frozen=True)
class Box:
    """A part of an array.

    Attributes:
      start: Index of its first element.
      shape: Its shape.
    """

    start: tuple[int, ...]
    shape: tuple[int, ...]

    @classmethod
    def of(cls, index: Sequence[slice], shape: Sequence[int]) -> "Box":
        """Returns the part at an index of an array of a shape."""
        ranges = [s.indices(n) for s, n in zip(index, shape, strict=True)]
        return cls(
            tuple(first for first, _, _ in ranges),
            tuple(end - first for first, end, _ in ranges),
        )

    @classmethod
    def whole(cls, shape: Sequence[int]) -> "Box":
        """Returns all of an array of a shape."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def slices(self) -> tuple[slice, ...]:
        """The part as an index into the array."""
        return tuple(
            slice(first, first + length)
            for first, length in zip(self.start, self.shape, strict=True)
        )


class ShardedGradient:
    """A gradient on several devices: one replica of each shard in this process.

    Args:
      array: The gradient. Its other replicas may be freed.
    """

    def __init__(self, array: jax.Array) -> None:
        self.shape: tuple[int, ...] = array.shape
        self.dtype = np.dtype(array.dtype)
        self._parts: dict[Box, jax.Array] = {}
        for shard in array.addressable_shards:
            self._parts.setdefault(Box.of(shard.index, self.shape), shard.data)

    @property
    def nbytes(self) -> int:
        """Bytes of the shards, on the host."""
        return sum(part.nbytes for part in self._parts.values())

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
        """Gathers the whole, with zeros for shards of other processes; blocks."""
        del copy  # one shard that is the whole is not copied, others are
        whole = self._parts.get(Box.whole(self.shape))
        if whole is not None:
            return np.asarray(whole, dtype)
        array = np.zeros(self.shape, self.dtype if dtype is None else dtype)
        for box, part in self._parts.items():
            array[box.slices] = np.asarray(part)
        return array


Gradient: TypeAlias = jax.Array | Array | ShardedGradient
"""A gradient on one device, on the host, or on several devices."""


def shards_of(gradient: Gradient, boxes: Sequence[Box]) -> Sequence[Array]:
    """Returns parts of an array; copies none if they are its own shards. Blocks.

    Args:
      gradient: The array.
      boxes: Parts of it, each element at most once.
    """
    if isinstance(gradient, jax.Array):
        gradient = handed_out(gradient)
    if isinstance(gradient, ShardedGradient):
        found = gradient.parts(boxes)
        if found is not None:
            return found
    array = np.asarray(gradient)
    whole = Box.whole(array.shape)
    return [array if box == whole else array[box.slices] for box in boxes]


def gathered(gradient: jax.Array | Array) -> jax.Array | Array:
    """Returns a gradient with all shards in every process; all call it."""
    sharding = getattr(gradient, "sharding", None)
    if not isinstance(sharding, NamedSharding) or sharding.is_fully_replicated:
        return gradient
    return _gather(NamedSharding(sharding.mesh, PartitionSpec()))(gradient)


@cache
def _gather(sharding: NamedSharding) -> Any:
    return jax.jit(lambda array: array, out_shardings=sharding)


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
