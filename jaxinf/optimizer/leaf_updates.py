"""The leaves' updates as calls of the host, in one of two forms.

    at once, on CPUs:      gradient ─► update ───────────────────────────► result
    in two, elsewhere:     gradient ─► start ─► token ┐
                                                all tokens ─► finish ─► result

A call that waits for its update would keep an accelerator's later kernels from being
enqueued: there it only takes the gradient, and what comes of it is fetched when the
last gradient is gone. Invariant: both forms give the same bits.
"""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from jaxinf.engine import StoreDescription
from jaxinf.layout import LeafGrid
from jaxinf.optimizer.callback import (
    Host,
    Prepare,
    call_on_shards,
    shares_memory,
    waits_for_updates,
)
from jaxinf.optimizer.host_side import GO, HOLD, HOLD_NON_FINITE, HostSide, Sent
from jaxinf.optimizer.sending import Sending
from jaxinf.program import LeafInputs

__all__ = ["LeafResult", "LeafUpdates"]

_NUM_PROBED = 8


class LeafResult(NamedTuple):
    """What an update gives of a leaf.

    Attributes:
      result: the fp32 update or the new 16-bit params, of the leaf's shape.
      status: int32, see `jaxinf.optimizer.host_side`.
      feedback: the new error feedback; empty without.
    """

    result: jax.Array
    status: jax.Array
    feedback: list[jax.Array]


class LeafUpdates:
    """Calls the host with every leaf of a step.

    Args:
      host: of the store.
      sending: how gradients go there.
    """

    def __init__(self, host: HostSide, sending: Sending) -> None:
        self._host = host
        self._sending = sending

    def run(
        self,
        description: StoreDescription,
        shardings: Sequence[NamedSharding],
        gradients: Sequence[jax.Array],
        params: Sequence[jax.Array],
        inputs: Sequence[LeafInputs],
        feedback: Sequence[jax.Array],
        step: jax.Array,
    ) -> list[LeafResult]:
        """Traceable.

        Args:
          description: what the store is bound to.
          shardings: of the leaves, all on one mesh; empty for one JAX device.
          gradients: the leaves.
          params: likewise, or empty where they are not at hand.
          inputs: of the prologue.
          feedback: what was left out before, or empty.
          step: of the state.
        """
        gates = self._gates(gradients)
        calls = [
            _Leaf(
                self._host,
                self._sending,
                description,
                number,
                shardings[number] if shardings else None,
            )
            for number in range(len(gradients))
        ]
        started = [
            leaf.call(
                gradients[n], params[n : n + 1], inputs[n], gates[n], step, feedback[n:]
            )
            for n, leaf in enumerate(calls)
        ]
        waits = waits_for_updates() or not calls
        tokens = None if waits else jnp.stack([status for _, status, _ in started])
        results: list[LeafResult] = []
        for leaf, (result, status, left) in zip(calls, started, strict=True):
            if tokens is not None:
                result, status = leaf.fetch(tokens)
            assert result is not None
            results.append(LeafResult(result, status, left))
        return results

    def _gates(self, gradients: Sequence[jax.Array]) -> list[jax.Array]:
        """For each leaf, whether its update may go on: see `HostSide.looks_ahead`.

        Of a gradient that is sent in part the host could not tell if it is finite.
        """
        is_sparse = self._sending.compression is not None and self._host.checks_finite
        if not (self._host.looks_ahead or is_sparse):
            return [jnp.int32(GO)] * len(gradients)
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


class _Leaf:
    """One leaf's calls."""

    def __init__(
        self,
        host: HostSide,
        sending: Sending,
        description: StoreDescription,
        number: int,
        sharding: NamedSharding | None,
    ) -> None:
        self._host = host
        self._sending = sending
        self._description = description
        self._number = number
        self._sharding = sharding
        leaf = description.leaves[number]
        self._result = jax.ShapeDtypeStruct(leaf.shape, leaf.device_dtype)

    def call(
        self,
        gradient: jax.Array,
        params: Sequence[jax.Array],
        inputs: LeafInputs,
        gate: jax.Array,
        step: jax.Array,
        feedback: Sequence[jax.Array],
    ) -> tuple[jax.Array | None, jax.Array, list[jax.Array]]:
        """Updates, or starts an update: then there is no result, and a token as status.

        The third is the new error feedback.
        """
        probe = jnp.zeros((0,), self._result.dtype)
        if params and params[0].size and self._sharding is None:
            [leaf] = params
            probe = leaf[(0,) * (leaf.ndim - 1)] if leaf.ndim else leaf[None]
        given = self._given_params(params)
        shared = [step, gate, *inputs.scalars, probe[:_NUM_PROBED]]
        num_scalars, has_params = len(inputs.scalars), bool(given)
        waits = waits_for_updates()

        def call(
            sent: Sent | None, arrays: Sequence[jax.Array], prepare: Prepare | None
        ) -> tuple[jax.Array | None, jax.Array, list[jax.Array]]:
            host: Host = partial(
                self._host.update_leaf,
                self._description, self._number, num_scalars, has_params, sent,
            )  # fmt: skip
            if not waits:
                own = self._local_result
                host = partial(
                    self._host.start_leaf, self._number, own.shape, own.dtype, host
                )
            return call_on_shards(
                self._guarded(host),
                self._sharding,
                shared,
                arrays,
                self._result if waits else None,
                prepare,
            )

        others = [*inputs.arrays, *given]
        return self._sending.send(
            call, self._local_grid, gradient, others, feedback[:1], step
        )

    def fetch(self, tokens: jax.Array) -> tuple[jax.Array | None, jax.Array]:
        """Result and status of an update that was started, as all of `tokens` were."""
        host = self._guarded(partial(self._host.finish_leaf, self._number))
        result, status, _ = call_on_shards(
            host, self._sharding, [tokens], [], self._result
        )
        return result, status

    @property
    def _local_result(self) -> jax.ShapeDtypeStruct:
        if self._sharding is None:
            return self._result
        shape = self._sharding.shard_shape(self._result.shape)
        return jax.ShapeDtypeStruct(shape, self._result.dtype)

    def _local_grid(self) -> LeafGrid:
        """The chunks of the leaf, or of each JAX device's shard of it."""
        grid = self._host.grid(self._description, self._number)
        if self._sharding is None:
            return grid
        return LeafGrid(self._sharding.shard_shape(grid.shape), grid.chunk_shape)

    def _given_params(self, params: Sequence[jax.Array]) -> list[jax.Array]:
        """The leaf, if the store may have the same bits, and it costs nothing."""
        is_free = shares_memory(is_local=self._sharding is not None)
        if not (is_free and self._host.takes_params):
            return []
        return [p for p in params if p.dtype in (jnp.float32, jnp.bfloat16)]

    def _guarded(self, host: Host) -> Host:
        return self._host.guarded(host, may_raise=self._sharding is None)
