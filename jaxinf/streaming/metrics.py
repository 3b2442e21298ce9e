"""Traffic and waiting times of a streamed step.

Invariant: the values are of one step, the last; nothing is summed over steps.
"""

from dataclasses import dataclass
from typing import Self

from jaxinf.streaming.bound import Bound
from jaxinf.streaming.move.mover import MoverCounts


@dataclass(frozen=True)
class StreamMetrics:
    """Traffic and waiting times of a step.

    Attributes:
      fetched_memory_bytes: Bytes of params that a program found in memory, because a
        program before it had used them.
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

    @classmethod
    def of(cls, bound: Bound, values: MoverCounts, waited_updates_s: float) -> Self:
        """Returns the metrics of a step from the counts of its parts."""
        params, spilled_bytes = bound.params.counts, bound.sink.spilled_bytes
        return cls(
            fetched_drive_bytes=params.num_read_bytes,
            fetched_memory_bytes=bound.ends.reused_bytes(bound.fitted),
            spilled_memory_bytes=spilled_bytes[0],
            spilled_drive_bytes=spilled_bytes[1],
            offloaded_drive_bytes=values.num_written_bytes,
            offloaded_host_bytes=values.num_out_bytes,
            prefetch_hit_rate=params.hit_rate,
            waited_params_s=params.waited_s,
            waited_values_s=values.waited_s,
            waited_device_s=bound.runner.waited_s,
            waited_updates_s=waited_updates_s,
            dispatched_s=bound.runner.dispatched_s,
        )
