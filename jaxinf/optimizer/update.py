"""The transformation's `update`: one step of the store.

    prologue (jitted JAX): scalars ─┐
    gradient leaf ──────────────────┼─► host callback ─► CSD: read ► update ► write
    update u, or new 16-bit params ◄┘          all leaves ─► one commit

Invariant: the store advances by exactly one step for each update that is not refused;
  the returned update is the value that was added to the master params. For 16-bit
  params it is the difference to those that are really on the JAX device, so that what
  one update does not reach, the next one does.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding
from jax.typing import DTypeLike

from jaxinf.engine import StoreDescription, carried_leaves, check_carried
from jaxinf.optimizer.callback import FAILED
from jaxinf.optimizer.host_side import COMMITTED, EXACT
from jaxinf.optimizer.leaf_call import HostCall, grouped, traced_shardings
from jaxinf.optimizer.state import SmartUpdateState, check_state, in_jax, next_state
from jaxinf.optimizer.step_calls import StepCalls
from jaxinf.optimizer.wrapped import OffloadedOptimizer, entering
from jaxinf.program import LeafInputs
from jaxinf.typing import FLOAT_DTYPES, PyTree


def change(
    result: jax.Array | None, params: jax.Array, dtype: DTypeLike
) -> tuple[jax.Array | None, jax.Array | None]:
    """Returns the update for a host's result, and the difference that it leaves.

    There is no result, and no update, for a leaf that stays as it is. Float32 results
    are the update. For others no update may lead exactly from the old params to the
    new: in float32 only from a power of two to far below its last bit, or between
    denormals; in 16 bits also if an element loses more than half of its magnitude, or
    changes its sign. Then the updated params are one rounding of the update away from
    the store's, and the next step must not use them in place of those.

    Args:
      result: the new params of 16 bits, or the float32 update; or None.
      params: the params before the step.
      dtype: dtype of the update of 16-bit params.

    Returns:
      The update; and for 16 bits the greatest difference, float32, between the params
      after it and `result`, or `EXACT` if they are equal to the bit.
    """
    if result is None or result.dtype == jnp.float32:
        return result, None
    new, old = result.astype(jnp.float32), params.astype(jnp.float32)
    update = _rounded(new - old, dtype)
    reached = _rounded(old + update, result.dtype)
    bits = [
        lax.bitcast_convert_type(x.astype(result.dtype), jnp.uint16)
        for x in (reached, result)
    ]
    difference = jnp.max(jnp.abs(reached - new), initial=0.0)
    bound = jnp.where(jnp.isfinite(difference), difference, jnp.finfo(jnp.float32).max)
    differs = jnp.any(bits[0] != bits[1])
    return update.astype(dtype), jnp.where(differs, bound, EXACT)


def _rounded(value: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Rounds float32 to a dtype's numbers; XLA may drop a cast to it and back."""
    if dtype == jnp.float32:
        return value
    info = jnp.finfo(dtype)
    rounded = lax.reduce_precision(value, info.nexp, info.nmant)
    if dtype != jnp.float16:
        return rounded
    # reduce_precision flushes the denormals of float16, multiples of 2^-24.
    shift = jnp.float32(0.75)
    denormal = (value + shift) - shift
    return jnp.where(jnp.abs(value) < info.tiny, denormal, rounded)


