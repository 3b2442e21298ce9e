"""One step: a plan, a source of params and a sink of gradients, by the batch's shape.

    batch ─► bound to its shape? ─► programs, one after another ─► results
                                     ▲ params      │ gradients
                                  a source         a sink

Invariant: a run that ends early leaves nothing under way. A function and a step in
memory are steps with another source and sink.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from types import TracebackType
from typing import Any, NamedTuple, Self, TypeAlias

import jax
import numpy as np
from jax.dtypes import result_type

from jaxinf.streaming.count import Count, count
from jaxinf.streaming.ctrl_c import Check, StepThread, check_not_traced
from jaxinf.streaming.micro_batches import first_part, shares_of
from jaxinf.streaming.move.jobs import MoveCounts
from jaxinf.streaming.move.params import Params
from jaxinf.streaming.move.values import Values
from jaxinf.streaming.plan.calls import Plan
from jaxinf.streaming.plan.choice import NUM_MEASURED, StepTimes, segments_to_recompute
from jaxinf.streaming.plan.compiled import Measured
from jaxinf.streaming.plan.fit import Prepared, prepare
from jaxinf.streaming.plan.memory import DeviceLimit, return_freed_memory
from jaxinf.streaming.plan.options import StepOptions
from jaxinf.streaming.plan.reads import used_bytes
from jaxinf.streaming.planning import plan_step
from jaxinf.streaming.program.meshes import on_this_process, outside_mesh
from jaxinf.streaming.program.trace import abstract, check_params
from jaxinf.streaming.run import Runner
from jaxinf.streaming.update.sink import Sink
from jaxinf.transfer import ByteCounts
from jaxinf.typing import PyTree

Results: TypeAlias = tuple[Any, PyTree]
"""The loss, None for a function, and aux."""


@dataclass(frozen=True)
class StreamMetrics:
    """Traffic and waiting times of a step.

    Attributes:
      fetched_memory_bytes: Bytes of params that a program found in memory, because a
        program before it had used them, in this step or an earlier one.
      spilled_memory_bytes, spilled_drive_bytes: Bytes of gradients that waited for the
        last one, in memory and in a file.
      offloaded_drive_bytes: Bytes of activations that were on a drive meanwhile,
        written once and read once.
      offloaded_host_bytes: Bytes of activations that left a device with memory of its
        own for the host, those on drives included.
      prefetch_hit_rate: Share of the reads that had ended when a program asked.
      waited_params_s: Time that programs waited for params.
      waited_values_s: Time that the host waited for activations to be written or read.
      waited_device_s: Time that the host waited for programs.
      waited_updates_s: Time that the step waited for the store: for the commit of the
        step before, for room for gradients, and for updates after the last gradient.
      dispatched_s: Time that the host took to hand programs to the device.
    """

    fetched_drive_bytes: int
    fetched_memory_bytes: int
    spilled_memory_bytes: int
    spilled_drive_bytes: int
    offloaded_drive_bytes: int
    offloaded_host_bytes: int
    prefetch_hit_rate: float
    waited_params_s: float
    waited_values_s: float
    waited_device_s: float
    waited_updates_s: float
    dispatched_s: float


class BoundStep(NamedTuple):
    """What runs batches of one shape.

    Attributes:
      times: The steps that ``policy="plan"`` has measured.
    """

    plan: Plan
    runner: Runner
    params: Params
    sink: Sink
    times: list[StepTimes]

    def close(self) -> None:
        """Frees memory and files; idempotent."""
        self.runner.values.close()
        self.params.close()
        self.sink.close()


class Step(ABC):
    """A step or a function; also a context manager. Not thread-safe.

    Args:
      options: What batches of all shapes have in common.
    """

    _named = "a step"

    def __init__(self, options: StepOptions) -> None:
        return_freed_memory(collects=False)
        self._options, self._together = options, options.together
        self._thread = StepThread()
        self._bound: dict[Any, BoundStep] = {}
        self._last: BoundStep | None = None
        self._num_skipped = 0
        self._waited_s = 0.0  # in the last step, for gradients and updates
        self._values: MoveCounts | None = None  # of the last step
        weights = options.weights
        self._weights = None if weights is None else jax.jit(weights)

    def compile(self, batch: PyTree) -> Plan:
        """Plans and compiles for batches like this one; otherwise the first run does.

        Args:
          batch: Arrays, or shapes and dtypes.

        Raises:
          StreamError: The program cannot be cut to fit, or the saved plan is another's.
        """
        self._thread.settle()
        key = self._key(batch)
        return self._thread.run(lambda check: self._take_turn(key)).plan

    @property
    def plan(self) -> Plan | None:
        """The plan of the last run, or of the first once it is planned; else None."""
        return None if self._last is None else self._last.plan

    @property
    def traffic(self) -> ByteCounts | None:
        """Bytes that the plan moves on the drive in a step; None before the first.

        An optimizer that leaves state alone in some steps moves fewer in those. Of
        state that stays in a memory, what commits alone write is divided among their
        steps; with ``durability="checkpoint"`` it does not count.
        """
        return None if self._last is None else self._last.plan.traffic

    @property
    def metrics(self) -> StreamMetrics | None:
        """Metrics of the last step; None before the first."""
        if self._last is None or self._values is None:
            return None
        plan, runner, params, sink, _ = self._last
        counts, values, found = params.counts, self._values, 0
        if sink.units is not None:
            used = used_bytes(plan.calls, sink.units)
            found = max(0, used - counts.num_read_bytes)
        return StreamMetrics(
            fetched_drive_bytes=counts.num_read_bytes,
            fetched_memory_bytes=found,
            spilled_memory_bytes=sink.spilled_bytes[0],
            spilled_drive_bytes=sink.spilled_bytes[1],
            offloaded_drive_bytes=values.num_written_bytes,
            offloaded_host_bytes=values.num_out_bytes,
            prefetch_hit_rate=counts.hit_rate,
            waited_params_s=counts.waited_s,
            waited_values_s=values.waited_s,
            waited_device_s=runner.waited_s,
            waited_updates_s=self._waited_s,
            dispatched_s=runner.dispatched_s,
        )

    def dry_run(
        self,
        batch: PyTree,
        params: PyTree = None,
        *,
        device: DeviceLimit | None = None,
    ) -> Count:
        """Counts what a step takes and moves; blocks while its programs are compiled.

        Nothing is written, and params are never made. Programs are compiled for what
        they take alone, in less time than for a step.

        Args:
          batch: Arrays, or shapes and dtypes.
          params: Shapes and dtypes, such as of ``jax.eval_shape(init_fn, key)``; by
            default the step's, which `init` or `load` has set.
          device: The memory of another device than JAX's, to plan for.

        Raises:
          BudgetError: Memory does not suffice; names a budget that does.
          StreamError: The loss function cannot be streamed, or there are no params.
        """
        self._thread.settle()
        if params is not None:
            check_params(params)
            params = abstract(params)
        options = replace(self._options, executables=Measured(), other_limit=device)
        ready = self._trace(batch, params)
        with outside_mesh():
            return self._count(ready, params, options)

    def rest(self) -> None:
        """Frees the memory for reading params until the next call."""
        self._thread.settle()
        if self._last is not None:
            self._last.params.rest()

    def close(self) -> None:
        """Frees memory and files; closes a store that is its own. Idempotent."""
        self.__exit__(None, None, None)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._thread.settle()
        for bound in self._bound.values():
            bound.close()

    # --- what configures it --------------------------------------------------------

    @abstractmethod
    def _trace(self, batch: PyTree, params: PyTree = None) -> Prepared:
        """Traces the function for batches like this one, by default of its params."""

    def _prepared(
        self, loss_fn: Callable[..., Any], params: PyTree, batch: PyTree
    ) -> Prepared:
        options = self._options
        return prepare(
            loss_fn,
            params,
            first_part(batch, options.micro_batches),
            has_aux=options.has_aux,
            num_parts=options.micro_batches,
            is_deterministic=options.deterministic,
        )

    @abstractmethod
    def _sink(self, ready: Prepared, options: StepOptions) -> Sink:
        """Returns what takes the gradients of what was traced."""

    def _count(self, ready: Prepared, params: PyTree, options: StepOptions) -> Count:
        """As `dry_run`, of what was traced."""
        return count(self._sink(ready, options), ready)

    def _join(self) -> None:
        """Waits for the updates of the step before; there are none by default."""

    # --- batches of one shape ------------------------------------------------------

    def _key(self, batch: PyTree) -> Any:
        """Binds batches of this shape unless they are, and returns their key."""
        leaves, tree = jax.tree.flatten(abstract(batch))
        key = (tree, *((leaf.shape, leaf.dtype, leaf.sharding) for leaf in leaves))
        times, chosen = self._choose(key)
        if key not in self._bound:
            what = f"the trace of {self._named}"
            trace = partial(self._traced, batch, **chosen)
            traced = self._together.group.in_all(what, trace)
            with outside_mesh():
                self._bound[key] = self._bind(*traced)._replace(times=times)
            return_freed_memory()  # of planning and compilation
        return key

    def _choose(self, key: Any) -> tuple[list[StepTimes], Mapping[str, Any]]:
        """Unbinds batches of this shape if segments are to be recomputed from now on.

        Returns:
          The steps that were measured, and what their plan is to have.
        """
        bound = self._bound.get(key)
        if bound is None or len(bound.times) != NUM_MEASURED:
            return [], {}
        again = segments_to_recompute(bound.plan, bound.times)
        bound.times.append(bound.times[-1])  # it is chosen once
        if not again:
            return bound.times, {}
        self._last = None
        self._bound.pop(key).close()
        return bound.times, {"cuts": bound.plan.cuts, "again": again}

    def _traced(self, batch: PyTree, **chosen: Any) -> tuple[Prepared, Sink]:
        ready = replace(self._trace(batch), **chosen)
        with outside_mesh():
            return ready, self._sink(ready, self._options)

    def _bind(self, ready: Prepared, sink: Sink) -> BoundStep:
        """Plans, compiles, and takes the room of a step; blocks.

        What one process is refused, by its device or its drive, all are: none goes on
        to a step, where it would wait for the others.
        """
        plan = plan_step(sink, ready)
        with ExitStack() as undone:

            def made() -> BoundStep:
                undone.callback(sink.close)
                sink.open(plan, ready)
                values = Values()
                if plan.is_offloaded:
                    values = Values(plan, sink.scratch("activations"), plan.tiers)
                undone.callback(values.close)
                runner = Runner(plan, self._options.executables, values)
                params = sink.source(runner.plan)
                undone.callback(params.close)
                return BoundStep(runner.plan, runner, params, sink, [])

            bound = self._together.group.in_all("the room for a step", made)
            undone.pop_all()
        return bound

    # --- a run ---------------------------------------------------------------------

    def _take_turn(self, key: Any) -> BoundStep:
        """Returns what batches are bound to, and gives it the memory for reading."""
        bound = self._bound[key]
        if self._last is not None and self._last is not bound:
            self._last.params.rest()
        self._last = bound
        return bound

    def _call(
        self, batch: PyTree, extra_args: Mapping[str, Any] | None = None
    ) -> Results:
        check_not_traced(batch, extra_args)
        self._thread.settle()
        key = self._key(batch)

        def body(check: Check) -> Results:
            bound = self._take_turn(key)
            noting = self._together.noting(check)
            with outside_mesh():
                return self._run(bound, batch, extra_args or {}, noting)

        return self._thread.run(body)

    def _run(
        self, bound: BoundStep, batch: PyTree, own_args: Mapping[str, Any], check: Check
    ) -> Results:
        plan, runner, params, sink, times = bound
        given = {**self._options.extra_args, **own_args}

        def prepare() -> None:
            began_s = time.perf_counter()
            self._join()
            self._waited_s = time.perf_counter() - began_s
            params.counts = MoveCounts()
            runner.values.counts()
            sink.begin(given, params)

        shares = shares_of(batch, self._options.micro_batches, self._weights)
        self._together.begin(self._named, _form(batch), prepare)
        try:
            try:
                began_s = time.perf_counter()
                params.begin()
                results: Results = runner(batch, params, sink.put, check, shares)
                step_s = time.perf_counter() - began_s
            finally:
                params.stop()  # no program reads them any more
            self._values = values = runner.values.counts()
            if plan.policy == "plan" and plan.evictions and len(times) < NUM_MEASURED:
                waited_s = values.waited_s + params.counts.waited_s
                times.append(StepTimes(step_s, waited_s, [*runner.call_s]))
            self._waited_s += sink.waited_s
            loss, aux = results
            began_s = time.perf_counter()
            if "value" in given and "value" not in own_args:
                given["value"] = on_this_process(loss)
            self._num_skipped += not sink.finish(given, results, check)
            self._waited_s += time.perf_counter() - began_s
        except BaseException:
            sink.abandon()
            raise
        return loss, aux if self._options.has_aux else None


def _form(batch: PyTree) -> str:
    leaves, tree = jax.tree.flatten(batch)
    shapes = [(str(result_type(leaf)), np.shape(leaf)) for leaf in leaves]
    return f"{tree} {shapes}"
