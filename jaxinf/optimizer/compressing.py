"""Compresses gradients before they are sent to the host.

    gradient (+ error feedback) ─► select, chunk by chunk ─► indices, values ─► host
                                        └► the rest ─► next step, commit

Invariant: the selection is made on the JAX device with the gradient, before the link.
"""

from collections.abc import Mapping
from dataclasses import replace

from jaxinf.compress import SparseLeaf, TopK, compress_leaf
from jaxinf.layout import LeafGrid
from jaxinf.optimizer.leaf_call import Compress, LeafCall


def compressor(
    compression: TopK, chunk_shapes: Mapping[int, tuple[int, ...]]
) -> Compress:
    """Returns a function that compresses a leaf's call."""

    def compress(call: LeafCall) -> LeafCall:
        gradient = call.gradient
        if gradient is None:
            return call
        grid = LeafGrid(tuple(gradient.shape), chunk_shapes[call.number])
        sent, left = compress_leaf(gradient, grid, compression, call.feedback)
        sparse = SparseLeaf(
            shape=tuple(gradient.shape),
            indices=sent.indices,
            values=sent.values,
            counts=sent.counts,
            lengths=tuple(chunk.num_elements for chunk in grid.chunks()),
        )
        return replace(call, gradient=sparse, feedback=left)

    return compress