def run_update(
    wrapped: OffloadedOptimizer,
    updates: PyTree,
    state: SmartUpdateState,
    params: PyTree,
    extra_args: Mapping[str, Any],
    shardings: tuple[NamedSharding, ...],
    carry: PyTree,
) -> tuple[PyTree, SmartUpdateState]:
    """See `smart_update`; traceable.

    Args:
      updates: a tree like the params, with None for a leaf that stays as it is.
      state: the state of `init`, or of the last step.
      params: the params, all of them trained.
      shardings: of the params' leaves; empty for one JAX device.
      carry: a tree of arrays that are committed with the step.
    """
    named = list(carried_leaves(carry).items())
    updates, state, params, extra_args, named = entering(
        "update", (updates, state, params, dict(extra_args), named)
    )
    carried = dict(named)
    on_device, treedef = jax.tree.flatten(params)
    gradients = treedef.flatten_up_to(updates)
    if not shardings:
        shardings = traced_shardings(on_device)
    init, program = wrapped.trace(params, extra_args)
    description = wrapped.describe(init, program, shardings)
    _check(wrapped, description, shardings, state, gradients)
    names = {state.name for leaf in description.leaves for state in leaf.states}
    check_carried(wrapped.engine, carried, names)
    old = jax.tree.leaves(in_jax(state))
    feedback = jax.tree.leaves(state.error_feedback)
    prologue = partial(
        program.prologue,
        _or_zeros(gradients, description),
        on_device,
        old,
        extra_args,
    )
    step = StepCalls(wrapped, description, shardings, state)
    bound = step.bind(on_device)
    leaves = step.leaf_calls(gradients, on_device, feedback)
    recalled: list[jax.Array] = []
    if program.recall is not None:
        assert program.recall.counter is not None, "smart_update recalls sums only"
        before, _ = prologue(recalled=_or_zeros([None] * len(leaves), description))
        is_due = before[program.recall.counter] == 0
        recalled, bound = step.recall(program.recall.slots, leaves, is_due, bound)
    new, inputs = prologue(recalled=recalled)
    unused = LeafInputs((), ())  # by a leaf without a gradient
    pairs = zip(gradients, inputs, strict=True)
    inputs = [unused if gradient is None else own for gradient, own in pairs]
    calls = [
        HostCall.of(
            [leaves[n] for n in group], [inputs[n] for n in group], state.step, bound
        )
        for group in grouped(leaves)
    ]
    results, statuses = step.run(calls)
    changes = [
        change(one.array, p, wrapped.update_dtype(g, p))
        for one, p, g in zip(results, on_device, gradients, strict=True)
    ]
    verdict = step.commit(
        calls,
        statuses,
        {n: own for n, (_, own) in enumerate(changes) if own is not None},
        new,
        carried=carried,
    )
    left = [one.feedback for one in results][: len(feedback)]
    updates = treedef.unflatten(_applied(verdict, [update for update, _ in changes]))
    return updates, next_state(state, verdict, [*old, *feedback], [*new, *left])


def _or_zeros(
    arrays: Sequence[jax.Array | None], description: StoreDescription
) -> list[jax.Array]:
    return [
        jnp.zeros(leaf.shape, leaf.device_dtype) if array is None else array
        for array, leaf in zip(arrays, description.leaves, strict=True)
    ]


def _check(
    wrapped: OffloadedOptimizer,
    description: StoreDescription,
    shardings: tuple[NamedSharding, ...],
    state: SmartUpdateState,
    gradients: Sequence[jax.Array | None],
) -> None:
    """Refuses a state, a store or gradients that do not fit the description.

    Raises:
      ValueError: a gradient has another shape than its params; names the leaf.
      TypeError: a gradient has 64 bits, or is no floating-point array; the same.
      JaxinfError: as `check_state`, or the store is another optimizer's.
    """
    num_feedback = len(gradients) if wrapped.has_feedback else 0
    check_state(state, description, num_feedback=num_feedback)
    for leaf, gradient in zip(description.leaves, gradients, strict=True):
        if gradient is not None and gradient.dtype not in FLOAT_DTYPES:
            raise TypeError(
                f"update: leaf {leaf.name}: expected a gradient of 32 or 16 bits, "
                f"found {gradient.dtype}; cast gradients to the params' dtypes, "
                "jax.tree.map(lambda g, p: g.astype(p.dtype), grads, params)"
            )
        if gradient is not None and gradient.shape != leaf.shape:
            raise ValueError(
                f"update: leaf {leaf.name}: expected a gradient of the params' shape "
                f"{leaf.shape}, found {gradient.shape}"
            )
    if wrapped.engine.commit is not None:  # refuses it while it is traced
        wrapped.engine.bind(description)
        wrapped.check_shards(description, shardings)


def _applied(
    verdict: jax.Array, updates: Sequence[jax.Array | None]
) -> list[jax.Array | None]:
    """Returns the updates: zero for a skipped step, NaN after a failure."""
    is_committed = verdict == COMMITTED
    filler = jnp.where(verdict == FAILED, jnp.nan, 0.0)
    return [
        None if u is None else jnp.where(is_committed, u, filler.astype(u.dtype))
        for u in updates
    ]
