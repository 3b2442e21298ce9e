"""The calls of the host that make a step, in one of two forms with the same bits.

    at once, on CPUs:      gradient ─► update ───────────────────────────► result
    in two, elsewhere:     gradient ─► start ─► token ┐
                                                all tokens ─► finish ─► result

A call that waits for its update would keep an accelerator's later kernels from being
enqueued. There it only takes the gradient, and the result is fetched after the last
gradient.

Invariant: no leaf is updated before all params have been compared with the store, if
they must be; every leaf is updated once, and the step is committed after the last. The
elements that compression sends are selected on the gradient's device.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding
from jax.typing import DTypeLike

from jaxinf.compress import compress_leaf
from jaxinf.engine import StoreDescription, replicas_differ
from jaxinf.layout import LeafGrid
from jaxinf.optimizer.callback import (
    HostCallback,
    call_once,
    call_together,
    shares_memory,
)
from jaxinf.optimizer.host_side import UNBOUND
from jaxinf.optimizer.leaf_call import (
    GO,
    HOLD,
    HOLD_NON_FINITE,
    HostCall,
    LeafCall,
    LeafResult,
    first_elements,
    grouped,
    mesh_of,
    send,
)
from jaxinf.optimizer.state import SmartUpdateState
from jaxinf.optimizer.wrapped import OffloadedOptimizer
from jaxinf.program import StateSlot, key_data

Sent = tuple[list[LeafResult], jax.Array]
"""The results of a call for each leaf, and the leaves' statuses."""


