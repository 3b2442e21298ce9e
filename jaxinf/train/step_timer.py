"""A step, measured: its time, what was busy in it, and on demand each piece of work.

Invariant: what is busy counts from the end of the step before, so a commit that goes on
counts for the step after. Evaluations and checkpoints count for none.
"""

import contextlib
import time
from collections.abc import Iterator, Mapping
from typing import Any

from jaxinf.io import timeline
from jaxinf.io.spans import Busy
from jaxinf.train.backend import Costs
from jaxinf.train.config import TrainConfig
from jaxinf.train.memory import device_bytes, rss_bytes
from jaxinf.train.trace import NUM_BEFORE, TraceRecorder

_NUM_TRACED = 3


class StepTimer:
    """Measures the steps of a run, and traces those that the user has named.

    Args:
      step: number of steps done before.
    """

    def __init__(self, config: TrainConfig, step: int) -> None:
        self._trace: TraceRecorder | None = None
        if config.trace is not None:
            first, last = config.trace
            if not first:
                first, last = step + NUM_BEFORE + 1, step + NUM_BEFORE + _NUM_TRACED
                first = min(first, config.steps)
            last = min(last, config.steps)
            self._trace = TraceRecorder(config.logs / "trace.json", first, last)
        self._step_s = self._busy_s = 0.0
        self._since_s: float | None = None
        self._busy = Busy({}, {})
        self._drives: dict[str, None] = {}  # that were busy so far

    @contextlib.contextmanager
    def step(self, number: int) -> Iterator[None]:
        if self._since_s is None:
            timeline.take_busy()
            self._since_s = time.monotonic()
        trace = self._trace
        tracing = contextlib.nullcontext() if trace is None else trace.step(number)
        began_s = time.monotonic()
        with tracing:
            yield
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
        """Called after each step with its costs; see `TraceRecorder.ended`."""
        if self._trace is not None:
            self._trace.ended(costs)

    def close(self) -> None:
        """Writes a trace that a run has ended in."""
        if self._trace is not None:
            self._trace.close()
