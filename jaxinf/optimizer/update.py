"""The transformation's `update`: one step of the store.

    prologue (jitted JAX): scalars ─┐
    gradient leaf ──────────────────┼─► host callback ─► CSD: read ► update ► write
    update u, or new 16-bit params ◄┘          all leaves ─► one commit

The calls have one of two forms, with the same bits. One that waits for its update would
keep an accelerator's later kernels from being enqueued. There it only takes the
gradient, and the result is fetched after the last gradient.

    at once, on CPUs:      gradient ─► update ───────────────────────────► result
    in two, elsewhere:     gradient ─► start ─► token ┐
                                                all tokens ─► finish ─► result

Invariant: the store advances by exactly one step for each update that is not refused;
  no leaf is updated before all params have been compared with the store, if they must
  be, and the step is committed after the last. The returned update is the value that
  was added to the master params. For 16-bit params it is the difference to those that
  are really on the JAX device, so that what one update does not reach, the next one
  does.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding
from jax.typing import DTypeLike

from jaxinf.compress import compress_leaf
from jaxinf.engine import (
    StoreDescription,
    bind_optimizer,
    carried_leaves,
    check_carried,
    replicas_differ,
    subgroups_of,
)
from jaxinf.layout import LeafGrid
from jaxinf.optimizer.callback import (
    FAILED,
    Host,
    HostCallback,
    call_once,
    call_together,
    shares_memory,
)
from jaxinf.optimizer.host_side import COMMITTED, UNBOUND
from jaxinf.optimizer.leaf_call import (
    GO,
    HOLD,
    HOLD_NON_FINITE,
    HostCall,
    LeafCall,
    LeafResult,
    first_elements,
    group_leaves,
    mesh_of,
    send,
    traced_shardings,
)
from jaxinf.optimizer.state import SmartUpdateState, check_state, in_jax, next_state
from jaxinf.optimizer.wrapped import OffloadedOptimizer, entering
from jaxinf.program import LeafInputs, StateSlot, key_data
from jaxinf.store import LeafRecord
from jaxinf.typing import FLOAT_DTYPES, PyTree

_Sent: TypeAlias = tuple[list[LeafResult], jax.Array]
"""The results of a call for each leaf, and the leaves' statuses."""


def run_update(
    wrapped: OffloadedOptimizer,
    updates: PyTree,
    state: SmartUpdateState,
    params: PyTree,
    extra_args: Mapping[str, Any],
    shardings: tuple[NamedSharding, ...],
    carry: PyTree,
) -> tuple[PyTree, SmartUpdateState]:
    """Does what `smart_update` says; traceable.

    Args:
      updates: a tree like the params, with None for a leaf that stays as it is.
      params: the params, all of them trained.
      shardings: of the params' leaves; empty for one JAX device.
    """
    named = list(carried_leaves(carry).items())
    updates, state, params, extra_args, named = entering(
        "update", (updates, state, params, dict(extra_args), named)
    )
    carried = dict(named)
    on_device, treedef = jax.tree.flatten(params)
    gradients = treedef.flatten_up_to(updates)
    shardings = shardings or traced_shardings(on_device)
    init, program = wrapped.trace(params, extra_args)
    description = wrapped.describe(init, program, shardings)
    _check(wrapped, description, shardings, state, gradients)
    path = wrapped.engine.path
    check_carried(path, carried, description.contents.state_names)
    old = jax.tree.leaves(in_jax(state))
    feedback = jax.tree.leaves(state.error_feedback)
    pairs = zip(gradients, on_device, strict=True)
    whole = [jnp.zeros_like(p) if g is None else g for g, p in pairs]
    prologue = partial(program.prologue, whole, on_device, old, extra_args)
    step = _StepCalls(wrapped, description, shardings, state)
    bound = step.bind(on_device)
    leaves = step.leaf_calls(gradients, on_device, feedback)
    sums: list[jax.Array] = []
    if (stored := program.prologue_state) is not None:
        assert stored.counter is not None, "smart_update reads sums only"
        before, _ = prologue(prologue_state=list(map(jnp.zeros_like, on_device)))
        is_due = before[stored.counter] == 0
        sums, bound = step.read_slots(stored.slots, leaves, is_due, bound)
    new, inputs = prologue(prologue_state=sums)
    unused = LeafInputs((), ())  # by a leaf without a gradient
    pairs = zip(gradients, inputs, strict=True)
    inputs = [unused if gradient is None else own for gradient, own in pairs]
    calls = [
        HostCall.of(
            [leaves[n] for n in group], [inputs[n] for n in group], state.step, bound
        )
        for group in group_leaves(leaves)
    ]
    results, statuses = step.run(calls)
    changes = [
        change(one.array, p, wrapped.update_dtype(g, p))
        for one, p, g in zip(results, on_device, gradients, strict=True)
    ]
    inexact = {n: own for n, (_, own) in enumerate(changes) if own is not None}
    # XLA schedules the calls in this order, that of the tree.
    order = [leaf.number for call in reversed(calls) for leaf in call.leaves]
    how = {"order": order, "measured": list(inexact), "paths": tuple(carried)}
    how["kept"] = [n for n, gradient in enumerate(gradients) if gradient is None]
    verdict = call_once(
        step.guarded(wrapped.host.commit, is_last=True, **how),
        mesh_of(shardings),
        (
            state.step,
            state.skipped_steps,
            statuses,
            jnp.array(list(inexact.values()), jnp.float32),
            [key_data(scalar) for scalar in new],
            list(carried.values()),
        ),
        jax.ShapeDtypeStruct((), np.int32),
    )
    left = [one.feedback for one in results][: len(feedback)]
    updates = treedef.unflatten(_applied(verdict, [update for update, _ in changes]))
    return updates, next_state(state, verdict, [*old, *feedback], [*new, *left])


