"""What runs batches of one shape: a plan's programs, a source of params, a sink.

Invariant: what cannot be taken whole is not taken.
"""

from contextlib import ExitStack
from dataclasses import dataclass, replace

from jaxinf.streaming.home import StateHome
from jaxinf.streaming.move.params import Hold, Params
from jaxinf.streaming.move.values import Values
from jaxinf.streaming.move.work_queues import MoveCounts
from jaxinf.streaming.plan.calls import Plan
from jaxinf.streaming.plan.choice import NUM_MEASURED, StepTimes
from jaxinf.streaming.plan.compiled import Executables
from jaxinf.streaming.plan.fit import OrderedProgram
from jaxinf.streaming.plan.reads import used_bytes
from jaxinf.streaming.run import Runner
from jaxinf.streaming.update.sink import Sink


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


@dataclass
class CompiledStep:
    """The steps of a plan.

    Attributes:
      times: The steps that ``policy="plan"`` has measured.
      waited_s: Time that the last step waited for room for gradients, and for updates.
      values: What the last step has moved of values; None before the first.
    """

    plan: Plan
    runner: Runner
    params: Params
    sink: Sink
    times: list[StepTimes]
    waited_s: float = 0.0
    values: MoveCounts | None = None

    @property
    def metrics(self) -> StreamMetrics | None:
        """Metrics of the last step; None before the first."""
        counts, values, sink, found = self.params.counts, self.values, self.sink, 0
        if values is None:
            return None
        if (units := sink.claims.units) is not None:
            found = max(0, used_bytes(self.plan.calls, units) - counts.num_read_bytes)
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
            waited_device_s=self.runner.waited_s,
            waited_updates_s=self.waited_s,
            dispatched_s=self.runner.dispatched_s,
        )

    def measure(self, step_s: float) -> None:
        """Notes the times of the first steps, for ``policy="plan"``."""
        is_chosen = self.plan.policy == "plan" and self.plan.evictions
        if is_chosen and len(self.times) < NUM_MEASURED and self.values is not None:
            waited_s = self.values.waited_s + self.params.counts.waited_s
            self.times.append(StepTimes(step_s, waited_s, [*self.runner.call_s]))

    def close(self) -> None:
        """Frees memory and files; idempotent."""
        self.runner.values.close()
        self.params.close()
        self.sink.close()


def bind(
    plan: Plan,
    ready: OrderedProgram,
    sink: Sink,
    home: StateHome,
    executables: Executables,
    hold: Hold,
    times: list[StepTimes],
) -> CompiledStep:
    """Takes the room of a plan's steps; blocks while its programs are compiled."""
    with ExitStack() as undone:
        undone.callback(sink.close)
        sink.open(plan, ready)
        values = Values()
        if plan.is_offloaded:
            values = Values(plan, sink.scratch(), plan.tiers)
        undone.callback(values.close)
        runner = Runner(plan, executables, values)
        plan = replace(runner.plan, traffic=sink.traffic(plan))
        params = home.source(plan, sink, hold)
        undone.pop_all()
    return CompiledStep(plan, runner, params, sink, times)
