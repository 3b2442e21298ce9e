"""Runs batches of one shape: a plan's programs, a source of params, a sink.

    begin ─► programs, whose collectives need all ─► agree ─► updates ─► agree ─► commit

A process that fails on the way, or is interrupted, goes on with zeros in place of what
it lacks, since the others would wait for it in a collective. It says so where all
agree.

Invariant: a step that ends early leaves nothing under way, and one whose memory or
files cannot be had leaves none behind. All processes run the same programs in the same
order, and end the same steps.
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
from jaxinf.streaming.backend import StepBackend
from jaxinf.streaming.move.params import ParamReader
from jaxinf.streaming.move.values import Values
from jaxinf.streaming.move.work_queues import WorkQueues
from jaxinf.streaming.plan.calls import Plan
from jaxinf.streaming.plan.compiled import Executables
from jaxinf.streaming.plan.recompute import (
    NUM_MEASURED,
    StepTimes,
    segments_to_recompute,
)
from jaxinf.streaming.program.meshes import on_this_process
from jaxinf.streaming.run import MAX_IN_FLIGHT, Check, Runner
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
      is_measured: Whether ``policy="plan"`` measures the first steps, to choose.

    Attributes:
      close: Frees memory and files; idempotent.
      metrics: Metrics of the last step that ended; None before.
    """

    def __init__(
        self,
        plan: Plan,
        backend: StepBackend,
        group: Group,
        executables: Executables,
        *,
        is_measured: bool,
    ) -> None:
        self.metrics: StreamMetrics | None = None
        # The backend itself, whose program takes much memory, is not kept.
        self._group, self._engine = group, backend.engine
        self._updates, self._kind = backend.updates, backend.kind
        self._reads_commit = backend.reads_commit
        self._params_in_memory = backend.params_in_memory
        self._num_measured = 0  # of the first steps
        if is_measured and plan.policy == "plan" and plan.evictions:
            self._num_measured = NUM_MEASURED
        self._times = list[StepTimes]()
        # What this process has kept of a step until all agree; none of one alone.
        self._errors = list[BaseException]()
        self._keep_errors = partial(keeping_errors, group, self._errors)
        self._jobs = jobs = WorkQueues()  # for all that a step moves, and updates
        self._waited_s = 0.0  # for the store, in the last step
        with ExitStack() as closing:
            self._params = ParamReader(
                backend.needs.unit_of,
                backend.begin_reads,
                plan.reads,
                jobs,
                self._keep_errors,
                backend.version,
            )
            closing.callback(self._params.close)
            self._sink = backend.make_sink(plan, backend.ordered, self._params, jobs)
            closing.callback(self._sink.close)
            values = Values(plan, backend.make_scratch(), jobs)
            closing.callback(values.close)
            closing.callback(jobs.close)  # first
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
        if self._updates is None:
            return
        engine = self._updates.engine
        engine.health.check()
        if num_bytes != engine.files.memory_bytes:
            engine.steps.join()
            engine.files.limit_memory(num_bytes)

    def choose_recomputed(self) -> frozenset[int]:
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
        step_args: Mapping[str, Any],
        check: Check,
    ) -> tuple[Any, PyTree, bool]:
        """Runs a step: all processes begin, run the programs, and end it alike.

        Args:
          extra_args, step_args: Arguments of all steps, and of this one.

        Returns:
          Loss, aux, and whether params have changed.
        """
        arguments = {**extra_args, **step_args}
        check = self._keep_errors()(check)
        values = self._runner.values
        moved, waited_values_s = values.moved.snapshot(), values.waited_s
        self._begin(batch, arguments)
        try:
            loss, aux = self._run_programs(batch, shares, check)
            if "value" in arguments and "value" not in step_args:
                assert loss is not None, "a function has no arguments"
                arguments["value"] = on_this_process(loss)
            has_changed = self._end(arguments, (loss, aux), check)
        except BaseException:
            self._end_programs(is_given_up=True)
            self._sink.abandon()
            raise
        moved = values.moved.snapshot() - moved
        self.metrics = self._metrics(moved, values.waited_s - waited_values_s)
        return loss, aux, has_changed

    def _begin(self, batch: PyTree, arguments: Mapping[str, Any]) -> None:
        """Begins a step in all processes; waits for updates of the step before."""
        self._errors.clear()
        engine = self._engine

        def batch_form() -> JsonValue:
            began_s = time.perf_counter()
            if engine is not None:
                steps, is_committed = engine.steps, self._reads_commit
                (steps.wait if is_committed else steps.join)()
            self._waited_s = time.perf_counter() - began_s
            self._sink.begin(arguments)
            leaves, tree = jax.tree.flatten(batch)
            shapes = [(str(result_type(leaf)), np.shape(leaf)) for leaf in leaves]
            return f"{tree} {shapes}"

        what, remedy = f"the batch of {self._kind}", "give all the same shapes"
        try:
            self._group.agree(what, batch_form, remedy)
        except ProcessError as error:
            if engine is not None and self._group.posted("failed"):
                engine.health.fail(error)
            raise

    def _run_programs(
        self, batch: PyTree, shares: Sequence[float], check: Check
    ) -> tuple[jax.Array | None, PyTree]:
        runner, params = self._runner, self._params
        is_measured = len(self._times) < self._num_measured
        in_memory = self._params_in_memory
        params.begin()
        results = runner(
            batch,
            params.get if in_memory is None else in_memory(),
            self._keep_errors()(self._sink.put),
            check,
            shares,
            done=params.after_call,
            max_in_flight=1 if is_measured else MAX_IN_FLIGHT,
        )
        self._end_programs(is_given_up=bool(self._errors))
        if is_measured:
            self._times.append(StepTimes([*runner.call_s], [*runner.waited_inputs_s]))
        return results

    def _end_programs(self, *, is_given_up: bool) -> None:
        """Frees what programs have read, and of a step given up all that moves."""
        if is_given_up:
            self._jobs.reset()
            self._runner.values.reset()
        self._params.stop()

    def _end(
        self,
        arguments: Mapping[str, Any],
        results: tuple[Any, PyTree],
        check: Check,
    ) -> bool:
        """Applies gradients, in all processes; returns whether params have changed."""
        began_s = time.perf_counter()
        self._waited_s += self._sink.waited_s  # and later ones in the time of the end
        agree_all = partial(agree, self._engine, self._errors)
        has_changed = self._sink.finish(arguments, results, check, agree_all)
        self._waited_s += time.perf_counter() - began_s
        return has_changed

    def _metrics(self, moved: ByteCounts, waited_values_s: float) -> StreamMetrics:
        params, runner = self._params, self._runner
        in_memory_bytes, on_drive_bytes = self._sink.spilled_bytes
        return StreamMetrics(
            fetched_drive_bytes=params.read_bytes,
            fetched_memory_bytes=params.reused_bytes,
            spilled_memory_bytes=in_memory_bytes,
            spilled_drive_bytes=on_drive_bytes,
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

    def answer() -> JsonValue:
        refusing = list(action())
        for error in errors:  # those that the action has kept, too
            if isinstance(error, Exception):
                raise error
        return [refusing, bool(errors)]

    try:
        answers = group.gather(f"the end of step {step}", answer)
    except BaseException as error:
        engine.health.fail(error)
        raise
    if errors:  # interrupts alone
        raise errors[0]
    gave_up = [n for n, (_, is_interrupted) in enumerate(answers) if is_interrupted]
    if gave_up:
        raise ProcessError(
            f"{group.where}: step {step}: process "
            f"{', '.join(map(str, gave_up))} was interrupted (Ctrl-C), so all "
            f"gave the step up; the store stays at step {step - 1}",
        )
    return list(dict.fromkeys(name for refusing, _ in answers for name in refusing))