@dataclass(frozen=True)
class _StepCalls:
    """The calls of one step; traceable.

    Attributes:
      shardings: the leaves' shardings; empty for one JAX device.
      state: the state at the beginning of the step.
    """

    wrapped: OffloadedOptimizer
    description: StoreDescription
    shardings: tuple[NamedSharding, ...]
    state: SmartUpdateState

    def leaf_calls(
        self,
        gradients: Sequence[jax.Array | None],
        params: Sequence[jax.Array],
        feedback: Sequence[jax.Array],
    ) -> list[LeafCall]:
        """Makes the call of each leaf, before any compression."""
        calls = []
        for number, (gradient, gate) in enumerate(
            zip(gradients, self._gates(gradients), strict=True)
        ):
            call = replace(
                self._named(number),
                gradient=gradient,
                is_kept=gradient is None,
                feedback=feedback[number] if feedback else None,
                gate=gate,
            )
            if gradient is not None:
                known = params[number]
                if self._hands_over(known):
                    call = replace(call, params=known)
                elif not self.shardings:
                    call = replace(call, probe=first_elements(known))
            calls.append(call)
        return calls

    def bind(self, params: Sequence[jax.Array]) -> jax.Array:
        """Compares params with the store, unless the state is the last step's.

        Then this is one call without arrays. No collective comes before the
        comparison has ended, which takes as long as to read all params.

        Returns:
          int32, ready when leaves may be updated.
        """
        host, mesh = self.wrapped.host, mesh_of(self.shardings)
        result = jax.ShapeDtypeStruct((), np.int32)
        must_bind = self.guarded(host.must_bind, waits=mesh is not None)
        found = call_together(must_bind, mesh, self.state.step, result)

        def compared() -> jax.Array:
            leaves = [replace(self._named(n), params=p) for n, p in enumerate(params)]
            statuses, compare = [found[None]], host.guarded(host.compare)
            for group in group_leaves(leaves):
                call = HostCall(tuple(leaves[n] for n in group))
                _, own = send(compare, call, [None] * len(group), shares=False)
                statuses.append(own)
            differing = [jnp.zeros(0, jnp.int32)]
            if mesh is not None and jax.process_count() > 1:
                pairs = zip(params, self.shardings, strict=True)
                differing += [replicas_differ(*p).astype(np.int32)[None] for p in pairs]
            bind = self.guarded(host.bind)
            given = jnp.concatenate(statuses), jnp.concatenate(differing)
            return call_together(bind, mesh, (self.state.step, *given), result)

        return lax.cond(found == UNBOUND, compared, lambda: found)

    def read_slots(
        self,
        slots: Sequence[StateSlot],
        leaves: Sequence[LeafCall],
        is_due: jax.Array,
        bound: jax.Array,
    ) -> tuple[list[jax.Array], jax.Array]:
        """Reads a slot of each leaf before any update, if it is due.

        Returns:
          The values, or zeros, and the int32 for which updates are to wait.
        """
        host = self.wrapped.host
        guarded = host.guarded(partial(host.read_slots, [slot.name for slot in slots]))

        def read() -> tuple[list[jax.Array], jax.Array]:
            found, statuses = dict[int, LeafResult](), [bound[None]]
            for group in group_leaves(leaves):
                names = tuple(self._named(n) for n in group)
                call = HostCall(names, step=self.state.step, after=bound)
                results, own = send(guarded, call, [slots[n].dtype for n in group])
                found |= dict(zip(group, results, strict=True))
                statuses.append(own)
            ordered = [found[number].array for number in range(len(leaves))]
            return ordered, jnp.max(jnp.concatenate(statuses))

        def skip() -> tuple[list[jax.Array], jax.Array]:
            return [
                jnp.zeros(leaf.shape, slot.dtype)
                if leaf.gradient is None
                else jnp.zeros_like(leaf.gradient, slot.dtype)
                for leaf, slot in zip(leaves, slots, strict=True)
            ], bound

        return lax.cond(is_due, read, skip)

    def run(self, calls: Sequence[HostCall]) -> tuple[list[LeafResult], jax.Array]:
        """Updates all leaves.

        Returns:
          Results in the order of the leaves; statuses of the last call first.
        """
        host, waits = self.wrapped.host, shares_memory()
        update = self.guarded(host.update if waits else host.start)
        found = [
            self._send_gradients(update, call, has_results=waits) for call in calls
        ]
        if not waits:
            found = self._fetch(calls, found)
        by_number = {
            leaf.number: result
            for call, (results, _) in zip(calls, found, strict=True)
            for leaf, result in zip(call.leaves, results, strict=True)
        }
        statuses = jnp.concatenate([own for _, own in reversed(found)])
        return [by_number[number] for number in range(len(by_number))], statuses

    def guarded(
        self, host: Any, *, is_last: bool = False, **options: Any
    ) -> HostCallback:
        """Wraps a host function that needs the description for a callback."""
        function: Host = partial(host, self.description, **options)
        return self.wrapped.host.guarded(function, is_last=is_last)

    # --- inside --------------------------------------------------------------------

    def _named(self, number: int) -> LeafCall:
        sharding = self.shardings[number] if self.shardings else None
        return LeafCall(number, self.description.leaves[number].record.shape, sharding)

    def _dtypes(self, call: HostCall) -> list[DTypeLike | None]:
        """Returns the dtype of each leaf's update; None for one that stays."""
        described = self.description.leaves
        return [
            None if leaf.is_kept else described[leaf.number].device_dtype
            for leaf in call.leaves
        ]

    def _send_gradients(
        self, host: HostCallback, call: HostCall, *, has_results: bool
    ) -> _Sent:
        """Sends one call; compressed, if that is on, after the warm-up steps."""
        # Keeps XLA from fusing the gradients' computation with the selection.
        gradients = [leaf.gradient for leaf in call.leaves]
        if jax.tree.leaves(gradients):
            gradients = lax.optimization_barrier(gradients)
        pairs = zip(call.leaves, gradients, strict=True)
        call = call._replace(leaves=tuple(replace(x, gradient=g) for x, g in pairs))
        dtypes = self._dtypes(call) if has_results else [None] * len(call.leaves)

        def dense() -> _Sent:
            # The old error feedback stays here.
            without = tuple(replace(leaf, feedback=None) for leaf in call.leaves)
            results, own = send(host, call._replace(leaves=without), dtypes)
            pairs = zip(results, call.leaves, strict=True)
            return [one._replace(feedback=leaf.feedback) for one, leaf in pairs], own

        def compressed() -> _Sent:
            return send(host, call, dtypes, self._compress)

        compression = self.wrapped.compression
        if compression is None:
            return dense()
        if not compression.warmup_steps:
            return compressed()
        is_early = self.state.step < compression.warmup_steps
        return lax.cond(is_early, dense, compressed)

    @cached_property
    def _records(self) -> tuple[LeafRecord, ...]:
        """The store's records of the leaves, also if the store is not made yet."""
        return subgroups_of(self.wrapped.engine, self.description).leaves

    def _compress(self, call: LeafCall) -> LeafCall:
        gradient, compression = call.gradient, self.wrapped.compression
        if gradient is None:
            return call
        assert compression is not None, "dense gradients are sent as they are"
        grid = LeafGrid(gradient.shape, self._records[call.number].chunk_shape)
        sent, left = compress_leaf(gradient, grid, compression, call.feedback)
        return replace(call, gradient=sent, feedback=left)

    def _fetch(
        self, calls: Sequence[HostCall], started: Sequence[_Sent]
    ) -> list[_Sent]:
        tokens = jnp.concatenate([own for _, own in started])
        host, found = self.wrapped.host.guarded(self.wrapped.host.finish), []
        for call, (sent, _) in zip(calls, started, strict=True):
            names = tuple(self._named(leaf.number) for leaf in call.leaves)
            fetch = HostCall(names, after=tokens)
            results, own = send(host, fetch, self._dtypes(call))
            pairs = zip(results, sent, strict=True)
            left = [new._replace(feedback=old.feedback) for new, old in pairs]
            found.append((left, own))
        return found

    def _gates(self, gradients: Sequence[jax.Array | None]) -> list[jax.Array | None]:
        """Returns whether each leaf may update; see `HostFunctions.waits_for_all`.

        The host cannot tell whether a compressed gradient is finite.
        """
        host = self.wrapped.host
        is_sparse = self.wrapped.compression is not None and host.checks_finite
        if not (host.waits_for_all or is_sparse):
            return [None] * len(gradients)
        finite = [
            jnp.bool_(True) if g is None else jnp.all(jnp.isfinite(g))
            for g in gradients
        ]
        all_finite = jnp.all(jnp.stack(finite)) if finite else True
        gates = [
            jnp.where(all_finite, GO, jnp.where(ok, HOLD, HOLD_NON_FINITE))
            if host.waits_for_all
            else jnp.where(ok, GO, HOLD_NON_FINITE)
            for ok in finite
        ]
        return [gate.astype(jnp.int32) for gate in gates]

    def _hands_over(self, params: jax.Array) -> bool:
        """Whether the params may equal the store's, and can be handed over for free."""
        is_free = shares_memory() and bool(self.shardings or jax.device_count() == 1)
        is_stored = params.dtype in (jnp.float32, jnp.bfloat16)
        has_cards = self.wrapped.engine.options.csd.has_cards
        return is_free and is_stored and not has_cards


