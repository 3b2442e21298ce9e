"""The transformation's `update`: one step of the store.

    prologue (jitted JAX): scalars ─┐
    gradient leaf ──────────────────┼─► host callback ─► CSD: read ► update ► write
    update u, or new 16-bit params ◄┘          all leaves ─► one commit

Invariant: the store advances by exactly one step for each update that is not refused;
  the returned update is the value that was added to the master params.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from jaxinf.engine import StoreDescription
from jaxinf.optimizer.aligning import Shapes
from jaxinf.optimizer.callback import FAILED
from jaxinf.optimizer.change import change
from jaxinf.optimizer.entering import entering
from jaxinf.optimizer.gathering import moved, stored_shardings
from jaxinf.optimizer.host_side import COMMITTED
from jaxinf.optimizer.leaf_call import HostCall
from jaxinf.optimizer.sharding import traced_shardings
from jaxinf.optimizer.state import SmartUpdateState, check_state, next_state
from jaxinf.optimizer.step_calls import StepCalls
from jaxinf.optimizer.wrapped import Wrapped
from jaxinf.program import LeafInputs
from jaxinf.typing import PyTree

__all__ = ["run_update"]


def run_update(
    wrapped: Wrapped,
    updates: PyTree,
    state: SmartUpdateState,
    params: PyTree | None,
    extra_args: Mapping[str, Any],
    shardings: tuple[NamedSharding, ...],
    shapes: Shapes | None,
) -> tuple[PyTree, SmartUpdateState]:
    """See `smart_update`; traceable.

    Args:
      wrapped: the optimizer and its store.
      updates: a tree like the params, with None for a leaf that stays as it is.
      state: the state of `init`, or of the last step.
      params: the params, all of them trained; None if they are not available.
      extra_args: other arguments of the optimizer's update.
      shardings: of the params' leaves; empty for one JAX device.
      shapes: see `Aligned`.
    """
    updates, state, params, extra_args = entering(
        "update", (updates, state, params, dict(extra_args))
    )
    known = updates if params is None else params
    if shapes is not None:
        known = shapes.tree
    treedef = jax.tree.structure(known)
    gradients = treedef.flatten_up_to(updates)
    own = shardings or traced_shardings(jax.tree.leaves(known))
    if not shardings:
        shardings = stored_shardings(wrapped.store, own, jax.tree.leaves(known))
        if shardings != own:
            wrapped.host.warn_of_gathering(own[0].mesh.size)
    init, program = wrapped.trace(known, extra_args)
    description = wrapped.describe(init, program, shardings)
    old = jax.tree.leaves(state.optimizer)
    feedback = jax.tree.leaves(state.error_feedback)
    num_feedback = len(gradients) if wrapped.has_feedback else 0
    check_state(state, description, num_feedback=num_feedback)
    _check_gradients(gradients, description)
    if wrapped.store.training.commit is not None:
        wrapped.store.training.bind(description)  # refuses it while it is traced
    on_device = _device_params(wrapped, known, params, extra_args)
    stand_ins = [
        jnp.zeros(leaf.shape, leaf.device_dtype) for leaf in description.leaves
    ]
    seen = [z if g is None else g for g, z in zip(gradients, stand_ins, strict=True)]
    given = (seen, on_device or stand_ins, old, extra_args)
    step = StepCalls(wrapped, description, shardings, state)
    sent = moved(on_device, own[: len(on_device)], shardings[: len(on_device)])
    bound, origin = step.bind(sent)
    leaves = step.leaf_calls(
        moved(gradients, own, shardings),
        sent,
        moved(feedback, own[: len(feedback)], shardings[: len(feedback)]),
    )
    recalled: list[jax.Array] = []
    if program.recall is not None:
        assert program.recall.counter is not None, "smart_update recalls sums only"
        before, _ = program.prologue(*given, recalled=stand_ins)
        is_due = before[program.recall.counter] == 0
        recalled, bound = step.recall(program.recall.slots, leaves, is_due, bound)
        recalled = moved(recalled, shardings, own)
    new, inputs = program.prologue(*given, recalled=recalled)
    kept = LeafInputs((), ())
    inputs = [
        kept if g is None else one for g, one in zip(gradients, inputs, strict=True)
    ]
    if shardings != own:
        inputs = [
            _moved_inputs(one, a, b)
            for one, a, b in zip(inputs, own, shardings, strict=True)
        ]
    results = step.run(
        HostCall.of(
            [leaves[n] for n in group], [inputs[n] for n in group], state.step, bound
        )
        for group in step.groups(leaves)
    )
    arrays = moved([one.array for one in results], shardings, own)
    changes = [
        change(array, p, wrapped.update_dtype(g, p))
        for array, p, g in zip(
            arrays, on_device or [None] * len(arrays), gradients, strict=True
        )
    ]
    inexact = jnp.stack([difference for _, difference in changes])
    verdict = step.commit(results, inexact, new)
    left = [one.feedback for one in results][: len(feedback)]
    left = moved(left, shardings[: len(left)], own[: len(left)])
    return (
        treedef.unflatten([_applied(verdict, update) for update, _ in changes]),
        next_state(state, verdict, origin, [*old, *feedback], [*new, *left]),
    )


def _moved_inputs(
    inputs: LeafInputs, present: NamedSharding, wanted: NamedSharding
) -> LeafInputs:
    num = len(inputs.arrays)
    arrays = moved(inputs.arrays, [present] * num, [wanted] * num)
    return LeafInputs(inputs.scalars, tuple(arrays))


def _check_gradients(
    gradients: Sequence[jax.Array | None], description: StoreDescription
) -> None:
    """Refuses gradients of other shapes than the params'.

    Raises:
      ValueError: names the leaf.
    """
    for leaf, gradient in zip(description.leaves, gradients, strict=True):
        if gradient is not None and gradient.shape != leaf.shape:
            raise ValueError(
                f"update: leaf {leaf.name}: expected a gradient of the params' shape "
                f"{leaf.shape}, found {gradient.shape}"
            )


def _device_params(
    wrapped: Wrapped,
    known: PyTree,
    params: PyTree | None,
    extra_args: Mapping[str, Any],
) -> list[jax.Array]:
    """Returns the params' leaves; none if the optimizer does not need them.

    Raises:
      ValueError: params are missing but needed by optax or for 16-bit params.
    """
    if params is not None:
        return jax.tree.leaves(params)
    if any(leaf.dtype != jnp.float32 for leaf in jax.tree.leaves(known)):
        raise ValueError(
            "16-bit params must be given to update, tx.update(grads, state, "
            "params), because it returns the difference to them"
        )
    tx = wrapped.tx
    jax.eval_shape(lambda g: tx.update(g, tx.init(g), None, **extra_args), known)
    return []


def _applied(verdict: jax.Array, update: jax.Array | None) -> jax.Array | None:
    """Returns the update: zero for a skipped step, NaN after a failure."""
    if update is None:
        return None
    filler = jnp.where(verdict == FAILED, jnp.nan, 0.0).astype(update.dtype)
    return jnp.where(verdict == COMMITTED, update, filler)
