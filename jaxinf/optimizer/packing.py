"""Short arrays of a call travel together, as the words of one array.

    gate, probe, step, scalars, ... ─► words ─► one transfer ─► views

A transfer of four bytes costs as much as one of a page. Invariant: an array's bits are
the same on the other side, and floating-point values travel as integers, which no
device flushes to zero.
"""

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxinf.typing import Array, PyTree

PACKED_BYTES = 1024
"""Shorter arrays are packed."""

_WORD_BYTES = 4


@dataclass(frozen=True)
class Packing:
    """Where the arrays of a tree are: in the words, or by themselves.

    Attributes:
      shapes: shape and dtype of each array.
    """

    treedef: Any
    shapes: tuple[jax.ShapeDtypeStruct, ...]
    packed: tuple[bool, ...]

    @classmethod
    def of(cls, tree: PyTree) -> "Packing":
        """Returns that of a tree of arrays, or of shapes and dtypes."""
        leaves, treedef = jax.tree.flatten(tree)
        shapes = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves)
        packed = tuple(_num_bytes(x) < PACKED_BYTES for x in shapes)
        if sum(packed) < 2:
            packed = (False,) * len(shapes)
        return cls(treedef, shapes, packed)

    def pack(self, tree: PyTree) -> list[jax.Array]:
        """Returns the long arrays, and then the words, uint32, if any; traceable."""
        pairs = list(zip(jax.tree.leaves(tree), self.packed, strict=True))
        words = [_words(array) for array, is_packed in pairs if is_packed]
        long = [array for array, is_packed in pairs if not is_packed]
        return [*long, jnp.concatenate(words)] if words else long

    def unpack(self, arrays: list[Array]) -> PyTree:
        """On the host: returns the tree, whose short arrays are views of the words."""
        long = iter(arrays)
        words = arrays[-1].view(np.uint8) if any(self.packed) else np.zeros(0, np.uint8)
        begin, leaves = 0, []
        for shape, is_packed in zip(self.shapes, self.packed, strict=True):
            if not is_packed:
                leaves.append(next(long))
                continue
            end = begin + _num_bytes(shape)
            leaves.append(words[begin:end].view(shape.dtype).reshape(shape.shape))
            begin = -(-end // _WORD_BYTES) * _WORD_BYTES
        return self.treedef.unflatten(leaves)


def _num_bytes(shape: jax.ShapeDtypeStruct) -> int:
    return math.prod(shape.shape) * shape.dtype.itemsize


def _words(array: jax.Array) -> jax.Array:
    """Returns the bytes of an array as words; the last one is filled with zeros."""
    flat = jnp.asarray(array).reshape(-1)
    if flat.dtype == jnp.bool_:
        flat = flat.astype(jnp.uint8)
    num_in_word = _WORD_BYTES // flat.dtype.itemsize
    if num_in_word > 1:
        flat = jnp.pad(flat, (0, -flat.size % num_in_word)).reshape(-1, num_in_word)
    return lax.bitcast_convert_type(flat, jnp.uint32).reshape(-1)
