"""The calls of the host that make a step, in one of two forms with the same bits.

    at once, on CPUs:      gradient ─► update ───────────────────────────► result
    in two, elsewhere:     gradient ─► start ─► token ┐
                                                all tokens ─► finish ─► result

A call that waits for its update would keep an accelerator's later kernels from being
enqueued. There it only takes the gradient, and the result is fetched after the last
gradient. A call costs as much for a few elements as for a million, so small leaves
whose gradients arrive together share one:

    arrival:   … [small small] LONG [small small …] LONG …     (the tree backwards)
    calls:       └─────────── one ────────┘  and each long leaf by itself

Invariant: every leaf is updated once, and the step is committed after the last. The
leaves of a call are sharded over the same axes; its first gradient waits for few
others. The elements that compression sends are selected on the gradient's device.
"""

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding
from jax.typing import DTypeLike

from jaxinf.compress import compress_leaf
from jaxinf.engine import StoreDescription
from jaxinf.layout import LeafGrid
from jaxinf.optimizer.binding import bind
from jaxinf.optimizer.callback import (
    GuardedHost,
    call_once,
    shares_memory,
    waits_for_updates,
)
from jaxinf.optimizer.leaf_call import (
    GO,
    HOLD,
    HOLD_NON_FINITE,
    Axis,
    Compress,
    HostCall,
    LeafCall,
    LeafResult,
    first_elements,
    leaf_call,
    mesh_of,
    send,
)
from jaxinf.optimizer.state import SmartUpdateState
from jaxinf.optimizer.wrapped import Wrapped
from jaxinf.program import StateSlot, key_data

SMALL_BYTES = 1 << 20
"""A leaf that is shorter, on each JAX device, shares a call."""

GROUP_BYTES = 8 << 20
"""No call brings more small leaves than this."""

SPAN_BYTES = 64 << 20
"""No gradient waits for more bytes of others, long leaves between them included."""


def grouped(leaves: Sequence[tuple[int, Hashable]]) -> list[list[int]]:
    """Returns the numbers of the leaves of each call, in the order of first gradients.

    Args:
      leaves: bytes of each leaf's gradient on each JAX device, at 4 bytes an element,
        and its kind: leaves of different kinds never share a call. They are in the
        order of the tree; gradients arrive in the reverse order.
    """
    groups: list[list[int]] = []
    filling: dict[Hashable, tuple[list[int], int, int]] = {}
    arrived = 0
    for number, (num_bytes, kind) in reversed([*enumerate(leaves)]):
        group, held, began = filling.get(kind, ([], 0, arrived))
        fits = (
            held + num_bytes <= GROUP_BYTES
            and arrived + num_bytes - began <= SPAN_BYTES
        )
        if num_bytes >= SMALL_BYTES or not fits:
            group, held, began = [], 0, arrived
        if num_bytes < SMALL_BYTES:
            filling[kind] = group, held + num_bytes, began
        if not group:
            groups.append(group)
        group.append(number)
        arrived += num_bytes
    return groups


