"""The tensors that a `Mover` moves, and how each is written, read and copied.

Invariant: a tensor comes back with the bits that it left with.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import jax
import numpy as np

from jaxinf.streaming.move.moves import Tensor
from jaxinf.streaming.move.scratch import Place, Scratch, raw_bytes
from jaxinf.streaming.program.shards import PINNED
from jaxinf.typing import Array

Crossing: TypeAlias = list[tuple[Array | jax.Array, Any]]
"""Arrays on the host, and where each of them goes."""


@dataclass(eq=False)
class Moved(Tensor, ABC):
    """A tensor that a `Mover` moves."""

    @abstractmethod
    def queue(self, part: int) -> int:
        """Returns the number of the drive of a part."""

    @abstractmethod
    def read(self, part: int, out: Array) -> int:
        """Reads a part into the tensor's memory; returns its bytes on the drive."""

    @abstractmethod
    def in_place(self, raw: Array) -> Any:
        """Returns the tensor for a device that reads its memory."""

    @abstractmethod
    def crossing(self, source: Array | jax.Array) -> Crossing:
        """Returns the arrays that are copied to devices with memory of their own.

        Args:
          source: Its memory, or an array on the host.
        """

    @abstractmethod
    def landed(self, arrays: Sequence[jax.Array]) -> jax.Array:
        """Returns the tensor, from the copies of these arrays."""

    def completed(self, value: Any) -> Any:
        """Returns what the caller of `Mover.get` is given, on that thread."""
        return value


@dataclass(eq=False)
class Evicted(Moved):
    """A value that leaves the device, or an array of NumPy that leaves the host.

    Attributes:
      place: Its place there, without parts if it stays on the host.
    """

    scratch: Scratch = field(default_factory=lambda: Scratch(()))
    place: Place = field(default_factory=lambda: Place(()))

    def __post_init__(self) -> None:
        self.num_parts = len(self.place.parts)
        self.host_bytes = self.place.num_bytes
        self._shape, self._dtype = self.value.shape, self.value.dtype
        self._sharding = getattr(self.value, "sharding", None)

    def queue(self, part: int) -> int:
        return self.place.parts[part].drive

    def write(self, part: int, bounce: Array) -> int:
        """Writes a part; returns its bytes on the drive. Blocks."""
        raw = raw_bytes(np.asarray(self.host))
        self.scratch.write(self.place.parts[part], raw, bounce, self.key)
        return self.place.parts[part].num_bytes

    def read(self, part: int, out: Array) -> int:
        self.scratch.read(self.place.parts[part], out, self.key)
        return self.place.parts[part].num_bytes

    def copied_out(self) -> jax.Array:
        """Returns a copy in pinned memory; blocks."""
        assert self._sharding is not None, "it is on a device"
        pinned = self._sharding.with_memory_kind(PINNED)
        return jax.block_until_ready(jax.device_put(self.value, pinned))

    def in_place(self, raw: Array) -> Any:
        array = self._view(raw)
        if self._sharding is None:
            return array
        return jax.block_until_ready(jax.device_put(array, self._sharding))

    def crossing(self, source: Array | jax.Array) -> Crossing:
        array = source if isinstance(source, jax.Array) else self._view(source)
        return [(array, self._sharding)]

    def landed(self, arrays: Sequence[jax.Array]) -> jax.Array:
        return arrays[0]

    def _view(self, raw: Array) -> Array:
        num_elements = math.prod(self._shape)
        return np.frombuffer(raw, self._dtype, num_elements).reshape(self._shape)
