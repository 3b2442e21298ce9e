"""A step, measured: its time, memory, what was busy, and on demand a trace.

Invariant: busy times count from the end of the step before, so a commit in flight
counts for the next step. Evaluations and checkpoints count for none. A trace holds
whole steps, up to the end of the last one's commit.
"""

import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import jax

from jaxinf.train.config import TrainConfig
from jaxinf.train.metrics import ReadCosts
from jaxinf.transfer import phase_totals

_NUM_BEFORE, _NUM_TRACED = 2, 3  # steps that compile and read anew come first
_Result = TypeVar("_Result")


class StepTimer:
    """Measures the steps of a run from one on, and on demand traces some early ones."""

    def __init__(self, config: TrainConfig, step: int) -> None:
        first = min(step + _NUM_BEFORE + 1, config.steps)
        last = min(step + _NUM_BEFORE + _NUM_TRACED, config.steps)
        self._traced = range(first, last + 1) if config.trace else range(0)
        self._folder, self._is_tracing = config.logs / "trace", False
        self._since_s: float | None = None
        self._drives: dict[str, None] = {}  # that were busy so far

    def measure(
        self, number: int, step: Callable[[], _Result]
    ) -> tuple[_Result, dict[str, Any]]:
        """Runs a step, traced if due; returns its result, and fields of `StepLine`."""
        if number in self._traced and not self._is_tracing:
            self._is_tracing = True
            options = jax.profiler.ProfileOptions()
            options.python_tracer_level = 0
            jax.profiler.start_trace(
                self._folder, create_perfetto_trace=True, profiler_options=options
            )
            phase_totals.annotate = jax.profiler.TraceAnnotation
        if self._since_s is None:
            phase_totals.take_busy()
            self._since_s = time.monotonic()
        began_s = time.monotonic()
        with jax.profiler.StepTraceAnnotation("step", step_num=number):
            result = step()
        ended_s = time.monotonic()
        step_s, busy_s = ended_s - began_s, ended_s - self._since_s
        busy, self._since_s = phase_totals.take_busy(), ended_s
        self._drives |= dict.fromkeys(busy.drives)
        idle = dict.fromkeys(("read", "update", "write", "wait", "commit"), 0.0)
        phases = {**idle, **busy.phases}
        phases.setdefault("program", max(0.0, step_s - phases["wait"]))
        resident_bytes = rss_bytes()
        return result, {
            "step_s": step_s,
            "rss_bytes": resident_bytes,
            "phases": {name: round(seconds, 6) for name, seconds in phases.items()},
            "drives": {
                name: round(min(1.0, busy.drives.get(name, 0.0) / busy_s), 4)
                for name in self._drives
            },
            "memory": {"host": resident_bytes, "device": _device_bytes()},
        }

    def reset(self) -> None:
        """Counts busy times only from the beginning of the next step on."""
        self._since_s = None

    def stop_due_trace(self, number: int, read_costs: ReadCosts) -> None:
        """Ends the trace after its last step, for whose commit it blocks."""
        if number == self._traced.stop - 1:
            read_costs()
            self.close()

    def close(self) -> None:
        if self._is_tracing:
            self._is_tracing, self._traced = False, range(0)
            phase_totals.annotate = None
            jax.profiler.stop_trace()


def rss_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def peak_rss_bytes() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return max(peak, rss_bytes())  # the kernel updates its peak only now and then


def _device_bytes() -> int | None:
    """Returns the memory in use on JAX devices here; None where it is the host's."""
    stats = [device.memory_stats() for device in jax.local_devices()]
    used = [s["bytes_in_use"] for s in stats if s and "bytes_in_use" in s]
    return sum(used) if used else None
