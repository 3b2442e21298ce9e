"""Gradients on several devices or on their way to the host, by this process's shards.

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

PINNED = "pinned_host"
"""The kind of memory of the host from and to which devices copy."""


@dataclass(frozen=True)
class Box:
    """A part of an array."""

    start: tuple[int, ...]
    shape: tuple[int, ...]

    @classmethod
    def of(cls, index: Sequence[slice], shape: Sequence[int]) -> "Box":
        ranges = [s.indices(n) for s, n in zip(index, shape, strict=True)]
        return cls(
            tuple(first for first, _, _ in ranges),
            tuple(end - first for first, end, _ in ranges),
        )

    @classmethod
    def whole(cls, shape: Sequence[int]) -> "Box":
        return cls((0,) * len(shape), tuple(shape))

    @property
    def slices(self) -> tuple[slice, ...]:
        """The part as an index into the array."""
        return tuple(
            slice(first, first + length)
            for first, length in zip(self.start, self.shape, strict=True)
        )


def arrived(copy: jax.Array) -> Array:
    """Returns what was copied to the host, in place; blocks until the copy has ended.

    No other function reads a gradient on its way.
    """
    return np.asarray(copy)


class ShardedGradient:
    """A gradient by shards: one replica of each in this process.

    Args:
      array: The gradient. Its other replicas may be freed.
      copies: Whether to start a copy to pinned memory of the host, which is read in
        place; nothing here holds the device's memory then.

    Attributes:
      on_device: The gradient, if it stays there.
    """

    def __init__(
        self, array: jax.Array, *, copies: bool = False, stays: bool = False
    ) -> None:
        self.shape: tuple[int, ...] = array.shape
        self.dtype = np.dtype(array.dtype)
        self.on_device = array if stays else None
        self._parts: dict[Box, jax.Array] = {}
        for shard in array.addressable_shards:
            self._parts.setdefault(Box.of(shard.index, self.shape), shard.data)
        if copies:
            parts = list(self._parts.values())
            pinned = [part.sharding.with_memory_kind(PINNED) for part in parts]
            on_host = jax.device_put(parts, pinned)
            self._parts = dict(zip(self._parts, on_host, strict=True))

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self._parts.values())

    def parts(self, boxes: Sequence[Box]) -> tuple[Array, ...] | None:
        """Returns the shards as they are, if these are the boxes; blocks."""
        if self._parts.keys() != set(boxes):
            return None
        return tuple(arrived(self._parts[box]) for box in boxes)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        """Gathers the whole, with zeros for shards of other processes; blocks."""
        del copy  # one shard that is the whole is not copied, others are
        whole = self._parts.get(Box.whole(self.shape))
        if whole is not None:
            return np.asarray(arrived(whole), dtype)
        array = np.zeros(self.shape, self.dtype if dtype is None else dtype)
        for box, part in self._parts.items():
            array[box.slices] = arrived(part)
        return array


Gradient: TypeAlias = jax.Array | Array | ShardedGradient
"""A gradient on one device, on the host, or by shards."""


def shards_of(gradient: Gradient, boxes: Sequence[Box]) -> Sequence[Array]:
    """Returns parts of an array; copies none if they are its own shards. Blocks.

    Args:
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


def handed_out(
    gradient: jax.Array | Array, *, copies: bool = False, stays: bool = False
) -> Gradient:
    """Returns a program's gradient without the replicas on other devices.

    Args:
      copies: Whether to start its copy to the host.
      stays: Whether one on a single device stays there, too.
    """
    if not isinstance(gradient, jax.Array):
        return gradient
    is_alone = len(gradient.devices()) == 1
    if is_alone and not copies:
        return gradient
    return ShardedGradient(gradient, copies=copies, stays=stays and is_alone)


def whole(gradient: Gradient) -> jax.Array | Array:
    """Returns a gradient as one array: on its device if it is there, or gathered."""
    if not isinstance(gradient, ShardedGradient):
        return gradient
    on_device = gradient.on_device
    return np.asarray(gradient) if on_device is None else on_device
