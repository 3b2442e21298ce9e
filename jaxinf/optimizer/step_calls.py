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
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding

from jaxinf.compress import TopK, compress_leaf
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


def compressor(
    compression: TopK, chunk_shapes: Mapping[int, tuple[int, ...]]
) -> Compress:
    """Returns a function that compresses a leaf's call."""

    def compress(call: LeafCall) -> LeafCall:
        gradient = call.gradient
        if gradient is None:
            return call
        grid = LeafGrid(tuple(gradient.shape), chunk_shapes[call.number])
        sent, left = compress_leaf(gradient, grid, compression, call.feedback)
        return replace(call, gradient=sent, feedback=left)

    return compress


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


class StepCalls:
    """The calls of one step; traceable.

    Args:
      shardings: the leaves' shardings; empty for one JAX device.
      state: the state at the beginning of the step.
    """

    def __init__(
        self,
        wrapped: Wrapped,
        description: StoreDescription,
        shardings: tuple[NamedSharding, ...],
        state: SmartUpdateState,
    ) -> None:
        self._wrapped = wrapped
        self._host, self._engine = wrapped.host, wrapped.engine
        self._description = description
        self._shardings = shardings
        self._mesh = mesh_of(shardings)
        self._state = state

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
            shape, local = self._shapes(number)
            call = leaf_call(
                number,
                len(shape),
                *self._shardings[number : number + 1],
                gradient=gradient,
                kept=local if gradient is None else None,
                feedback=feedback[number] if feedback else None,
                gate=gate,
            )
            known = params[number] if params and gradient is not None else None
            if known is not None and self._gives(known):
                call = replace(call, params=known)
            elif known is not None and self._mesh is None:
                call = replace(call, probe=first_elements(known))
            calls.append(call)
        return calls

    def bind(self, params: Sequence[jax.Array]) -> tuple[jax.Array, jax.Array]:
        """Compares the params with the store's; see `binding.bind`.

        Args:
          params: the leaves, or empty if they are not available.
        """
        leaves = [
            leaf_call(number, p.ndim, *self._shardings[number : number + 1], params=p)
            for number, p in enumerate(params)
        ]
        return bind(
            self._host,
            self._description,
            self._shardings,
            self._state,
            [tuple(leaves[n] for n in group) for group in grouped_leaves(leaves)],
        )

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
        host = self._host.guarded(
            partial(self._host.recall, [slot.name for slot in slots])
        )

        def read() -> tuple[list[jax.Array], jax.Array]:
            found, statuses = dict[int, LeafResult](), [bound[None]]
            for group in grouped_leaves(leaves):
                names = [LeafCall(n, leaves[n].split) for n in group]
                call = HostCall(tuple(names), step=self._state.step, after=bound)
                avals = [
                    jax.ShapeDtypeStruct(self._shapes(n)[0], slots[n].dtype)
                    for n in group
                ]
                results, own = send(host, call, avals, self._shardings_of(call))
                found |= dict(zip(group, results, strict=True))
                statuses.append(own)
            ordered = [found[number].array for number in range(len(leaves))]
            return ordered, jnp.max(jnp.concatenate(statuses))

        def skip() -> tuple[list[jax.Array], jax.Array]:
            pairs = zip(leaves, slots, strict=True)
            return [
                jnp.zeros(self._shapes(leaf.number)[0], slot.dtype)
                if leaf.gradient is None
                else jnp.zeros_like(leaf.gradient, slot.dtype)
                for leaf, slot in pairs
            ], bound

        return lax.cond(is_due, read, skip)

    def run(self, calls: Sequence[HostCall]) -> tuple[list[LeafResult], jax.Array]:
        """Updates all leaves.

        Returns:
          Results in the order of the leaves; statuses in that of `commit`.
        """
        waits = waits_for_updates()
        function = self._host.update if waits else self._host.start
        host = self._host.guarded(partial(function, self._description))
        found = [self._send(host, call, has_results=waits) for call in calls]
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
        state = self._state
        commit = partial(
            self._host.commit,
            self._description,
            [leaf.number for call in reversed(calls) for leaf in call.leaves],
            list(inexact),
            is_compared=is_compared,
            paths=tuple(carried),
        )
        differences = jnp.array(list(inexact.values()), jnp.float32)
        return call_once(
            self._host.guarded(commit, is_last=True),
            self._mesh,
            (
                state.step,
                state.skipped_steps,
                statuses,
                differences,
                [key_data(scalar) for scalar in scalars],
                list(carried.values()),
            ),
            jax.ShapeDtypeStruct((), np.int32),
        )

    # --- inside --------------------------------------------------------------------

    def _send(
        self, host: GuardedHost, call: HostCall, *, has_results: bool
    ) -> tuple[list[LeafResult], jax.Array]:
        """Sends one call; compressed, if that is on, after the warm-up steps."""
        # Keeps XLA from fusing the gradients' computation with what follows: the
        # selection, or the packing of short leaves.
        gradients = [leaf.gradient for leaf in call.leaves]
        if jax.tree.leaves(gradients):
            gradients = lax.optimization_barrier(gradients)
        pairs = zip(call.leaves, gradients, strict=True)
        leaves = tuple([replace(leaf, gradient=own) for leaf, own in pairs])
        avals = self._results(call) if has_results else [None] * len(leaves)
        shardings = self._shardings_of(call)

        def dense() -> tuple[list[LeafResult], jax.Array]:
            # The old error feedback stays here.
            without = tuple(replace(leaf, feedback=None) for leaf in leaves)
            sent = call._replace(leaves=without)
            results, own = send(host, sent, avals, shardings)
            pairs = zip(results, leaves, strict=True)
            return [one._replace(feedback=leaf.feedback) for one, leaf in pairs], own

        compression = self._wrapped.compression
        if compression is None:
            return dense()

        def compressed() -> tuple[list[LeafResult], jax.Array]:
            numbers = [leaf.number for leaf in leaves]
            shapes = {
                n: self._engine.chunk_shape(self._description, n) for n in numbers
            }
            compress = compressor(compression, shapes)
            sent = call._replace(leaves=leaves)
            return send(host, sent, avals, shardings, compress)

        if not compression.warmup_steps:
            return compressed()
        is_early = self._state.step < compression.warmup_steps
        return lax.cond(is_early, dense, compressed)

    def _fetch(
        self,
        calls: Sequence[HostCall],
        started: Sequence[tuple[list[LeafResult], jax.Array]],
    ) -> list[tuple[list[LeafResult], jax.Array]]:
        tokens = jnp.concatenate([own for _, own in started])
        host, found = self._host.guarded(self._host.finish), []
        for call, (kept, _) in zip(calls, started, strict=True):
            names = [
                LeafCall(leaf.number, leaf.split, kept=leaf.kept)
                for leaf in call.leaves
            ]
            results, own = send(
                host,
                HostCall(tuple(names), after=tokens),
                self._results(call),
                self._shardings_of(call),
            )
            pairs = zip(results, kept, strict=True)
            left = [new._replace(feedback=old.feedback) for new, old in pairs]
            found.append((left, own))
        return found

    def _shapes(self, number: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Returns the shape of a leaf, and that of a JAX device's part of it."""
        shape = self._description.leaves[number].shape
        if not self._shardings:
            return shape, shape
        return shape, self._shardings[number].shard_shape(shape)

    def _results(self, call: HostCall) -> list[jax.ShapeDtypeStruct | None]:
        described = self._description.leaves
        return [
            None
            if leaf.kept is not None
            else jax.ShapeDtypeStruct(
                described[leaf.number].shape, described[leaf.number].device_dtype
            )
            for leaf in call.leaves
        ]

    def _shardings_of(self, call: HostCall) -> list[NamedSharding]:
        if not self._shardings:
            return []
        return [self._shardings[leaf.number] for leaf in call.leaves]

    def _gates(self, gradients: Sequence[jax.Array | None]) -> list[jax.Array | None]:
        """Returns whether each leaf may update; see `HostSide.looks_ahead`.

        The host cannot tell whether a compressed gradient is finite.
        """
        is_sparse = self._wrapped.compression is not None and self._host.checks_finite
        if not (self._host.looks_ahead or is_sparse):
            return [None] * len(gradients)
        finite = [
            jnp.bool_(True) if g is None else jnp.all(jnp.isfinite(g))
            for g in gradients
        ]
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
        """Whether the params may equal the store's, and can be handed over for free."""
        is_free = shares_memory(is_local=self._mesh is not None)
        is_stored = params.dtype in (jnp.float32, jnp.bfloat16)
        return is_free and is_stored and self._engine.options.csd.takes_params
