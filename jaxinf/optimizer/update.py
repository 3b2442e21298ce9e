"""The transformation's `update`: one step of the store.

The calls have one of two forms, with the same bits. A call that waits for its update
would keep an accelerator's later kernels from being enqueued. There it only takes the
gradient, and another call fetches the result after the last gradient.

    at once, on CPUs:      gradient ─► update ───────────────────────────► result
    in two, elsewhere:     gradient ─► start ─► token ┐
                                                all tokens ─► finish ─► result

Invariant: the store advances by exactly one step for each update that is not refused;
no leaf is updated before all params have been compared with the store, if they must be,
and the step is committed after the last. The returned update is the value that was
added to the master params. For 16-bit params it is the difference to the params that
are really on the JAX device, so that what one update does not reach, the next one does.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

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
    HostCallback,
    call_once,
    call_together,
    shares_memory,
)
from jaxinf.optimizer.host_side import COMMITTED, NOT_COMPARED, Comparison, StepEnd
from jaxinf.optimizer.leaf_call import (
    GO,
    HOLD,
    HOLD_NON_FINITE,
    HostCall,
    HostResult,
    LeafCall,
    SentCall,
    first_elements,
    group_leaves,
    mesh_of,
    send_call,
    send_leaves,
    traced_shardings,
)
from jaxinf.optimizer.offloaded import OffloadedOptimizer, guard_arrays
from jaxinf.optimizer.state import (
    SmartUpdateState,
    check_state,
    next_state,
    scalar_tree,
)
from jaxinf.program import LeafInputs, StateSlot, UpdateProgram, key_data
from jaxinf.store import LeafRecord
from jaxinf.typing import FLOAT_DTYPES, PyTree


class UpdateArguments(NamedTuple):
    """The arguments of an update, gradients and params lined up by `align`."""

    gradients: PyTree
    state: SmartUpdateState
    params: PyTree
    extra_args: Mapping[str, Any]
    carry: PyTree


def run_update(
    optimizer: OffloadedOptimizer,
    arguments: UpdateArguments,
    shardings: tuple[NamedSharding, ...],
) -> tuple[PyTree, SmartUpdateState]:
    """Does what `smart_update` says; traceable. `shardings` are empty if unknown."""
    carry = carried_leaves(arguments.carry)
    arguments = guard_arrays("update", arguments._replace(carry=[*carry.values()]))
    carry = dict(zip(carry, arguments.carry, strict=True))
    params, treedef = jax.tree.flatten(arguments.params)
    gradients = treedef.flatten_up_to(arguments.gradients)
    state, extra_args = arguments.state, arguments.extra_args
    shardings = shardings or traced_shardings(params)
    _, program, description = optimizer.trace(arguments.params, extra_args, shardings)
    step = _StepCalls(optimizer, program, description, shardings, state)
    step.check(gradients, carry)
    ready = step.compare_params(params)
    leaves = step.leaf_calls(gradients, params)
    scalars, inputs, ready = step.run_prologue(leaves, params, extra_args, ready)
    calls = [
        HostCall.of(
            [leaves[n] for n in group], [inputs[n] for n in group], state.step, ready
        )
        for group in group_leaves(leaves)
    ]
    result, feedback = step.update(calls)
    changes = [
        compute_update(array, p, optimizer.update_dtype(g, p))
        for array, p, g in zip(result.arrays, params, gradients, strict=True)
    ]
    updates, differences = zip(*changes, strict=True)
    verdict = step.commit(calls, result.statuses, differences, scalars, carry)
    updates = treedef.unflatten(_mask_updates(verdict, updates))
    feedback = feedback if optimizer.has_feedback else []
    return updates, next_state(state, verdict, scalars=scalars, feedback=feedback)


@dataclass(frozen=True)
class _StepCalls:
    """The calls of one step, which begins with `state`; traceable."""

    optimizer: OffloadedOptimizer
    program: UpdateProgram
    description: StoreDescription
    shardings: tuple[NamedSharding, ...]
    state: SmartUpdateState

    # --- in the order of a step ----------------------------------------------------

    def check(
        self,
        gradients: Sequence[jax.Array | None],
        carry: Mapping[tuple[str, ...], jax.Array],
    ) -> None:
        """Refuses a state, a store or arrays that do not fit the description."""
        engine, has_feedback = self.optimizer.engine, self.optimizer.has_feedback
        num_feedback = len(gradients) if has_feedback else 0
        check_state(self.state, self.description, num_feedback=num_feedback)
        records = [leaf.record for leaf in self.description.leaves]
        for leaf, gradient in zip(records, gradients, strict=True):
            if gradient is not None and gradient.dtype not in FLOAT_DTYPES:
                raise TypeError(
                    f"update: leaf {leaf.name}: expected a gradient of 32 or 16 bits, "
                    f"found {gradient.dtype}; cast gradients to the params' dtypes, "
                    "jax.tree.map(lambda g, p: g.astype(p.dtype), grads, params)"
                )
            if gradient is not None and gradient.shape != leaf.shape:
                raise ValueError(
                    f"update: leaf {leaf.name}: expected a gradient of the params' "
                    f"shape {leaf.shape}, found {gradient.shape}"
                )
        if not engine.is_new:  # refuses it while it is traced
            bind_optimizer(engine, self.description)
            self.optimizer.check_shards(self.description, self.shardings)
        check_carried(engine.path, carry, self.description.contents.state_names)

    def compare_params(self, params: Sequence[jax.Array]) -> jax.Array:
        """Compares params with the store, unless the state is the last step's.

        Then this is one call without arrays. No collective comes before the
        comparison has ended, which takes as long as to read all params. Returns an
        int32 that is ready when leaves may be updated.
        """
        host, mesh = self.optimizer.host, mesh_of(self.shardings)
        verdict = jax.ShapeDtypeStruct((), np.int32)
        waits = mesh is not None
        must_compare = host.guarded(host.must_compare, self.description, waits=waits)
        status = call_together(must_compare, self.state.step, verdict, mesh)

        def compare() -> jax.Array:
            leaves = [replace(self._leaf(n), params=p) for n, p in enumerate(params)]
            guarded, dtypes = host.guarded(host.compare), [None] * len(leaves)
            _, statuses = send_leaves(guarded, leaves, dtypes, shares=False)
            statuses = jnp.concatenate([status[None], *statuses])
            differing = [jnp.zeros(0, jnp.int32)]
            if mesh is not None and jax.process_count() > 1:
                pairs = zip(params, self.shardings, strict=True)
                differing += [replicas_differ(*p).astype(np.int32)[None] for p in pairs]
            differing = jnp.concatenate(differing)
            comparison = Comparison(self.state.step, statuses, differing)
            accept = host.guarded(host.accept_params, self.description)
            return call_together(accept, comparison, verdict, mesh)

        return lax.cond(status == NOT_COMPARED, compare, lambda: status)

    def leaf_calls(
        self, gradients: Sequence[jax.Array | None], params: Sequence[jax.Array]
    ) -> list[LeafCall]:
        """Makes the call of each leaf, before any compression."""
        feedback = jax.tree.leaves(self.state.error_feedback)
        calls = []
        for number, (gradient, gate) in enumerate(
            zip(gradients, self._gates(gradients), strict=True)
        ):
            call = replace(
                self._leaf(number),
                gradient=gradient,
                is_kept=gradient is None,
                feedback=feedback[number] if feedback else None,
                gate=gate,
            )
            if gradient is not None:
                if self._hands_over(params[number]):
                    call = replace(call, params=params[number])
                elif not self.shardings:
                    call = replace(call, probe=first_elements(params[number]))
            calls.append(call)
        return calls

    def run_prologue(
        self,
        leaves: Sequence[LeafCall],
        params: Sequence[jax.Array],
        extra_args: Mapping[str, Any],
        ready: jax.Array,
    ) -> tuple[list[jax.Array], list[LeafInputs], jax.Array]:
        """Computes the prologue, after the slots that it needs are read.

        Returns the new scalar state, the kernels' inputs, and the int32 for which
        updates are to wait.
        """
        pairs = zip(leaves, params, strict=True)
        gradients = [jnp.zeros_like(p) if x.is_kept else x.gradient for x, p in pairs]
        scalars = jax.tree.leaves(scalar_tree(self.state))
        prologue = partial(
            self.program.prologue, gradients, params, scalars, extra_args
        )
        arrays: list[jax.Array] = []
        if (stored := self.program.prologue_state) is not None:
            assert stored.counter is not None, "smart_update reads sums only"
            new_scalars, _ = prologue(slots=list(map(jnp.zeros_like, params)))
            is_due = new_scalars[stored.counter] == 0
            slots = [slot for _, slot in stored.slots]
            arrays, ready = self._read_slots(slots, leaves, is_due, ready)
        new_scalars, inputs = prologue(slots=arrays)
        pairs = zip(leaves, inputs, strict=True)
        inputs = [LeafInputs() if leaf.is_kept else own for leaf, own in pairs]
        return new_scalars, inputs, ready

    def update(self, calls: Sequence[HostCall]) -> SentCall:
        """Updates all leaves; gives results in their order, the last statuses first."""
        host, waits = self.optimizer.host, shares_memory()
        function = host.update if waits else host.start
        update = host.guarded(function, self.description)
        sent = [self._send_gradients(update, call, has_results=waits) for call in calls]
        if not waits:
            sent = self._fetch(calls, sent)
        by_number = {
            leaf.number: pair
            for call, (result, feedback) in zip(calls, sent, strict=True)
            for leaf, *pair in zip(call.leaves, result.arrays, feedback, strict=True)
        }
        statuses = jnp.concatenate([result.statuses for result, _ in reversed(sent)])
        pairs = [by_number[number] for number in range(len(by_number))]
        arrays = tuple(array for array, _ in pairs)
        return HostResult(arrays, statuses), [feedback for _, feedback in pairs]

    def commit(
        self,
        calls: Sequence[HostCall],
        statuses: jax.Array,
        differences: Sequence[jax.Array | None],
        scalars: Sequence[jax.Array],
        carry: Mapping[tuple[str, ...], jax.Array],
    ) -> jax.Array:
        """Ends the step when all leaves are updated; returns the verdict.

        Args:
          statuses: The result of `update`.
          differences: By leaf, the second result of `compute_update`.
        """
        # XLA schedules the calls in this order, that of the tree.
        leaves = [leaf for call in reversed(calls) for leaf in call.leaves]
        measured = {n: x for n, x in enumerate(differences) if x is not None}
        host = self.optimizer.host
        commit = host.guarded(
            host.commit,
            self.description,
            is_last=True,
            order=[leaf.number for leaf in leaves],
            measured=list(measured),
            kept=sorted(leaf.number for leaf in leaves if leaf.is_kept),
            paths=tuple(carry),
        )
        end = StepEnd(
            self.state.step,
            self.state.skipped_steps,
            statuses,
            jnp.array(list(measured.values()), jnp.float32),
            [key_data(scalar) for scalar in scalars],
            list(carry.values()),
        )
        verdict = jax.ShapeDtypeStruct((), np.int32)
        return call_once(commit, end, verdict, mesh_of(self.shardings))

    def _leaf(self, number: int) -> LeafCall:
        sharding = self.shardings[number] if self.shardings else None
        return LeafCall(number, self.description.leaves[number].record.shape, sharding)

    def _dtypes(self, call: HostCall) -> list[DTypeLike | None]:
        """Returns the dtype of each leaf's update; None for one that stays."""
        described = self.description.leaves
        return [
            None if leaf.is_kept else described[leaf.number].device_dtype
            for leaf in call.leaves
        ]

    def _read_slots(
        self,
        slots: Sequence[StateSlot],
        leaves: Sequence[LeafCall],
        is_due: jax.Array,
        ready: jax.Array,
    ) -> tuple[list[jax.Array], jax.Array]:
        """Reads a slot of each leaf if that is due, else gives zeros."""
        host = self.optimizer.host
        guarded = host.guarded(host.read_slots, [slot.name for slot in slots])

        def read() -> tuple[list[jax.Array], jax.Array]:
            bare = [self._leaf(number) for number in range(len(leaves))]
            dtypes, step = [slot.dtype for slot in slots], self.state.step
            arrays, statuses = send_leaves(
                guarded, bare, dtypes, step=step, after=ready
            )
            return arrays, jnp.max(jnp.concatenate([ready[None], *statuses]))

        def skip() -> tuple[list[jax.Array], jax.Array]:
            return [
                jnp.zeros(leaf.shape, slot.dtype)
                if leaf.gradient is None
                else jnp.zeros_like(leaf.gradient, slot.dtype)
                for leaf, slot in zip(leaves, slots, strict=True)
            ], ready

        return lax.cond(is_due, read, skip)

    def _send_gradients(
        self, host: HostCallback, call: HostCall, *, has_results: bool
    ) -> SentCall:
        """Sends one call; compressed, if that is on, after the warm-up steps."""
        # Keeps XLA from fusing the gradients' computation with the selection.
        gradients = [leaf.gradient for leaf in call.leaves]
        if jax.tree.leaves(gradients):
            gradients = lax.optimization_barrier(gradients)
        pairs = zip(call.leaves, gradients, strict=True)
        call = call._replace(leaves=tuple(replace(x, gradient=g) for x, g in pairs))
        dtypes = self._dtypes(call) if has_results else [None] * len(call.leaves)

        def send_dense() -> SentCall:
            # The old error feedback stays here.
            dense = tuple(replace(leaf, feedback=None) for leaf in call.leaves)
            result, _ = send_call(host, call._replace(leaves=dense), dtypes)
            return result, [leaf.feedback for leaf in call.leaves]

        def send_compressed() -> SentCall:
            return send_call(host, call, dtypes, self._compress)

        compression = self.optimizer.compression
        if compression is None:
            return send_dense()
        if not compression.warmup_steps:
            return send_compressed()
        is_early = self.state.step < compression.warmup_steps
        return lax.cond(is_early, send_dense, send_compressed)

    @cached_property
    def _records(self) -> tuple[LeafRecord, ...]:
        """The store's records of the leaves, also if the store is not made yet."""
        return subgroups_of(self.optimizer.engine, self.description).leaves

    def _compress(self, call: LeafCall) -> LeafCall:
        gradient, compression = call.gradient, self.optimizer.compression
        if gradient is None:
            return call
        assert compression is not None, "dense gradients are sent as they are"
        grid = LeafGrid(gradient.shape, self._records[call.number].chunk_shape)
        sent, feedback = compress_leaf(gradient, grid, compression, call.feedback)
        return replace(call, gradient=sent, feedback=feedback)

    def _fetch(
        self, calls: Sequence[HostCall], started: Sequence[SentCall]
    ) -> list[SentCall]:
        host = self.optimizer.host
        tokens = jnp.concatenate([result.statuses for result, _ in started])
        guarded, fetched = host.guarded(host.finish), []
        for call, (_, feedback) in zip(calls, started, strict=True):
            bare = tuple(self._leaf(leaf.number) for leaf in call.leaves)
            fetch = HostCall(bare, after=tokens)
            result, _ = send_call(guarded, fetch, self._dtypes(call))
            fetched.append((result, feedback))
        return fetched

    def _gates(self, gradients: Sequence[jax.Array | None]) -> list[jax.Array | None]:
        """Returns whether each leaf may update; see `HostFunctions.waits_for_all`.

        The host cannot tell whether a compressed gradient is finite.
        """
        host = self.optimizer.host
        is_sparse = self.optimizer.compression is not None and host.checks_finite
        if not (host.waits_for_all or is_sparse):
            return [None] * len(gradients)
        finite = [
            jnp.bool_(True) if g is None else jnp.all(jnp.isfinite(g))
            for g in gradients
        ]
        all_finite = jnp.all(jnp.stack(finite)) if finite else True
        gates = [
            jnp.where(all_finite, GO, jnp.where(is_finite, HOLD, HOLD_NON_FINITE))
            if host.waits_for_all
            else jnp.where(is_finite, GO, HOLD_NON_FINITE)
            for is_finite in finite
        ]
        return [gate.astype(jnp.int32) for gate in gates]

    def _hands_over(self, params: jax.Array) -> bool:
        """Whether the params may equal the store's, and can be handed over for free."""
        is_free = shares_memory() and bool(self.shardings or jax.device_count() == 1)
        is_stored = params.dtype in (jnp.float32, jnp.bfloat16)
        has_cards = self.optimizer.engine.options.csd.has_cards
        return is_free and is_stored and not has_cards


