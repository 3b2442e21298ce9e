"""Runs one step: calls programs in order, fetches params, hands out gradients.

Invariant: at most two programs are in flight, so memory stays within the plan; with
asynchronous dispatch alone every param would be in memory at once.
"""

import contextlib
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

import jax
import numpy as np
from jax.dtypes import result_type
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxinf.stream.absences import least_offloaded_bytes
from jaxinf.stream.calls import Call, Slot
from jaxinf.stream.graph import Batch, Const, Number, Origin, Piece, Seed
from jaxinf.stream.memory import num_together
from jaxinf.stream.plan import Plan
from jaxinf.stream.programs import compile_program
from jaxinf.stream.shardings import Shardings, const_sharding, output_bytes
from jaxinf.stream.values import Values
from jaxinf.typing import PyTree

__all__ = [
    "Executables",
    "Runner",
    "compile_plan",
    "compiled_bytes",
    "compiled_temp_bytes",
]

MAX_IN_FLIGHT = 2


Executables: TypeAlias = dict[tuple[Any, ...], Any]
"""Compiled programs by key, donated inputs, and shardings of inputs and outputs."""


def compile_plan(plan: Plan, executables: Executables) -> Sequence[Any]:
    """Compiles a plan's programs unless they are known; returns one a call. Blocks.

    On several devices JAX chooses the shardings of values. A program is compiled for
    those of its inputs, so that equal blocks share one as soon as their inputs' agree.

    Args:
      plan: The plan.
      executables: Programs compiled before; new ones are added.
    """
    found = []
    shardings = Shardings(plan)
    for call in plan.calls.calls:
        program = call.program
        donated = plan.calls.donated[program.key]
        inputs, outputs = shardings.inputs(call), shardings.outputs(call)
        known = (program.key, donated, inputs, outputs)
        if known not in executables:
            executables[known] = compile_program(program, donated, inputs, outputs)
        shardings.note(call, executables[known])
        found.append(executables[known])
    return found


def compiled_bytes(plan: Plan, executables: Executables) -> int:
    """Returns the memory of a step, with temporaries as reported by XLA; blocks."""
    temps = compiled_temp_bytes(plan, executables)
    if plan.is_offloaded:
        return least_offloaded_bytes(plan.calls, temps)
    compiled = compile_plan(plan, executables)
    calls = replace(plan.calls, output_bytes=output_bytes(plan, compiled))
    return calls.peak_bytes(temps)


def compiled_temp_bytes(plan: Plan, executables: Executables) -> Mapping[str, int]:
    """Returns the temporaries of a plan's programs as reported by XLA; blocks.

    Those of all devices that share the host's memory, or of one with its own.
    """
    found: dict[str, int] = {}
    num_devices = num_together(plan.traced.mesh)
    compiled = compile_plan(plan, executables)
    for call, executable in zip(plan.calls.calls, compiled, strict=True):
        own = executable.memory_analysis().temp_size_in_bytes * num_devices
        found[call.program.key] = max(own, found.get(call.program.key, 0))
    return found


