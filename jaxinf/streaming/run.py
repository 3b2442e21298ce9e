"""Runs one step: calls programs in order, fetches params, hands out gradients.

A batch may have several parts (micro_batches.py): each call is of one of them, in the
order of `plan/order.py`.

Invariant: at most two programs are in flight, so memory stays within the plan; with
asynchronous dispatch alone every param would be in memory at once.
"""

import contextlib
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.dtypes import result_type
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxinf.engine import shard_whole
from jaxinf.streaming.micro_batches import combine_parts, parts_of
from jaxinf.streaming.move.values import Values
from jaxinf.streaming.plan.calls import Plan, StepValue
from jaxinf.streaming.plan.compiled import Executables, compile_plan, const_sharding
from jaxinf.streaming.program.graph import (
    Batch,
    Const,
    Number,
    Origin,
    Piece,
    Seed,
)
from jaxinf.transfer import add_span, span
from jaxinf.typing import PyTree

MAX_IN_FLIGHT = 2

GetParams: TypeAlias = Callable[[int, Piece], jax.Array]
"""Returns a piece of the params for the call of that number; blocks."""

Check: TypeAlias = Callable[[], None]
"""Called where a step can be given up; raises if it is."""


class Runner:
    """Runs the steps of a plan; compiles its programs when made.

    It keeps the plan without its graph. If a step ends early, the caller resets
    `values`, by default those of a plan that needs no drive.

    Attributes:
      dispatched_s: Time that the last step took to hand programs to the device.
      waited_s: Time that the last step waited for the device.
      call_s: Time that each call of the last step took.
      waited_inputs_s: Time that each waited for memory and inputs before that.
    """

    def __init__(
        self,
        plan: Plan,
        executables: Executables | None = None,
        values: Values | None = None,
    ) -> None:
        self.values = Values(plan) if values is None else values
        self.dispatched_s = self.waited_s = self._ended_s = 0.0
        executables = Executables() if executables is None else executables
        self._executables = compile_plan(plan, executables)
        self.plan, mesh = plan.without_graph(), plan.traced.mesh
        self.call_s = [0.0] * len(plan.calls)
        self.waited_inputs_s = [0.0] * len(plan.calls)
        # Calls under way: number, time, and an output to wait for unless it has ended.
        self._in_flight: deque[tuple[int, float, jax.Array | None]] = deque()
        self._put = partial(_put, mesh=mesh)
        self._put_number = cache(lambda number: _put(np.int32(number), mesh=mesh))
        consts = plan.traced.consts
        self._consts = [self._put(x, const_sharding(x, mesh)) for x in consts]

    def __call__(
        self,
        batch: PyTree,
        get_params: GetParams,
        hand_out: Callable[[Piece, jax.Array], None] = lambda piece, gradient: None,
        check: Check = lambda: None,
        shares: Sequence[float] | None = None,
        *,
        done: Callable[[int], None] = lambda number: None,
        max_in_flight: int = MAX_IN_FLIGHT,
    ) -> tuple[jax.Array | None, PyTree]:
        """Runs one step.

        Args:
          batch: A batch of the traced shapes, or of as many parts as the plan has.
          hand_out: Takes a complete gradient; called in the order of completion.
          shares: What each part's gradient is multiplied by; 1 by default.
          done: Called when the call of that number has ended.
          max_in_flight: Programs under way at a time; 1 to measure them one by one.

        Returns:
          The loss, None if there is none, and aux; of parts as `combine_parts`.
        """
        values, shares = self.values, shares or (1.0,) * self.plan.num_parts
        self.dispatched_s = self.waited_s = self._ended_s = 0.0
        read = self._input_reader(batch, get_params, check, shares)
        try:
            for number, call in enumerate(self.plan.calls):
                if len(self._in_flight) == max_in_flight:
                    self._await_first(done)
                began_s = time.perf_counter()
                values.before_call(number)
                inputs = [read(ref, number, call.part) for ref in call.takes]
                self.waited_inputs_s[number] = time.perf_counter() - began_s
                outputs = self._dispatch(number, inputs)
                del inputs
                values.put(call.makes, outputs)
                values.after_dispatch(number, call.frees)
                for piece, i in call.gradients:
                    hand_out(piece, outputs[i])
                del outputs
            while self._in_flight:
                self._await_first(done)
            results = self._results()
            values.reset()
            return combine_parts(results, shares)
        finally:
            while self._in_flight:  # those that an error has left
                with contextlib.suppress(RuntimeError):  # the step's own is raised
                    jax.block_until_ready(self._in_flight.popleft()[2])

    def _input_reader(
        self,
        batch: PyTree,
        get_params: GetParams,
        check: Check,
        shares: Sequence[float],
    ) -> Callable[[Origin | StepValue, int, int], Any]:
        """Puts a batch on the device; returns what reads inputs, by call and part."""
        traced = self.plan.traced
        placed = [
            [
                self._put(leaf, aval.sharding)
                for leaf, aval in zip(jax.tree.leaves(part), traced.batch, strict=True)
            ]
            for part in parts_of(batch, self.plan.num_parts)
        ]
        dtype = traced.seed_dtype or np.float32
        seeds = [self._put(np.array(share, dtype)) for share in shares]

        def read(ref: Origin | StepValue, number: int, part: int) -> Any:
            match ref:
                case StepValue():
                    return self.values[ref]
                case Piece():
                    check()
                    return get_params(number, ref)
                case Batch():
                    return placed[part][ref.leaf]
                case Const():
                    return self._consts[ref.number]
                case Seed():
                    return seeds[part]
                case Number():
                    return self._put_number(ref.number)

        return read

    def _dispatch(self, number: int, inputs: list[Any]) -> Sequence[jax.Array]:
        began_s = time.perf_counter()
        outputs = self._executables[number](*inputs)
        called_s = time.perf_counter()
        self.dispatched_s += called_s - began_s
        fence = self.plan.fences[number]
        if fence is None:  # the next call may reuse the memory of all outputs
            self._await(outputs)
        output = None if fence is None else outputs[fence]
        self._in_flight.append((number, called_s, output))
        return outputs

    def _await_first(self, done: Callable[[int], None]) -> None:
        number, called_s, output = self._in_flight.popleft()
        if output is not None:
            self._await(output)
        began_s, self._ended_s = max(called_s, self._ended_s), time.perf_counter()
        self.call_s[number] = self._ended_s - began_s
        add_span("program", began_s, self._ended_s)
        self.values.after_call(number)
        done(number)

    def _await(self, outputs: Any) -> None:
        began_s = time.perf_counter()
        with span("wait"):
            jax.block_until_ready(outputs)
        self.waited_s += time.perf_counter() - began_s

    def _results(self) -> list[tuple[jax.Array | None, PyTree]]:
        traced, num_parts, results = self.plan.traced, self.plan.num_parts, []
        count = len(self.plan.results) // num_parts
        for part in range(num_parts):
            values = self.plan.results[part * count :][:count]
            aux = [self.values[value] for value in values]
            loss = None if traced.seed_dtype is None else aux.pop(0)
            results.append((loss, traced.aux_tree.unflatten(aux)))
        return results


def _put(leaf: Any, sharding: Any = None, *, mesh: Mesh | None) -> jax.Array:
    """Returns an array on the device, or sharded; replicated if nothing is said."""
    array = leaf if hasattr(leaf, "dtype") else np.asarray(leaf, result_type(leaf))
    if mesh is None:
        return jnp.asarray(array)
    sharding = sharding or NamedSharding(mesh, PartitionSpec())
    is_global = isinstance(array, jax.Array) and not array.is_fully_addressable
    if is_global or sharding.is_fully_addressable:
        return jax.device_put(array, sharding)
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        data = _put(jax.random.key_data(array), mesh=mesh)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(array))
    return shard_whole(array, sharding)