@dataclass(frozen=True)
class StepCalls:
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
        """Makes the call of each leaf, before any compression.

        Args:
          gradients: the leaves' gradients; None for a leaf that stays as it is.
          params: the leaves' params.
          feedback: the leaves' error feedback, or empty.
        """
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
                if self._gives(known):
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
        must_bind = host.guarded(partial(host.must_bind, self.description))
        found = call_together(must_bind, mesh, self.state.step, result)

        def compared() -> jax.Array:
            leaves = [replace(self._named(n), params=p) for n, p in enumerate(params)]
            statuses, compare = [found[None]], host.guarded(host.compare)
            for group in grouped(leaves):
                call = HostCall(tuple(leaves[n] for n in group))
                _, own = send(compare, call, [None] * len(group), shares=False)
                statuses.append(own)
            differing = [jnp.zeros(0, jnp.int32)]
            if mesh is not None and jax.process_count() > 1:
                pairs = zip(params, self.shardings, strict=True)
                differing += [replicas_differ(*p).astype(np.int32)[None] for p in pairs]
            bind = host.guarded(partial(host.bind, self.description))
            given = jnp.concatenate(statuses), jnp.concatenate(differing)
            return call_together(bind, mesh, (self.state.step, *given), result)

        return lax.cond(found == UNBOUND, compared, lambda: found)

    def recall(
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
        guarded = host.guarded(partial(host.recall, [slot.name for slot in slots]))

        def read() -> tuple[list[jax.Array], jax.Array]:
            found, statuses = dict[int, LeafResult](), [bound[None]]
            for group in grouped(leaves):
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
          Results in the order of the leaves; statuses in that of `commit`.
        """
        host, waits = self.wrapped.host, shares_memory()
        update = partial(host.update if waits else host.start, self.description)
        found = [
            self._send_gradients(host.guarded(update), call, has_results=waits)
            for call in calls
        ]
        if not waits:
            found = self._fetch(calls, found)
        by_number = {
            leaf.number: result
            for call, (results, _) in zip(calls, found, strict=True)
            for leaf, result in zip(call.leaves, results, strict=True)
        }
        # XLA schedules the calls in this order, that of the tree.
        statuses = jnp.concatenate([own for _, own in reversed(found)])
        return [by_number[number] for number in range(len(by_number))], statuses

    def commit(
        self,
        calls: Sequence[HostCall],
        statuses: jax.Array,
        inexact: Mapping[int, jax.Array],
        scalars: Sequence[jax.Array],
        *,
        carried: Mapping[tuple[str, ...], jax.Array],
    ) -> jax.Array:
        """Ends the step; returns an int32: committed, skipped or failed.

        Args:
          statuses: those of `run`.
          inexact: of leaves with 16-bit params, the differences that `change` returns.
          carried: further arrays to commit, as `carried_leaves` returns.
        """
        commit = partial(
            self.wrapped.host.commit,
            self.description,
            [leaf.number for call in reversed(calls) for leaf in call.leaves],
            list(inexact),
            paths=tuple(carried),
        )
        return call_once(
            self.wrapped.host.guarded(commit, is_last=True),
            mesh_of(self.shardings),
            (
                self.state.step,
                self.state.skipped_steps,
                statuses,
                jnp.array(list(inexact.values()), jnp.float32),
                [key_data(scalar) for scalar in scalars],
                list(carried.values()),
            ),
            jax.ShapeDtypeStruct((), np.int32),
        )

    # --- inside --------------------------------------------------------------------

    def _named(self, number: int) -> LeafCall:
        sharding = self.shardings[number] if self.shardings else None
        return LeafCall(number, self.description.leaves[number].shape, sharding)

    def _dtypes(self, call: HostCall) -> list[DTypeLike | None]:
        """Returns the dtype of each leaf's update; None for one that stays."""
        described = self.description.leaves
        return [
            None if leaf.is_kept else described[leaf.number].device_dtype
            for leaf in call.leaves
        ]

    def _send_gradients(
        self, host: HostCallback, call: HostCall, *, has_results: bool
    ) -> Sent:
        """Sends one call; compressed, if that is on, after the warm-up steps."""
        # Keeps XLA from fusing the gradients' computation with the selection.
        gradients = [leaf.gradient for leaf in call.leaves]
        if jax.tree.leaves(gradients):
            gradients = lax.optimization_barrier(gradients)
        pairs = zip(call.leaves, gradients, strict=True)
        call = call._replace(leaves=tuple(replace(x, gradient=g) for x, g in pairs))
        dtypes = self._dtypes(call) if has_results else [None] * len(call.leaves)

        def dense() -> Sent:
            # The old error feedback stays here.
            without = tuple(replace(leaf, feedback=None) for leaf in call.leaves)
            results, own = send(host, call._replace(leaves=without), dtypes)
            pairs = zip(results, call.leaves, strict=True)
            return [one._replace(feedback=leaf.feedback) for one, leaf in pairs], own

        def compressed() -> Sent:
            return send(host, call, dtypes, self._compress)

        compression = self.wrapped.compression
        if compression is None:
            return dense()
        if not compression.warmup_steps:
            return compressed()
        is_early = self.state.step < compression.warmup_steps
        return lax.cond(is_early, dense, compressed)

    def _compress(self, call: LeafCall) -> LeafCall:
        gradient, compression = call.gradient, self.wrapped.compression
        if gradient is None:
            return call
        assert compression is not None, "dense gradients are sent as they are"
        chunk_shape = self.wrapped.engine.chunk_shape(self.description, call.number)
        grid = LeafGrid(tuple(gradient.shape), chunk_shape)
        sent, left = compress_leaf(gradient, grid, compression, call.feedback)
        return replace(call, gradient=sent, feedback=left)

    def _fetch(self, calls: Sequence[HostCall], started: Sequence[Sent]) -> list[Sent]:
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
        """Returns whether each leaf may update; see `HostFunctions.looks_ahead`.

        The host cannot tell whether a compressed gradient is finite.
        """
        host = self.wrapped.host
        is_sparse = self.wrapped.compression is not None and host.checks_finite
        if not (host.looks_ahead or is_sparse):
            return [None] * len(gradients)
        finite = [
            jnp.bool_(True) if g is None else jnp.all(jnp.isfinite(g))
            for g in gradients
        ]
        all_finite = jnp.all(jnp.stack(finite)) if finite else True
        gates = [
            jnp.where(all_finite, GO, jnp.where(ok, HOLD, HOLD_NON_FINITE))
            if host.looks_ahead
            else jnp.where(ok, GO, HOLD_NON_FINITE)
            for ok in finite
        ]
        return [gate.astype(jnp.int32) for gate in gates]

    def _gives(self, params: jax.Array) -> bool:
        """Whether the params may equal the store's, and can be handed over for free."""
        is_free = shares_memory() and bool(self.shardings or jax.device_count() == 1)
        is_stored = params.dtype in (jnp.float32, jnp.bfloat16)
        takes = self.wrapped.engine.options.csd.takes_params
        return is_free and is_stored and takes
