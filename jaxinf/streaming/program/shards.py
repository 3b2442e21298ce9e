"""Gradients on several devices, handled by their distinct shards.

Invariant: replicas of a shard have the same bits, so one of them is enough.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import numpy as np

from jaxinf.streaming.program.graph import aval_bytes
from jaxinf.typing import Array

__all__ = ["Box", "Gradient", "ShardedGradient", "handed_out", "shards_of", "whole"]


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

    @property
    def slices(self) -> tuple[slice, ...]:
        """The part as an index into the array."""
        return tuple(
            slice(first, first + length)
            for first, length in zip(self.start, self.shape, strict=True)
        )


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
            self._parts.setdefault(Box.of(shard.index, self.shape), shard.data)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole, on the host."""
        return aval_bytes(self)

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
