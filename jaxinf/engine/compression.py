"""The engine's side of a compression: gradients' forms, and what is refused.

Invariant: a compression that passes these checks can be carried out.
"""

import numpy as np

from jaxinf.compress import TopK
from jaxinf.csd import GradientForm
from jaxinf.engine.store import Store
from jaxinf.errors import UnsupportedTransformError
from jaxinf.program import UpdateProgram


def keeps_feedback(compression: TopK | None) -> bool:
    """Whether elements that are not sent are added to the next gradient."""
    return compression is not None and compression.error_feedback


def gradient_forms(
    compression: TopK | None, dtype: np.dtype
) -> tuple[GradientForm, ...]:
    """Returns the forms in which the CSDs get gradients of a dtype."""
    if compression is None:
        return (GradientForm(dtype),)
    sparse = GradientForm(compression._value_dtype(dtype), is_sparse=True)
    return (sparse, *[GradientForm(dtype)][: compression.warmup_steps])


def check_compression(compression: TopK | None, store: Store) -> None:
    """Refuses an invalid compression, or one that the store cannot keep.

    Raises:
      TypeError: it is not a compression.
      ValueError: the store cannot keep its error feedback.
    """
    if compression is not None and not isinstance(compression, TopK):
        raise TypeError(
            f"compress={compression!r}: expected jaxinf.top_k(ratio) or None"
        )
    options = store._engine.options
    if keeps_feedback(compression) and options.steps_per_commit != 1:
        raise ValueError(
            f"{options.path}: error_feedback=True: each step commits its error "
            'feedback, expected durability="step", found a store with fewer commits; '
            'open it with durability="step", or leave error feedback out'
        )


def check_compressed(compression: TopK | None, program: UpdateProgram) -> None:
    """Refuses an optimizer whose gradients cannot be sent compressed.

    Raises:
      UnsupportedTransformError: gives the reason and the remedy.
    """
    if compression is None:
        return
    if program.recall is not None and program.recall.counter is None:
        raise UnsupportedTransformError(
            "with compress= this optimizer's update lacks the elements that were not "
            "sent, and it computes a quantity of the whole update, such as its norm; "
            "leave compress= out"
        )
    if program.recall is not None:
        raise UnsupportedTransformError(
            "with compress= the stored sum of optax.MultiSteps lacks the elements that "
            "were not sent, and this optimizer computes a quantity of the whole sum, "
            "such as its norm; compute it of each gradient: smart_update(optax.chain("
            "optax.clip_by_global_norm(…), optax.MultiSteps(…)), store, compress=…)"
        )
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
            "error_feedback=True: this optimizer computes a quantity of all gradients, "
            "such as their norm, which would miss the elements that are not sent; put "
            "that in front: optax.chain(optax.clip_by_global_norm(…), "
            "smart_update(tx, store, compress=…))"
        )