def _check(
    wrapped: OffloadedOptimizer,
    description: StoreDescription,
    shardings: tuple[NamedSharding, ...],
    state: SmartUpdateState,
    gradients: Sequence[jax.Array | None],
) -> None:
    """Refuses a state, a store or gradients that do not fit the description."""
    num_feedback = len(gradients) if wrapped.has_feedback else 0
    check_state(state, description, num_feedback=num_feedback)
    records = [leaf.record for leaf in description.leaves]
    for leaf, gradient in zip(records, gradients, strict=True):
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
    if not wrapped.engine.is_new:  # refuses it while it is traced
        bind_optimizer(wrapped.engine, description)
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
      after it and `result`.
    """
    if result is None or result.dtype == jnp.float32:
        return result, None
    new, old = result.astype(jnp.float32), params.astype(jnp.float32)
    update = _rounded(new - old, dtype)
    reached = _rounded(old + update, result.dtype)
    is_same = (reached == new) | (jnp.isnan(reached) & jnp.isnan(new))
    gaps = jnp.where(is_same, 0.0, jnp.abs(reached - new))
    difference, most = jnp.max(gaps, initial=0.0), jnp.finfo(jnp.float32).max
    bound = jnp.where(jnp.isfinite(difference), difference, most)
    return update.astype(dtype), bound


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
