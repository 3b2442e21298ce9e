"""Runs batches of one shape: a plan's programs, a source of params, a sink.

    begin ─► programs, whose collectives need all ─► agree ─► updates ─► agree ─► commit

A process that fails on the way, or is interrupted, goes on with zeros in place of what
it lacks, since the others would wait for it in a collective. It says so where all
agree.

Invariant: what cannot be taken whole is not taken. A step that ends early leaves
nothing under way. All processes run the same programs in the same order, and end the
same steps.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.dtypes import result_type

from jaxinf.engine import Engine
from jaxinf.errors import ProcessError
from jaxinf.processes import Group
from jaxinf.streaming.home import Endpoints, Home, Sink
from jaxinf.streaming.move.params import Params
from jaxinf.streaming.move.values import Values
from jaxinf.streaming.move.work_queues import MoveCounts
from jaxinf.streaming.plan.calls import Plan
from jaxinf.streaming.plan.choice import NUM_MEASURED, StepTimes
from jaxinf.streaming.plan.compiled import Executables
from jaxinf.streaming.plan.reads import used_bytes
from jaxinf.streaming.program.lifetimes import OrderedProgram
from jaxinf.streaming.program.meshes import on_this_process
from jaxinf.streaming.run import MAX_IN_FLIGHT, Runner
from jaxinf.typing import JsonValue, PyTree


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


@dataclass(frozen=True, kw_only=True)
class CompiledStep:
    """The steps of a plan.

    Attributes:
      params_bytes: Bytes of params that its programs use.
      times: The steps that ``policy="plan"`` has measured.
      errors: What this process has kept of a step until all agree; none of one alone.
      hold: Keeps the errors of its context, or of what it decorates; see `holding`.
      closing: Frees memory and files.
    """

    home: Home
    group: Group
    runner: Runner
    params: Params
    sink: Sink
    params_bytes: int
    times: list[StepTimes]
    errors: list[BaseException]
    hold: Callable[[], Any]
    closing: ExitStack

    @property
    def plan(self) -> Plan:
        return self.runner.plan

    def close(self) -> None:
        """Frees memory and files; idempotent."""
        self.closing.close()

    def run(
        self,
        batch: PyTree,
        shares: Sequence[float],
        extra_args: Mapping[str, Any],
        own_args: Mapping[str, Any],
        check: Callable[[], None],
    ) -> tuple[Any, PyTree, StreamMetrics]:
        """Runs a step; returns its loss and aux.

        Args:
          shares: As of `Runner`.
          extra_args, own_args: Those of all steps, and of this one.
          check: Called where the step can be given up; raises if it must be.
        """
        given, check = {**extra_args, **own_args}, self.hold()(check)
        waited_s = self._begin(batch, given)
        runner, params, sink = self.runner, self.params, self.sink
        is_measured = self.plan.policy == "plan" and bool(self.plan.evictions)
        is_measured &= len(self.times) < NUM_MEASURED
        try:
            try:
                params.begin()
                results = runner(
                    batch,
                    params,
                    self.hold()(sink.put),
                    check,
                    shares,
                    max_in_flight=1 if is_measured else MAX_IN_FLIGHT,
                )
            finally:
                params.stop()  # no program reads them any more
            values = runner.values.counts()
            if is_measured:
                times = [*runner.call_s], [*runner.waited_inputs_s]
                self.times.append(StepTimes(*times))
            waited_s += sink.waited_s  # what waits while it finishes is in that time
            began_s = time.perf_counter()
            if "value" in given and "value" not in own_args:
                assert results[0] is not None, "a function has no arguments"
                given["value"] = on_this_process(results[0])
            agreed = partial(agree, self.home.engine, self.errors)
            is_done = sink.finish(given, results, check, agreed)
            self.home.num_skipped += self.home.has_loss and not is_done
            waited_s += time.perf_counter() - began_s
        except BaseException:
            sink.abandon()
            raise
        return *results, self._metrics(values, waited_s)

    def _begin(self, batch: PyTree, given: Mapping[str, Any]) -> float:
        """Begins a step in all processes; returns the time that it waited for updates.

        Raises:
          ProcessError: Another process has failed, does not come, or has a batch of
            another form.
        """
        self.errors.clear()
        waited_s = 0.0

        def form() -> JsonValue:
            nonlocal waited_s
            began_s = time.perf_counter()
            self.home.join()
            waited_s = time.perf_counter() - began_s
            self.params.counts = MoveCounts()
            self.runner.values.counts()
            self.sink.begin(given, self.params)
            leaves, tree = jax.tree.flatten(batch)
            shapes = [(str(result_type(leaf)), np.shape(leaf)) for leaf in leaves]
            return f"{tree} {shapes}"

        what, engine = f"the batch of {self.home.what}", self.home.engine
        try:
            self.group.agree(what, form, "give all the same shapes")
        except ProcessError as error:
            if engine is not None and self.group.said("failed"):
                engine.health.fail(error)
            raise
        return waited_s

    def _metrics(self, values: MoveCounts, waited_s: float) -> StreamMetrics:
        counts = self.params.counts
        return StreamMetrics(
            fetched_drive_bytes=counts.num_read_bytes,
            fetched_memory_bytes=max(0, self.params_bytes - counts.num_read_bytes),
            spilled_memory_bytes=self.sink.spilled_bytes[0],
            spilled_drive_bytes=self.sink.spilled_bytes[1],
            offloaded_drive_bytes=values.num_written_bytes,
            offloaded_host_bytes=values.num_out_bytes,
            prefetch_hit_rate=counts.hit_rate,
            waited_params_s=counts.waited_s,
            waited_values_s=values.waited_s,
            waited_device_s=self.runner.waited_s,
            waited_updates_s=waited_s,
            dispatched_s=self.runner.dispatched_s,
        )


def compile_step(
    plan: Plan,
    ready: OrderedProgram,
    ends: Endpoints,
    home: Home,
    group: Group,
    executables: Executables,
    times: list[StepTimes],
) -> CompiledStep:
    """Takes the room of a plan's steps; blocks while its programs are compiled."""
    errors, unit_of = list[BaseException](), ends.needs.unit_of
    hold = partial(holding, group, errors)
    with ExitStack() as closing:
        sink = ends.sink(plan, ready)
        closing.callback(sink.close)
        values = Values()
        if plan.is_offloaded:
            values = Values(plan, ends.scratch(), plan.tiers)
        closing.callback(values.close)
        runner = Runner(plan, executables, values)
        params = ends.source(plan, hold)
        closing.callback(params.close)
        return CompiledStep(
            home=home,
            group=group,
            runner=runner,
            params=params,
            sink=sink,
            params_bytes=0 if unit_of is None else used_bytes(plan.calls, unit_of),
            times=times,
            errors=errors,
            hold=hold,
            closing=closing.pop_all(),
        )