def grouped_leaves(leaves: Sequence[LeafCall]) -> list[list[int]]:
    """Returns the numbers of the leaves of each call; see `grouped`."""
    kinds = []
    for leaf in leaves:
        axes = frozenset[Axis](axis for own in leaf.split for axis in own)
        num_parts = 1 if leaf.kept is not None else math.prod(a.size for a in axes)
        kinds.append((4 * math.prod(leaf.shape) // num_parts, axes))
    return [[leaves[n].number for n in group] for group in grouped(kinds)]


@dataclass(frozen=True)
class StepCalls:
    """The calls of one step; traceable.

    Attributes:
      shardings: the leaves' shardings; empty for one JAX device.
      state: the state at the beginning of the step.
    """

    wrapped: Wrapped
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
          params: the leaves' params, or empty if they are not available.
          feedback: the leaves' error feedback, or empty.
        """
        calls = []
        for number, (gradient, gate) in enumerate(
            zip(gradients, self._gates(gradients), strict=True)
        ):
            call = replace(
                self._named(number),
                gradient=gradient,
                kept=self._local_shape(number) if gradient is None else None,
                feedback=feedback[number] if feedback else None,
                gate=gate,
            )
            if params and gradient is not None:
                known = params[number]
                if self._gives(known):
                    call = replace(call, params=known)
                elif not self.shardings:
                    call = replace(call, probe=first_elements(known))
            calls.append(call)
        return calls

    def bind(self, params: Sequence[jax.Array]) -> tuple[jax.Array, jax.Array]:
        """Compares the params, if they are available; see `binding.bind`."""
        leaves = [replace(self._named(n), params=p) for n, p in enumerate(params)]
        groups = [tuple(leaves[n] for n in group) for group in grouped_leaves(leaves)]
        host = self.wrapped.host
        return bind(host, self.description, self.shardings, self.state, groups)

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
            for group in grouped_leaves(leaves):
                names = tuple([self._named(n) for n in group])
                call = HostCall(names, step=self.state.step, after=bound)
                dtypes = [slots[n].dtype for n in group]
                results, own = self._send(guarded, call, dtypes)
                found |= dict(zip(group, results, strict=True))
                statuses.append(own)
            ordered = [found[number].array for number in range(len(leaves))]
            return ordered, jnp.max(jnp.concatenate(statuses))

        def skip() -> tuple[list[jax.Array], jax.Array]:
            described = zip(leaves, slots, self.description.leaves, strict=True)
            return [
                jnp.zeros(of.shape, slot.dtype)
                if leaf.gradient is None
                else jnp.zeros_like(leaf.gradient, slot.dtype)
                for leaf, slot, of in described
            ], bound

        return lax.cond(is_due, read, skip)

    def run(self, calls: Sequence[HostCall]) -> tuple[list[LeafResult], jax.Array]:
        """Updates all leaves.

        Returns:
          Results in the order of the leaves; statuses in that of `commit`.
        """
        host, waits = self.wrapped.host, waits_for_updates()
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
        is_compared: bool,
        carried: Mapping[tuple[str, ...], jax.Array],
    ) -> jax.Array:
        """Ends the step; returns an int32: committed, skipped or failed.

        Args:
          statuses: those of `run`.
          inexact: of leaves with 16-bit params, the differences that `change` returns.
          is_compared: whether the update was given params.
          carried: further arrays to commit, as `carried_leaves` returns.
        """
        commit = partial(
            self.wrapped.host.commit,
            self.description,
            [leaf.number for call in reversed(calls) for leaf in call.leaves],
            list(inexact),
            is_compared=is_compared,
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
        ndim = len(self.description.leaves[number].shape)
        return leaf_call(number, ndim, *self.shardings[number : number + 1])

    def _local_shape(self, number: int) -> tuple[int, ...]:
        """Returns the shape of a JAX device's part of a leaf."""
        shape = self.description.leaves[number].shape
        return self.shardings[number].shard_shape(shape) if self.shardings else shape

    def _send(
        self,
        host: GuardedHost,
        call: HostCall,
        dtypes: Sequence[DTypeLike | None],
        compress: Compress | None = None,
    ) -> tuple[list[LeafResult], jax.Array]:
        """Sends a call whose results have these dtypes; see `leaf_call.send`."""
        numbers = [leaf.number for leaf in call.leaves]
        avals = [
            None
            if dtype is None
            else jax.ShapeDtypeStruct(self.description.leaves[n].shape, dtype)
            for n, dtype in zip(numbers, dtypes, strict=True)
        ]
        shardings = [self.shardings[n] for n in numbers] if self.shardings else []
        return send(host, call, avals, shardings, compress)

    def _dtypes(self, call: HostCall) -> list[DTypeLike | None]:
        """Returns the dtype of each leaf's update; None for one that stays."""
        described = self.description.leaves
        return [
            None if leaf.kept is not None else described[leaf.number].device_dtype
            for leaf in call.leaves
        ]

    def _send_gradients(
        self, host: GuardedHost, call: HostCall, *, has_results: bool
    ) -> tuple[list[LeafResult], jax.Array]:
        """Sends one call; compressed, if that is on, after the warm-up steps."""
        # Keeps XLA from fusing the gradients' computation with what follows: the
        # selection, or the packing of short leaves.
        gradients = [leaf.gradient for leaf in call.leaves]
        if jax.tree.leaves(gradients):
            gradients = lax.optimization_barrier(gradients)
        pairs = zip(call.leaves, gradients, strict=True)
        call = call._replace(leaves=tuple(replace(x, gradient=g) for x, g in pairs))
        dtypes = self._dtypes(call) if has_results else [None] * len(call.leaves)

        def dense() -> tuple[list[LeafResult], jax.Array]:
            # The old error feedback stays here.
            without = tuple(replace(leaf, feedback=None) for leaf in call.leaves)
            results, own = self._send(host, call._replace(leaves=without), dtypes)
            pairs = zip(results, call.leaves, strict=True)
            return [one._replace(feedback=leaf.feedback) for one, leaf in pairs], own

        compression = self.wrapped.compression
        if compression is None:
            return dense()

        def compressed() -> tuple[list[LeafResult], jax.Array]:
            return self._send(host, call, dtypes, self._compress)

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

    def _fetch(
        self,
        calls: Sequence[HostCall],
        started: Sequence[tuple[list[LeafResult], jax.Array]],
    ) -> list[tuple[list[LeafResult], jax.Array]]:
        tokens = jnp.concatenate([own for _, own in started])
        host, found = self.wrapped.host.guarded(self.wrapped.host.finish), []
        for call, (kept, _) in zip(calls, started, strict=True):
            names = [replace(self._named(x.number), kept=x.kept) for x in call.leaves]
            results, own = self._send(
                host, HostCall(tuple(names), after=tokens), self._dtypes(call)
            )
            pairs = zip(results, kept, strict=True)
            left = [new._replace(feedback=old.feedback) for new, old in pairs]
            found.append((left, own))
        return found

    def _gates(self, gradients: Sequence[jax.Array | None]) -> list[jax.Array | None]:
        """Returns whether each leaf may update; see `HostSide.looks_ahead`.

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
        is_free = shares_memory(is_local=bool(self.shardings))
        is_stored = params.dtype in (jnp.float32, jnp.bfloat16)
        takes = self.wrapped.engine.options.csd.takes_params
        return is_free and is_stored and takes
