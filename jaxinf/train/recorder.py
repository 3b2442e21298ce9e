"""Steps into the metrics and onto the screen, each once its commit is durable.

Invariant: nothing waits here for a commit in flight, except at the end of a run.
"""

import dataclasses
from types import TracebackType

from jaxinf.train.backend import Costs
from jaxinf.train.metrics import MetricsLog, StepLine
from jaxinf.train.progress import Progress

__all__ = ["Recorder"]


class Recorder:
    """Takes each step as it ends and completes its line one step later."""

    def __init__(self, log: MetricsLog, progress: Progress) -> None:
        self._log, self._progress = log, progress
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
            # That step's commit failed, and its line goes; after an exception, that
            # one says why.
            if kind is None:
                raise

    def add(self, line: StepLine, costs: Costs) -> None:
        """Takes a step whose results are there and whose commit may be in flight.

        Args:
          line: all but its traffic.
          costs: what will say its traffic; blocks at most until the next step's end.
        """
        self._complete()
        self._held = line, costs
        self._log.hold(line)
        self._progress.step(line)

    def _complete(self) -> None:
        if self._held is None:
            return
        (line, costs), self._held = self._held, None
        line = dataclasses.replace(line, **costs())
        self._log.write(line)
        self._progress.costs(line)