@contextmanager
def holding(group: Group, errors: list[BaseException]) -> Iterator[None]:
    """Keeps an error, or an interrupt, of its context until all agree."""
    try:
        yield
    except (Exception, KeyboardInterrupt) as error:
        if group.is_alone:
            raise
        errors.append(error)


def agree(
    engine: Engine | None,
    errors: Sequence[BaseException],
    action: Callable[[], Sequence[str]],
) -> list[str]:
    """Returns the leaves that refuse the step, those of all processes.

    Args:
      errors: What this process has kept.
      action: Waits for what is under way; returns the leaves that refuse the step
        here. Meets no other process.

    Raises:
      KeyboardInterrupt: This process was interrupted.
      ProcessError: Another one was, or failed.
      Exception: What this process has kept, or the action has raised.
    """
    if engine is None or engine.group.is_alone:
        return list(action())
    group, step = engine.group, engine.opened.finished.step + 1

    def value() -> JsonValue:
        refusing = list(action())
        for error in errors:  # those that the action has kept, too
            if isinstance(error, Exception):
                raise error
        return [refusing, bool(errors)]

    try:
        found = group.gather(f"the end of step {step}", value)
    except BaseException as error:
        engine.health.fail(error)
        raise
    if errors:  # interrupts alone
        raise errors[0]
    gave_up = [n for n, (_, is_interrupted) in enumerate(found) if is_interrupted]
    if gave_up:
        raise ProcessError(
            f"{group.where}: step {step}: process "
            f"{', '.join(map(str, gave_up))} was interrupted (Ctrl-C), so all "
            f"gave the step up; the store stays at step {step - 1}",
        )
    return list(dict.fromkeys(name for refusing, _ in found for name in refusing))
