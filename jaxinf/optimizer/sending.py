"""How gradients go to the host: dense, or what a compression sends of them.

    gradient (+ error feedback) ─► select, chunk by chunk ─► indices, values ─► host
                                        └► what is left out ─► next step, commit

Invariant: everything that decides what is sent happens on the JAX device that holds the
gradient, before it crosses the link.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeAlias

import jax
import numpy as np
from jax import lax

from jaxinf.compress import TopK, compress_leaf
from jaxinf.csd import GradientForm
from jaxinf.errors import UnsupportedTransformError
from jaxinf.layout import LeafGrid
from jaxinf.optimizer.callback import Prepare
from jaxinf.optimizer.host_side import HostSide, Sent
from jaxinf.program import UpdateProgram

__all__ = ["Call", "Sending"]

_Sent: TypeAlias = tuple[jax.Array | None, jax.Array, list[jax.Array]]

Call: TypeAlias = Callable[[Sent | None, Sequence[jax.Array], Prepare | None], _Sent]
"""Calls the host with what was sent, for the update, a status, and what was kept."""


class Sending:
    """What `compress` of `smart_update` asks for.

    Args:
      host: of the store.
      compression: None for dense gradients.

    Raises:
      TypeError: it is no compression.
      ValueError: the store cannot keep its error feedback.
    """

    def __init__(self, host: HostSide, compression: TopK | None) -> None:
        if compression is not None and not isinstance(compression, TopK):
            raise TypeError(
                f"compress={compression!r}: expected jaxinf.top_k(ratio) or None"
            )
        self.compression = compression
        if compression is not None:
            _check_store(host, compression)

    @property
    def has_feedback(self) -> bool:
        """Whether what is not sent is added to the next gradient."""
        return self.compression is not None and self.compression.error_feedback

    def forms(self, dtype: np.dtype) -> tuple[GradientForm, ...]:
        """How gradients of a dtype come to the CSDs."""
        if self.compression is None:
            return (GradientForm(dtype),)
        sparse = GradientForm(self.compression.value_dtype(dtype), is_sparse=True)
        return (sparse, *[GradientForm(dtype)][: self.compression.warmup_steps])

    def check(self, program: UpdateProgram) -> None:
        """Refuses an optimizer whose gradients cannot be sent so.

        Raises:
          UnsupportedTransformError: says why and what to do.
        """
        if self.compression is None:
            return
        dense = next((p for p in program.leaves if p.kernel.num_arrays), None)
        if dense is not None:
            raise UnsupportedTransformError(
                f"{dense.info.name}: with compress= nothing dense crosses the link, "
                "but this optimizer's update needs another number for each element; "
                "put what computes it in front: optax.chain(…, smart_update(tx, "
                "store, compress=…))"
            )
        if self.has_feedback and program.reads_gradients:
            raise UnsupportedTransformError(
                "error_feedback=True: what is left out of a gradient would escape what "
                "this optimizer computes from all gradients, such as their norm; put "
                "that in front: optax.chain(optax.clip_by_global_norm(…), "
                "smart_update(tx, store, compress=…))"
            )

    def send(
        self,
        call: Call,
        grid_of: Callable[[], LeafGrid],
        gradient: jax.Array,
        others: Sequence[jax.Array],
        feedback: Sequence[jax.Array],
        step: jax.Array,
    ) -> _Sent:
        """One leaf's call of the host.

        Args:
          call: what calls.
          grid_of: the chunks of the leaf, or of each JAX device's shard.
          gradient: of the leaf.
          others: further arrays of its shape.
          feedback: what was left out before, float32; empty without error feedback.
          step: of the state.

        Returns:
          As `call`; kept is the new error feedback.
        """
        compression = self.compression
        if compression is None:
            return call(None, [gradient, *others], None)
        # What makes the gradient is not computed together with what selects from it.
        gradient = lax.optimization_barrier(gradient)
        grid = grid_of()
        sent = Sent.of(grid, compression, np.dtype(gradient.dtype))
        prepare = partial(_prepared, grid, compression)

        def compressed() -> _Sent:
            return call(sent, [gradient, *feedback, *others], prepare)

        def dense() -> _Sent:
            result, status, _ = call(None, [gradient, *others], None)
            return result, status, list(feedback)

        if not compression.warmup_steps:
            return compressed()
        return lax.cond(step < compression.warmup_steps, dense, compressed)


def _prepared(
    grid: LeafGrid, compression: TopK, arrays: Sequence[jax.Array]
) -> tuple[Sequence[jax.Array], list[jax.Array]]:
    gradient, *others = arrays
    feedback = others.pop(0) if compression.error_feedback else None
    sent, left = compress_leaf(gradient, grid, compression, feedback)
    kept = [] if left is None else [left]
    return [sent.indices, sent.values, *kept, *others], kept


def _check_store(host: HostSide, compression: TopK) -> None:
    options = host.store.training.options
    if compression.error_feedback and options.steps_per_commit != 1:
        raise ValueError(
            f"{options.path}: error_feedback=True: what a step leaves out is part of "
            'its commit, expected durability="step", found a store that commits more '
            'rarely; open it with durability="step", or leave error feedback out'
        )
