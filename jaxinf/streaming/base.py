"""What steps have in common: the end of a ``with`` block, and what they planned.

Invariant: a block that ends closes what it was entered with.
"""

from abc import ABC, abstractmethod
from types import TracebackType
from typing import Generic, Protocol, Self, TypeVar

from jaxinf.streaming.plan.plan import Plan
from jaxinf.streaming.plan.planner import Forecast
from jaxinf.streaming.plan.wear import Wear
from jaxinf.streaming.replanning import Planned, shown_plan
from jaxinf.streaming.run import Runner

__all__ = ["Closing", "PlannedStep"]


class Closing(ABC):
    """A context manager that closes itself."""

    @abstractmethod
    def close(self) -> None:
        """Frees what it holds; idempotent."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class _Ran(Protocol):
    """A plan and its runner, for batches of one shape."""

    @property
    def runner(self) -> Runner: ...

    @property
    def planned(self) -> Planned | None: ...


_Bound = TypeVar("_Bound", bound=_Ran)


class PlannedStep(Closing, Generic[_Bound]):
    """A training step with or without a store.

    Attributes:
      _last: What the last step ran, or the next one will; None before one is planned.
      _num_skipped: Number of skipped steps.
    """

    _last: _Bound | None = None
    _num_skipped: int = 0

    @property
    def plan(self) -> Plan | None:
        """The plan of the last step, or of the first once it is planned; else None."""
        bound = self._last
        if bound is None:
            return None
        return shown_plan(bound.runner.plan, bound.planned, self.wear)

    @property
    def forecast(self) -> Forecast | None:
        """With ``"plan"``, expected and found time and memory of a step.

        None while the first steps are measured.
        """
        planned = None if self._last is None else self._last.planned
        return None if planned is None else planned.forecast

    @property
    @abstractmethod
    def wear(self) -> Wear | None:
        """Bytes that the last steps wrote, and how long drives last."""

    @property
    def num_skipped(self) -> int:
        """Number of steps skipped for a non-finite gradient, with ``"skip"``."""
        return self._num_skipped
