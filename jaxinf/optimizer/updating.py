"""The transformation's `update`: one step of the store.

    prologue (jitted JAX): scalars ─┐
    gradient leaf ──────────────────┼─► host callback ─► CSD: read ► update ► write
    update u, or new 16-bit params ◄┘          all leaves ─► one commit

A leaf's call has one of two forms, with the same bits:

    at once, on CPUs:      gradient ─► update ───────────────────────────► result
    in two, elsewhere:     gradient ─► start ─► token ┐
                                                all tokens ─► finish ─► result

A call that waits for its update would keep an accelerator's later kernels from being
enqueued: there it only takes the gradient, and what comes of it is fetched when the
last gradient is gone.

Invariant: the store advances by exactly one step for each update that is not refused;
the update returned is the very value that was added to the master params.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding

from jaxinf.engine import StoreDescription
from jaxinf.optimizer.callback import (
    FAILED,
    Host,
    call_once,
    shares_memory,
    waits_for_updates,
)
from jaxinf.optimizer.compressing import compressor
from jaxinf.optimizer.host_side import COMMITTED
from jaxinf.optimizer.leaf_call import (
    GO,
    HOLD,
    HOLD_NON_FINITE,
    Compress,
    HostCall,
    LeafCall,
    LeafResult,
    first_elements,
    leaf_call,
    send,
)
from jaxinf.optimizer.sharding import mesh_of
from jaxinf.optimizer.state import SmartUpdateState, check_state, next_state, raw
from jaxinf.optimizer.wrapped import Wrapped
from jaxinf.typing import PyTree

__all__ = ["run_update"]


def run_update(
    wrapped: Wrapped,
    updates: PyTree,
    state: SmartUpdateState,
    params: PyTree | None,
    extra_args: Mapping[str, Any],
    shardings: tuple[NamedSharding, ...],
) -> tuple[PyTree, SmartUpdateState]:
    """See `smart_update`; traceable."""
    gradients, treedef = jax.tree.flatten(updates)
    known = updates if params is None else params
    init, program = wrapped.trace(known, extra_args)
    description = wrapped.describe(init, program, shardings)
    old = jax.tree.leaves(state.optimizer)
    feedback = jax.tree.leaves(state.error_feedback)
    num_feedback = len(gradients) if wrapped.has_feedback else 0
    check_state(state, description, num_feedback=num_feedback)
    on_device = _device_params(wrapped, updates, params, extra_args)
    stand_ins = [jnp.zeros(g.shape, g.dtype) for g in gradients]
    new, inputs = program.prologue(gradients, on_device or stand_ins, old, extra_args)
    step = _Step(wrapped, description, shardings, state)
    calls = [
        HostCall.of([leaf], [own], state.step)
        for leaf, own in zip(
            step.leaf_calls(gradients, on_device, feedback), inputs, strict=True
        )
    ]
    results = step.run(calls)
    changes = [
        _change(one.array, p)
        for one, p in zip(results, on_device or [None] * len(results), strict=True)
    ]
    inexact = jnp.stack([flag for _, flag in changes])
    verdict = step.commit(results, inexact, new)
    left = [one.feedback for one in results][: len(feedback)]
    return (
        jax.tree.unflatten(treedef, [_applied(verdict, u) for u, _ in changes]),
        next_state(state, verdict, [*old, *feedback], [*new, *left]),
    )


class _Step:
    """The calls of the host that make a step."""

    def __init__(
        self,
        wrapped: Wrapped,
        description: StoreDescription,
        shardings: tuple[NamedSharding, ...],
        state: SmartUpdateState,
    ) -> None:
        self._wrapped = wrapped
        self._host = wrapped.host
        self._description = description
        self._shardings = shardings
        self._mesh = mesh_of(shardings)
        self._state = state

    def leaf_calls(
        self,
        gradients: Sequence[jax.Array],
        params: Sequence[jax.Array],
        feedback: Sequence[jax.Array],
    ) -> list[LeafCall]:
        """What the host is told of each leaf, before any compression.

        Args:
          gradients: the leaves.
          params: likewise, or empty where they are not at hand.
          feedback: what was left out before, or empty.
        """
        calls = []
        for number, (gradient, gate) in enumerate(
            zip(gradients, self._gates(gradients), strict=True)
        ):
            call = leaf_call(
                number,
                gradient.ndim,
                *self._shardings[number : number + 1],
                gradient=gradient,
                feedback=feedback[number] if feedback else None,
                gate=gate,
            )
            known = params[number] if params else None
            if known is not None and self._gives(known):
                call = replace(call, params=known)
            elif known is not None and self._mesh is None:
                call = replace(call, probe=first_elements(known))
            calls.append(call)
        return calls

    def run(self, calls: Sequence[HostCall]) -> list[LeafResult]:
        """Updates; results in the order of the leaves."""
        waits = waits_for_updates()
        host = self._host.update if waits else self._host.start
        found = [
            self._send(partial(host, self._description), call, has_results=waits)
            for call in calls
        ]
        if not waits and calls:
            found = self._fetch(calls, found)
        numbered = [
            (leaf.number, result)
            for call, results in zip(calls, found, strict=True)
            for leaf, result in zip(call.leaves, results, strict=True)
        ]
        return [result for _, result in sorted(numbered, key=lambda pair: pair[0])]

    def commit(
        self,
        results: Sequence[LeafResult],
        inexact: jax.Array,
        scalars: Sequence[jax.Array],
    ) -> jax.Array:
        """Ends the step; int32: committed, skipped or failed."""
        state = self._state
        statuses = jnp.stack([result.status for result in results])
        return call_once(
            self._guarded(partial(self._host.commit, self._description)),
            self._mesh,
            (
                state.step,
                state.skipped_steps,
                statuses,
                inexact,
                [raw(scalar) for scalar in scalars],
            ),
            jax.ShapeDtypeStruct((), np.int32),
        )

    # --- inside --------------------------------------------------------------------

    def _send(
        self, host: Host, call: HostCall, *, has_results: bool
    ) -> list[LeafResult]:
        """One call, compressed if it is to be, from some step on."""
        compression = self._wrapped.compression
        if compression is None:
            return self._send_as(host, call, None, has_results=has_results)
        # What makes a gradient is not computed together with what selects from it.
        leaves = tuple(
            replace(leaf, gradient=lax.optimization_barrier(leaf.gradient))
            for leaf in call.leaves
        )
        call = call._replace(leaves=leaves)
        numbers = [leaf.number for leaf in leaves]
        chunk_shapes = {
            n: self._host.grid(self._description, n).chunk_shape for n in numbers
        }
        compress = compressor(compression, chunk_shapes)
        if not compression.warmup_steps:
            return self._send_as(host, call, compress, has_results=has_results)
        return lax.cond(
            self._state.step < compression.warmup_steps,
            lambda: self._send_as(host, call, None, has_results=has_results),
            lambda: self._send_as(host, call, compress, has_results=has_results),
        )

    def _send_as(
        self,
        host: Host,
        call: HostCall,
        compress: Compress | None,
        *,
        has_results: bool,
    ) -> list[LeafResult]:
        leaves = call.leaves
        avals = self._results(call) if has_results else [None] * len(leaves)
        sent = call
        if compress is None:  # what was left out before stays here
            dense = tuple(replace(leaf, feedback=None) for leaf in leaves)
            sent = call._replace(leaves=dense)
        results = send(
            self._guarded(host), sent, avals, self._shardings_of(call), compress
        )
        if compress is not None:
            return results
        pairs = zip(results, leaves, strict=True)
        return [result._replace(feedback=leaf.feedback) for result, leaf in pairs]

    def _fetch(
        self, calls: Sequence[HostCall], started: Sequence[Sequence[LeafResult]]
    ) -> list[list[LeafResult]]:
        """The results of updates that were started, when all of them are."""
        tokens = jnp.stack([leaf.status for results in started for leaf in results])
        host, found = self._guarded(self._host.finish), []
        for call, kept in zip(calls, started, strict=True):
            names = [LeafCall(leaf.number, leaf.split) for leaf in call.leaves]
            results = send(
                host,
                HostCall(tuple(names), after=tokens),
                self._results(call),
                self._shardings_of(call),
            )
            pairs = zip(results, kept, strict=True)
            found.append([new._replace(feedback=old.feedback) for new, old in pairs])
        return found

    def _results(self, call: HostCall) -> list[jax.ShapeDtypeStruct]:
        described = [self._description.leaves[leaf.number] for leaf in call.leaves]
        return [jax.ShapeDtypeStruct(d.shape, d.device_dtype) for d in described]

    def _shardings_of(self, call: HostCall) -> list[NamedSharding]:
        if not self._shardings:
            return []
        return [self._shardings[leaf.number] for leaf in call.leaves]

    def _gates(self, gradients: Sequence[jax.Array]) -> list[jax.Array | None]:
        """For each leaf, whether its update may go on: see `HostSide.looks_ahead`.

        Of a gradient that is sent in part the host could not tell if it is finite.
        """
        is_sparse = self._wrapped.compression is not None and self._host.checks_finite
        if not (self._host.looks_ahead or is_sparse):
            return [None] * len(gradients)
        finite = [jnp.all(jnp.isfinite(g)) for g in gradients]
        if not self._host.looks_ahead:
            return [
                jnp.where(ok, GO, HOLD_NON_FINITE).astype(jnp.int32) for ok in finite
            ]
        all_finite = jnp.all(jnp.stack(finite)) if finite else True
        return [
            jnp.where(all_finite, GO, jnp.where(ok, HOLD, HOLD_NON_FINITE)).astype(
                jnp.int32
            )
            for ok in finite
        ]

    def _gives(self, params: jax.Array) -> bool:
        """Whether the store may have the same bits, and it costs nothing."""
        is_free = shares_memory(is_local=self._mesh is not None)
        is_stored = params.dtype in (jnp.float32, jnp.bfloat16)
        return is_free and self._host.takes_params and is_stored

    def _guarded(self, host: Host) -> Host:
        return self._host.guarded(host, may_raise=self._mesh is None)


def _device_params(
    wrapped: Wrapped,
    updates: PyTree,
    params: PyTree | None,
    extra_args: Mapping[str, Any],
) -> list[jax.Array]:
    """The params' leaves; none, where the optimizer can do without.

    Raises:
      ValueError: optax's own, where it cannot; ours for 16-bit params.
    """
    if params is not None:
        return jax.tree.leaves(params)
    if any(leaf.dtype != jnp.float32 for leaf in jax.tree.leaves(updates)):
        raise ValueError(
            "16-bit params must be given to update, tx.update(grads, state, "
            "params): what it returns is the difference to them"
        )
    tx = wrapped.tx
    jax.eval_shape(lambda g: tx.update(g, tx.init(g), None, **extra_args), updates)
    return []


def _change(result: jax.Array, params: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """The fp32 update that a host's result means, and whether it is inexact.

    For 16-bit params it is the difference to the new ones. In rare cases no float32
    number leads from the old to the new (from a power of two to far below its last bit,
    or between denormals): then the params that the update makes are one rounding away
    from those of the store, whose next step must not take them for its own.
    """
    if result.dtype == jnp.float32:
        return result, jnp.bool_(False)
    assert params is not None
    change = result.astype(jnp.float32) - params.astype(jnp.float32)
    reached = (params + change).astype(result.dtype)
    bits = [lax.bitcast_convert_type(x, jnp.uint16) for x in (reached, result)]
    return change, jnp.any(bits[0] != bits[1])


def _applied(verdict: jax.Array, update: jax.Array) -> jax.Array:
    """The update of a committed step, zero for a skipped one, NaN after a failure."""
    filler = jnp.where(verdict == FAILED, jnp.nan, 0.0).astype(update.dtype)
    return jnp.where(verdict == COMMITTED, update, filler)
