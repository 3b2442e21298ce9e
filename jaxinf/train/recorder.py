"""Writes steps to the metrics and the screen, each after its commit is durable.

Invariant: only the end of a run waits for a commit in flight.
"""

from types import TracebackType

from jaxinf.train.backend import Costs
from jaxinf.train.metrics import MetricsLog, StepLine
from jaxinf.train.processes import SumLog
from jaxinf.train.progress import Progress


class Recorder:
    """Takes each step at its end and completes its line one step later."""

    def __init__(
        self,
        log: MetricsLog,
        progress: Progress,
        sums: SumLog | None = None,
    ) -> None:
        self._log, self._progress, self._sums = log, progress, sums
        self._held: tuple[StepLine, Costs] | None = None

    def __enter__(self) -> "Recorder":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self._complete()
            self._log.settle()
        except Exception:
            # That step's commit failed, so its line is dropped. After an exception,
            # that exception gives the reason.
            if kind is None:
                raise

    def add(self, line: StepLine, costs: Costs) -> None:
        """Takes a step with its results; its commit may still be in flight.

        Args:
          costs: returns the traffic; blocks at most until the next step's end.
        """
        self._complete()
        self._held = line, costs
        self._log.hold(line)
        self._progress.step(line)

    def _complete(self) -> None:
        if self._held is None:
            return
        (line, costs), self._held = self._held, None
        line = line.with_costs(costs())
        self._log.write(line)
        if self._sums is not None:
            self._sums.write(line)
        self._progress.costs(line)
