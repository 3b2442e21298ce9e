"""A compression's step on a gradient's way to the host.

    gradient (+ error feedback) ─► select, chunk by chunk ─► indices, values ─► host
                                        └► what is left out ─► next step, commit

Invariant: everything that decides what is sent happens on the JAX device that holds the
gradient, before it crosses the link.
"""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from jaxinf.compress import SparseLeaf, TopK, compress_leaf
from jaxinf.csd import GradientForm
from jaxinf.engine import Store
from jaxinf.errors import UnsupportedTransformError
from jaxinf.layout import LeafGrid
from jaxinf.optimizer.leaf_call import Compress, LeafCall
from jaxinf.program import UpdateProgram

__all__ = [
    "check_compression",
    "check_program",
    "compressor",
    "gradient_forms",
    "keeps_feedback",
]


def keeps_feedback(compression: TopK | None) -> bool:
    """Whether what is not sent is added to the next gradient."""
    return compression is not None and compression.error_feedback


def gradient_forms(
    compression: TopK | None, dtype: np.dtype
) -> tuple[GradientForm, ...]:
    """How gradients of a dtype come to the CSDs."""
    if compression is None:
        return (GradientForm(dtype),)
    sparse = GradientForm(compression.value_dtype(dtype), is_sparse=True)
    return (sparse, *[GradientForm(dtype)][: compression.warmup_steps])


def compressor(
    compression: TopK, chunk_shapes: Mapping[int, tuple[int, ...]]
) -> Compress:
    """What makes of a leaf's call the one that is sent.

    Args:
      compression: how much is sent, and how.
      chunk_shapes: of the leaves, by number.
    """

    def compress(call: LeafCall) -> LeafCall:
        gradient = call.gradient
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


def check_compression(compression: TopK | None, store: Store) -> None:
    """Refuses what is no compression, or one that the store cannot keep.

    Raises:
      TypeError: it is no compression.
      ValueError: the store cannot keep its error feedback.
    """
    if compression is not None and not isinstance(compression, TopK):
        raise TypeError(
            f"compress={compression!r}: expected jaxinf.top_k(ratio) or None"
        )
    options = store.training.options
    if keeps_feedback(compression) and options.steps_per_commit != 1:
        raise ValueError(
            f"{options.path}: error_feedback=True: what a step leaves out is part of "
            'its commit, expected durability="step", found a store that commits more '
            'rarely; open it with durability="step", or leave error feedback out'
        )


def check_program(compression: TopK | None, program: UpdateProgram) -> None:
    """Refuses an optimizer whose gradients cannot be sent compressed.

    Raises:
      UnsupportedTransformError: says why and what to do.
    """
    if compression is None:
        return
    dense = next((p for p in program.leaves if p.kernel.num_arrays), None)
    if dense is not None:
        raise UnsupportedTransformError(
            f"{dense.info.name}: with compress= nothing dense crosses the link, "
            "but this optimizer's update needs another number for each element; "
            "put what computes it in front: optax.chain(…, smart_update(tx, "
            "store, compress=…))"
        )
    if keeps_feedback(compression) and program.reads_gradients:
        raise UnsupportedTransformError(
            "error_feedback=True: what is left out of a gradient would escape what "
            "this optimizer computes from all gradients, such as their norm; put "
            "that in front: optax.chain(optax.clip_by_global_norm(…), "
            "smart_update(tx, store, compress=…))"
        )
