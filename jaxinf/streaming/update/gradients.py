"""Gradients on their way to an update: by shards, one replica of each in this process.

    a program's output ─► handed_out ─► shards_of ─► updates of the unit's parts
                                    └─► as_one_array ─► numbers, or a file

Invariant: shards are read in place. A gradient that is copied to the host holds no
memory of its device, unless it stays there.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxinf.layout import Box
from jaxinf.streaming.program.units import PINNED
from jaxinf.typing import Array


def arrived(copy: jax.Array) -> Array:
    """Returns what was copied to the host, in place; blocks until the copy has ended.

    No other function reads a gradient on its way.
    """
    return np.asarray(copy)


@dataclass(frozen=True, eq=False)
class ShardedGradient:
    """A gradient by shards: one replica of each in this process.

    Attributes:
      shards: On devices, or in pinned memory of the host, which is read in place.
      on_device: The gradient, if it stays there.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    shards: Mapping[Box, jax.Array]
    on_device: jax.Array | None

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.shards.values())

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        """Gathers the whole, with zeros for shards of other processes; blocks."""
        del copy  # one shard that is the whole is not copied, others are
        whole = self.shards.get(Box.of(None, self.shape))
        if whole is not None:
            return np.asarray(arrived(whole), dtype)
        array = np.zeros(self.shape, self.dtype if dtype is None else dtype)
        for box, part in self.shards.items():
            array[box.slices] = arrived(part)
        return array


Gradient: TypeAlias = Array | ShardedGradient
"""A gradient on the host, or by shards."""


def shards_of(gradient: Gradient, boxes: Sequence[Box]) -> Sequence[Array]:
    """Returns parts of an array; copies none if they are its own shards. Blocks.

    Args:
      boxes: Parts of it, each element at most once.
    """
    own = gradient.shards if isinstance(gradient, ShardedGradient) else {}
    if own.keys() == {*boxes}:
        return [arrived(own[box]) for box in boxes]
    array = np.asarray(gradient)
    return [array[(*box.slices, ...)] for box in boxes]


def gathered(gradient: jax.Array) -> jax.Array:
    """Returns a gradient with all shards in every process; all call it."""
    sharding = gradient.sharding
    if not isinstance(sharding, NamedSharding) or sharding.is_fully_replicated:
        return gradient
    return jax.device_put(gradient, NamedSharding(sharding.mesh, PartitionSpec()))


def handed_out(
    gradient: jax.Array, *, copies: bool = False, stays: bool = False
) -> ShardedGradient:
    """Returns a program's gradient without the replicas on other devices.

    Args:
      copies: Whether to start its copy to the host; nothing here then holds the
        device's memory, unless it stays.
      stays: Whether one on a single device stays there, too.
    """
    shape, dtype = gradient.shape, np.dtype(gradient.dtype)
    is_alone = len(gradient.devices()) == 1
    on_device = gradient if is_alone and (stays or not copies) else None
    replicas = reversed(gradient.addressable_shards)  # of a shard's the first
    shards = {Box.of(one.index, shape): one.data for one in replicas}
    if copies:
        pinned = [one.sharding.with_memory_kind(PINNED) for one in shards.values()]
        on_host = jax.device_put([*shards.values()], pinned)
        shards = dict(zip(shards, on_host, strict=True))
    return ShardedGradient(shape, dtype, shards, on_device)


def as_one_array(gradient: Gradient) -> jax.Array | Array:
    """Returns a gradient as one array: on its device if it is there, or gathered."""
    on_device = getattr(gradient, "on_device", None)
    return np.asarray(gradient) if on_device is None else on_device