class Runner:
    """Runs the steps of a plan; compiles its programs when made.

    Args:
      plan: The plan; the runner keeps it without its graph.
      executables: As for `compile_plan`.
      record: Takes the times between which each call ran, by `time.perf_counter`.
      values: Holds values between calls; by default in memory.

    Attributes:
      dispatched_s: Time that the last step took to hand programs to the device.
      waited_s: Time that the last step waited for the device.
    """

    def __init__(
        self,
        plan: Plan,
        executables: Executables | None = None,
        record: Callable[[float, float], None] = lambda began_s, ended_s: None,
        values: Values | None = None,
    ) -> None:
        self.values = Values() if values is None else values
        self.waited_s = 0.0
        self._record = record
        self._executables = compile_plan(
            plan, {} if executables is None else executables
        )
        self.plan = plan.without_graph()
        self.dispatched_s = 0.0
        self._in_flight: deque[tuple[int, float, jax.Array | None]] = deque()
        self._numbers: dict[int, jax.Array] = {}
        self._put = partial(_put, mesh=plan.traced.mesh)
        self._consts = [
            self._put(const, const_sharding(const, plan.traced.mesh))
            for const in plan.traced.consts
        ]
        self._seed = self._put(np.ones((), plan.traced.seed_dtype or np.float32))

    def __call__(
        self,
        batch: PyTree,
        fetch: Callable[[int, Piece], Any],
        hand_out: Callable[[Piece, jax.Array], None],
        done: Callable[[int], None] = lambda number: None,
    ) -> tuple[jax.Array | None, PyTree]:
        """Runs one step.

        Args:
          batch: A batch of the traced shapes.
          fetch: Returns a part of the params for the call of that number.
          hand_out: Takes a complete gradient; called in the order of completion.
          done: Takes the number of each call that has run and reads nothing more.

        Returns:
          The loss, None if there is none, and aux.
        """
        leaves = self._placed(batch)
        values = self.values
        in_flight = self._in_flight
        self.dispatched_s = self.waited_s = ended_s = 0.0

        def await_first() -> None:
            nonlocal ended_s
            number, called_s, output = in_flight.popleft()
            if output is not None:
                self._await(output)
            began_s, ended_s = max(called_s, ended_s), time.perf_counter()
            self._record(began_s, ended_s)
            values.done(number)
            done(number)

        for number, call in enumerate(self.plan.calls.calls):
            if len(in_flight) == MAX_IN_FLIGHT:
                await_first()
            values.before(number)
            outputs = self._call(number, call, leaves, fetch)
            called_s = time.perf_counter()
            fence = self.plan.calls.fences[number]
            if fence is None:  # the next call may reuse the memory of all outputs
                self._await(outputs)
            output = None if fence is None else outputs[fence]
            in_flight.append((number, called_s, output))
            values.put(call.outputs, outputs)
            values.after(number, call.drops)
            for piece, i in call.gradients:
                hand_out(piece, outputs[i])
            del outputs, output
        while in_flight:
            await_first()
        aux = [values[slot] for slot in self.plan.calls.results]
        loss = None if self.plan.traced.seed_dtype is None else aux.pop(0)
        values.reset()
        return loss, self.plan.traced.aux_tree.unflatten(aux)

    def settle(self) -> None:
        """Waits for programs that an interrupted step has left in flight."""
        while self._in_flight:
            *_, output = self._in_flight.popleft()
            with contextlib.suppress(RuntimeError):  # the step's own error is raised
                jax.block_until_ready(output)
        self.values.reset()

    def _placed(self, batch: PyTree) -> list[jax.Array]:
        leaves, avals = jax.tree.leaves(batch), self.plan.traced.batch
        return [
            self._put(leaf, aval.sharding)
            for leaf, aval in zip(leaves, avals, strict=True)
        ]

    def _await(self, outputs: Any) -> None:
        began_s = time.perf_counter()
        jax.block_until_ready(outputs)
        self.waited_s += time.perf_counter() - began_s

    def _call(
        self,
        number: int,
        call: Call,
        batch: Sequence[jax.Array],
        fetch: Callable[[int, Piece], Any],
    ) -> Sequence[jax.Array]:
        def read(ref: Origin | Slot) -> Any:
            match ref:
                case Slot():
                    return self.values[ref]
                case Piece():
                    return fetch(number, ref)
                case Batch():
                    return batch[ref.leaf]
                case Const():
                    return self._consts[ref.number]
                case Seed():
                    return self._seed
                case Number():
                    return self._number(ref.number)

        inputs = [read(ref) for ref in call.inputs]
        began_s = time.perf_counter()
        outputs = self._executables[number](*inputs)
        self.dispatched_s += time.perf_counter() - began_s
        return outputs

    def _number(self, number: int) -> jax.Array:
        if number not in self._numbers:
            self._numbers[number] = self._put(np.int32(number))
        return self._numbers[number]


def _put(leaf: Any, sharding: Any = None, *, mesh: Mesh | None) -> jax.Array:
    """Returns an array on the device, or sharded; replicated if nothing is said."""
    array = leaf if hasattr(leaf, "dtype") else np.asarray(leaf, result_type(leaf))
    if mesh is None:
        return jax.numpy.asarray(array)
    return jax.device_put(array, sharding or NamedSharding(mesh, PartitionSpec()))
