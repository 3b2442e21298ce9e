"""The form of a sparse gradient on the link.

    chunk 0                     chunk 1                     …
    int32 indices, ascending    int32 indices, ascending
    values                      values

Invariant: an index is relative to its own chunk, and no index occurs twice.
"""

from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import jax
import numpy as np

from jaxinf.typing import Array


@dataclass(frozen=True)
class SparseGradient:
    """A run of a gradient with few elements that are not zero.

    Attributes:
      indices: ``(k,)`` int32, ascending, below `num_elements`.
      values: ``(k,)`` float32, bfloat16 or float16.
      num_elements: length of the run.
    """

    indices: Array
    values: Array
    num_elements: int

    @property
    def nbytes(self) -> int:
        """Bytes on the link."""
        return self.indices.nbytes + self.values.nbytes

    def part(self, start: int, stop: int) -> "SparseGradient":
        """Returns the elements from `start` to `stop`, with indices from `start` on."""
        if (start, stop) == (0, self.num_elements):
            return self
        first, last = np.searchsorted(self.indices, (start, stop))
        indices = self.indices[first:last] - np.int32(start)
        return SparseGradient(indices, self.values[first:last], stop - start)

    def put_into(self, dense: Array) -> None:
        """Writes the values at their indices; other elements do not change.

        Args:
          dense: ``(num_elements,)`` of the values' dtype.
        """
        dense[self.indices] = self.values


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("indices", "values"),
    meta_fields=("shape", "counts", "lengths"),
)
@dataclass(frozen=True)
class SparseLeaf:
    """A leaf's gradient, or a shard's, as a JAX device sends it; a pytree.

    Its arrays are JAX's on the JAX device and NumPy's on the host.

    Attributes:
      shape: shape of the leaf or the shard.
      indices: ``(k,)`` int32: those of the first chunk, then of the second, ….
      values: ``(k,)``, in the same order.
      counts: number of elements sent of each chunk.
      lengths: length of each chunk at the time of the compression.
    """

    shape: tuple[int, ...]
    indices: Any
    values: Any
    counts: tuple[int, ...]
    lengths: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes on the link."""
        return self.indices.nbytes + self.values.nbytes

    @cached_property
    def _ends(self) -> Array:
        return np.cumsum(self.counts)

    def chunk(self, number: int) -> SparseGradient:
        """Returns the elements sent of a chunk, by its number in the leaf or shard."""
        last = int(self._ends[number])
        own = slice(last - self.counts[number], last)
        return SparseGradient(self.indices[own], self.values[own], self.lengths[number])
