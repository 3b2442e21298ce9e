"""Computes a block of rows of an array alone, as far as a program allows.

    block of  pointwise   of its operands' blocks
              broadcast   of its operand's block, or of all of it
              draw        of the counts of its elements, or of its keys' block
              other       of the whole, which is computed

Invariant: a block has the bits that the array has there.
"""

from functools import partial

import jax
import numpy as np
from jax import lax

from jaxinf.program.graph import Node, Value
from jaxinf.streaming.program.classify import POINTWISE
from jaxinf.streaming.program.graph import Number, Rewriter
from jaxinf.streaming.program.threefry import can_fuse, fused_bits


def is_fusable(node: Node) -> bool:
    """Whether a node draws random bits that `fused_bits` can draw."""
    params = node.params
    return node.name == "random_bits" and can_fuse(
        node.inputs[0].aval, params["bit_width"], params["shape"]
    )


class BlockBuilder(Rewriter):
    """Makes programs of blocks of so many rows.

    Attributes:
      start: The first row, an input of the programs.
    """

    def __init__(self, length: int) -> None:
        super().__init__()
        self._length = length
        self.start = self.input(Number(0), jax.typeof(np.int32(0)))
        self._parts: dict[tuple[Value, int], Value] = {}

    def part(self, value: Value, axis: int = 0) -> Value:
        """Returns a block of an array along an axis."""
        key = value, axis
        if key not in self._parts:
            self._parts[key] = self._part(value, axis)
        return self._parts[key]

    def _part(self, value: Value, axis: int) -> Value:
        node = value.node
        if node is None or len(node.outputs) != 1:
            return self._sliced(value, axis)
        shape = (*value.shape[:axis], self._length, *value.shape[axis + 1 :])
        aval = value.aval.update(shape=shape)
        if node.name in POINTWISE:
            inputs = [
                self.part(one, axis) if one.shape and one.shape[axis] > 1 else one
                for one in node.inputs  # axes of length 1 are spread
            ]
            return self.append(node, inputs, aval)
        if node.name == "transpose":
            own = self.part(node.inputs[0], node.params["permutation"][axis])
            return self.append(node, [own], aval)
        if node.name == "broadcast_in_dim":
            own, params = node.inputs[0], {**node.params, "shape": shape}
            places = list(params["broadcast_dimensions"])
            if axis in places and own.shape[places.index(axis)] != 1:
                own = self.part(own, places.index(axis))
            like = Node(node.primitive, (), params, context=node.context)
            return self.append(like, [own, *node.inputs[1:]], aval)
        if is_fusable(node):
            return self._drawn(node, axis)
        return self._sliced(value, axis)

    def _drawn(self, node: Node, axis: int) -> Value:
        (keys,), params = node.inputs, node.params
        draw = partial(fused_bits, shape=params["shape"], bit_width=params["bit_width"])
        axis -= len(keys.shape)
        if axis < 0:
            keys = self.part(keys, axis + len(keys.shape))
            return self.call((node, "all"), draw, keys)

        def block(keys: jax.Array, start: jax.Array) -> jax.Array:
            return draw(keys, axis=axis, start=start, length=self._length)

        return self.call((node, axis), block, keys, self.start)

    def _sliced(self, value: Value, axis: int) -> Value:
        def block(array: jax.Array, start: jax.Array) -> jax.Array:
            return lax.dynamic_slice_in_dim(array, start, self._length, axis)

        return self.call(("slice", axis), block, value, self.start)