def _mask_updates(
    verdict: jax.Array, updates: Sequence[jax.Array | None]
) -> list[jax.Array | None]:
    """Returns the updates: zero for a skipped step, NaN after a failure."""
    is_committed = verdict == COMMITTED
    filler = jnp.where(verdict == FAILED, jnp.nan, 0.0)
    return [
        None if u is None else jnp.where(is_committed, u, filler.astype(u.dtype))
        for u in updates
    ]


def compute_update(
    result: jax.Array | None, params: jax.Array, dtype: DTypeLike
) -> tuple[jax.Array | None, jax.Array | None]:
    """Returns the update for a host's result, and the difference that it leaves.

    A float32 result is the update. For 16-bit params no update may lead exactly from
    the old params to the new: in float32 only from a power of two to far below its last
    bit, or between denormals; in 16 bits also if an element loses more than half of its
    magnitude, or changes its sign. Then the updated params are one rounding of the
    update away from the store's, and the next step must not use them in place of those.

    Args:
      result: The new params of 16 bits, or the float32 update; None for a leaf that
        stays as it is.
      dtype: Dtype of the update of 16-bit params.

    Returns:
      The update, None without a result; and for 16 bits the greatest difference,
      float32, between the params after it and `result`.
    """
    if result is None or result.dtype == jnp.float32:
        return result, None
    new, old = result.astype(jnp.float32), params.astype(jnp.float32)
    update = _rounded(new - old, dtype)
    reached = _rounded(old + update, result.dtype)
    is_same = (reached == new) | (jnp.isnan(reached) & jnp.isnan(new))
    gaps = jnp.where(is_same, 0.0, jnp.abs(reached - new))
    difference, limit = jnp.max(gaps, initial=0.0), jnp.finfo(jnp.float32).max
    difference = jnp.where(jnp.isfinite(difference), difference, limit)
    return update.astype(dtype), difference


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
