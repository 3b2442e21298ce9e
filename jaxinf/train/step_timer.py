"""A step, measured: its time, what was busy in it, and on demand each piece of work.

Invariant: what is busy counts from the end of the step before, so a commit that goes on
counts for the step after. Evaluations and checkpoints count for none. A trace holds
whole steps, up to the end of the last one's commit, and is in memory until then.
"""

import contextlib
import json
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

import jax

from jaxinf.io import timeline, write_bytes_atomically
from jaxinf.io.spans import Busy
from jaxinf.train.config import TrainConfig
from jaxinf.train.memory import device_bytes, rss_bytes
from jaxinf.train.metrics import Costs
from jaxinf.train.trace import Sample, TracedStep, trace_document

_NUM_BEFORE, _NUM_TRACED = 2, 3  # steps that compile and read anew come first
_SAMPLE_S = 0.02


class StepTimer:
    """Measures the steps of a run, and traces those that the user has named.

    Args:
      step: number of steps done before.
    """

    def __init__(self, config: TrainConfig, step: int) -> None:
        first, last = config.trace or (0, 0)
        if config.trace is not None and not first:
            first = min(step + _NUM_BEFORE + 1, config.steps)
            last = step + _NUM_BEFORE + _NUM_TRACED
        self._first, self._last = first, min(last, config.steps)
        self._path = config.logs / "trace.json"
        self._traced: list[TracedStep] = []
        self._samples: list[Sample] = []
        self._is_over = threading.Event()
        self._sampler: threading.Thread | None = None
        self._step_s = self._busy_s = 0.0
        self._since_s: float | None = None
        self._busy = Busy({}, {})
        self._drives: dict[str, None] = {}  # that were busy so far

    @contextlib.contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Measures the body, and records it if it is one of the steps to trace."""
        if self._since_s is None:
            timeline.take_busy()
            self._since_s = time.monotonic()
        is_traced = self._first <= number <= self._last
        if is_traced and self._sampler is None:
            self._start_trace()
        began_s, at_s = time.monotonic(), time.perf_counter()
        with contextlib.ExitStack() as stack:
            if is_traced:
                mark = jax.profiler.StepTraceAnnotation("step", step_num=number)
                stack.enter_context(mark)
            yield
        if is_traced:
            self._traced.append(TracedStep(number, at_s, time.perf_counter()))
        ended_s = time.monotonic()
        self._step_s, self._busy_s = ended_s - began_s, ended_s - self._since_s
        self._busy, self._since_s = timeline.take_busy(), ended_s
        self._drives |= dict.fromkeys(self._busy.drives)

    def forget(self) -> None:
        """Counts what is busy from the begin of the next step."""
        self._since_s = None

    def fields(self) -> Mapping[str, Any]:
        """Returns the fields of a `StepLine` that it has measured, of the last step."""
        step_s, busy = self._step_s, self._busy
        none = dict.fromkeys(("read", "update", "write", "wait", "commit"), 0.0)
        phases = {**none, **busy.phases}
        phases.setdefault("program", max(0.0, step_s - phases["wait"]))
        used = rss_bytes()
        return {
            "step_s": step_s,
            "rss_bytes": used,
            "phases": {name: round(seconds, 6) for name, seconds in phases.items()},
            "drives": {
                name: round(min(1.0, busy.drives.get(name, 0.0) / self._busy_s), 4)
                for name in self._drives
            },
            "memory": {"host": used, "device": device_bytes()},
        }

    def ended(self, costs: Costs) -> None:
        """Called after each step; after the last traced one it blocks for its commit.

        Then it writes the trace.
        """
        if self._traced and self._traced[-1].number >= self._last:
            if not self._is_over.is_set():
                costs()
            self.close()

    def close(self) -> None:
        """Writes what was traced and is not written."""
        if self._sampler is None or self._is_over.is_set():
            return
        self._is_over.set()
        self._sampler.join()
        document = trace_document(timeline.stop(), self._traced, self._samples)
        write_bytes_atomically(self._path, json.dumps(document).encode())

    def _start_trace(self) -> None:
        self._sampler = threading.Thread(
            target=self._sample, name="jaxinf-trace", daemon=True
        )
        self._sampler.start()
        timeline.start(annotate=jax.profiler.TraceAnnotation)

    def _sample(self) -> None:
        """Notes the memory now and then."""
        is_over = False
        while not is_over:
            counts = {"process": rss_bytes()}
            if (on_device := device_bytes()) is not None:
                counts["JAX device"] = on_device
            self._samples.append(Sample(time.perf_counter(), counts))
            is_over = self._is_over.wait(_SAMPLE_S)
