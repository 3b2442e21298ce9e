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
from jaxinf.streaming.endpoints import Endpoints
from jaxinf.streaming.move.params import ParamReader
from jaxinf.streaming.move.values import Values
from jaxinf.streaming.move.work_queues import WorkQueues
from jaxinf.streaming.plan.calls import Plan
from jaxinf.streaming.plan.choice import NUM_MEASURED, StepTimes, segments_to_recompute
from jaxinf.streaming.plan.compiled import Executables
from jaxinf.streaming.program.lifetimes import OrderedProgram
from jaxinf.streaming.program.meshes import on_this_process
from jaxinf.streaming.run import MAX_IN_FLIGHT, Runner
from jaxinf.transfer import ByteCounts
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


class CompiledStep:
    """The steps of a plan: their memory, files and compiled programs.

    Blocks while programs are compiled.

    Args:
      is_measured: Whether the first steps are, for ``policy="plan"`` to choose.

    Attributes:
      close: Frees memory and files; idempotent.
      metrics: Metrics of the last step that ended; None before.
    """

    def __init__(
        self,
        plan: Plan,
        ready: OrderedProgram,
        ends: Endpoints,
        group: Group,
        executables: Executables,
        *,
        is_measured: bool,
    ) -> None:
        self.metrics: StreamMetrics | None = None
        self._ends, self._group = ends, group
        self._num_measured = 0  # of the first steps
        if is_measured and plan.policy == "plan" and plan.evictions:
            self._num_measured = NUM_MEASURED
        self._times = list[StepTimes]()
        # What this process has kept of a step until all agree; none of one alone.
        self._errors = list[BaseException]()
        self._keep_errors = partial(keeping_errors, group, self._errors)
        self._jobs = jobs = WorkQueues()  # for all that a step moves, and updates
        self._waited_s = 0.0  # for the store, in the last step
        sink, unit_of = None, ends.needs.unit_of
        with ExitStack() as closing:
            params = ParamReader(
                unit_of, ends.reads, plan.reads, jobs, self._keep_errors, ends.version
            )
            closing.callback(params.close)
            if ends.sink is not None:
                sink = ends.sink(plan, ready, params, jobs)
                closing.callback(sink.close)
            values = Values(plan, ends.scratch(), jobs)
            closing.callback(values.close)
            closing.callback(jobs.close)  # first
            self._params, self._sink = params, sink
            self._runner = Runner(plan, executables, values)
            self.close = closing.pop_all().close

    @property
    def plan(self) -> Plan:
        return self._runner.plan

    def free_memory(self) -> None:
        """Frees the memory for reading params until the next run."""
        self._params.free_memory()

    def limit_store(self, num_bytes: int) -> None:
        """Gives updates so much memory for buffers; waits for those under way."""
        if self._ends.updates is None:
            return
        engine = self._ends.updates.engine
        engine.health.check()
        if num_bytes != engine.files.memory_bytes:
            engine.steps.join()
            engine.files.limit_memory(num_bytes)

    def choose_again(self) -> frozenset[int]:
        """Returns the segments to be recomputed, once, when the steps are measured."""
        if not self._num_measured or len(self._times) < self._num_measured:
            return frozenset()
        self._num_measured = 0
        return segments_to_recompute(self.plan, self._times)

    def run(
        self,
        batch: PyTree,
        shares: Sequence[float],
        extra_args: Mapping[str, Any],
        own_args: Mapping[str, Any],
        check: Callable[[], None],
    ) -> tuple[Any, PyTree, bool]:
        """Runs a step: all processes begin, run the programs, and end it alike.

        Args:
          shares: Shares, as of `Runner`.
          extra_args, own_args: Arguments of all steps, and of this one.
          check: Called where the step can be given up; raises if it must be.

        Returns:
          Loss, aux, and whether params have changed.
        """
        given, check = {**extra_args, **own_args}, self._keep_errors()(check)
        values = self._runner.values
        moved, waited_values_s = values.moved.snapshot(), values.waited_s
        self._begin(batch, given)
        try:
            loss, aux = self._run_programs(batch, shares, check)
            if "value" in given and "value" not in own_args:
                assert loss is not None, "a function has no arguments"
                given["value"] = on_this_process(loss)
            is_done = self._end(given, (loss, aux), check)
        except BaseException:
            self._end_programs(given_up=True)
            if self._sink is not None:
                self._sink.abandon()
            raise
        moved = values.moved.snapshot() - moved
        self.metrics = self._metrics(moved, values.waited_s - waited_values_s)
        return loss, aux, is_done

    def _begin(self, batch: PyTree, given: Mapping[str, Any]) -> None:
        """Begins a step in all processes; waits for updates of the step before.

        Raises:
          ProcessError: Another process has failed, does not come, or has a batch of
            another form.
        """
        self._errors.clear()

        def form() -> JsonValue:
            began_s = time.perf_counter()
            if engine is not None:
                steps, commits = engine.steps, self._ends.reads_commit
                (steps.wait if commits else steps.join)()
            self._waited_s = time.perf_counter() - began_s
            if self._sink is not None:
                self._sink.begin(given)
            leaves, tree = jax.tree.flatten(batch)
            shapes = [(str(result_type(leaf)), np.shape(leaf)) for leaf in leaves]
            return f"{tree} {shapes}"

        what = "a function" if self._sink is None else "a step"
        remedy, engine = "give all the same shapes", self._ends.engine
        try:
            self._group.agree(f"the batch of {what}", form, remedy)
        except ProcessError as error:
            if engine is not None and self._group.published("failed"):
                engine.health.fail(error)
            raise

    def _run_programs(
        self, batch: PyTree, shares: Sequence[float], check: Callable[[], None]
    ) -> tuple[jax.Array | None, PyTree]:
        """Runs the programs of a step; returns its loss and aux."""
        runner, params = self._runner, self._params
        is_measured = len(self._times) < self._num_measured
        how: dict[str, Any] = {"max_in_flight": 1 if is_measured else MAX_IN_FLIGHT}
        if self._sink is not None:
            how["hand_out"] = self._keep_errors()(self._sink.put)
        in_memory = self._ends.in_memory
        params.begin()
        get = params.get if in_memory is None else in_memory()
        results = runner(
            batch, get, check=check, shares=shares, done=params.after_call, **how
        )
        self._end_programs(given_up=bool(self._errors))
        if is_measured:
            self._times.append(StepTimes([*runner.call_s], [*runner.waited_inputs_s]))
        return results

    def _end_programs(self, *, given_up: bool) -> None:
        """Frees what programs have read, and of a step given up all that moves."""
        if given_up:
            self._jobs.reset()
            self._runner.values.reset()
        self._params.stop()

    def _end(
        self,
        given: Mapping[str, Any],
        results: tuple[Any, PyTree],
        check: Callable[[], None],
    ) -> bool:
        """Applies gradients, in all processes; returns whether params have changed."""
        agreed = partial(agree, self._ends.engine, self._errors)
        if self._sink is None:
            agreed(tuple)
            return False
        began_s = time.perf_counter()
        self._waited_s += self._sink.waited_s  # and later ones in the time of the end
        is_done = self._sink.finish(given, results, check, agreed)
        self._waited_s += time.perf_counter() - began_s
        return is_done

    def _metrics(self, moved: ByteCounts, waited_values_s: float) -> StreamMetrics:
        """Returns the metrics of the step that has ended.

        Args:
          moved, waited_values_s: What values have moved in it, and were waited for.
        """
        params, runner = self._params, self._runner
        spilled = (0, 0) if self._sink is None else self._sink.spilled_bytes
        return StreamMetrics(
            fetched_drive_bytes=params.read_bytes,
            fetched_memory_bytes=params.reused_bytes,
            spilled_memory_bytes=spilled[0],
            spilled_drive_bytes=spilled[1],
            offloaded_drive_bytes=moved.drive_write_bytes,
            offloaded_host_bytes=moved.link_up_bytes,
            prefetch_hit_rate=params.hit_rate,
            waited_params_s=params.waited_s,
            waited_values_s=waited_values_s,
            waited_device_s=runner.waited_s,
            waited_updates_s=self._waited_s,
            dispatched_s=runner.dispatched_s,
        )


@contextmanager
def keeping_errors(group: Group, errors: list[BaseException]) -> Iterator[None]:
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
    group, step = engine.group, engine.files.finished.step + 1

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
