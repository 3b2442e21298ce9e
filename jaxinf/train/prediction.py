"""``plan.json``: what a run was predicted to take; and what was found, step by step.

Invariant: what is found changes nothing of a prediction. Without a machine it is made
beside the compilation, since tracing an optimizer of many leaves takes seconds.
"""

import json
import logging
import statistics
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

from jaxinf.command_line import UsageError
from jaxinf.errors import JaxinfError
from jaxinf.io import write_bytes_atomically
from jaxinf.terminal import format_bytes
from jaxinf.train.config import TrainConfig
from jaxinf.train.data.loader import Batch
from jaxinf.train.forecast import RunPlan, plan
from jaxinf.train.memory import peak_rss_bytes
from jaxinf.train.metrics import StepLine
from jaxinf.train.sizes import Sizes

_LOG = logging.getLogger("jaxinf")

_TOLERANCE = 1.3
_NUM_SLOW = 50
_NUM_KEPT = 1000  # steps whose median is found
_NUM_FIRST = 2  # steps that read and compile anew

_PARTS: Mapping[str, tuple[str, ...]] = {
    "programs": ("programs",),
    "the optimizer's updates": ("update",),
    "drives": ("params", "state", "values and gradients"),
}
_PHASES: Mapping[str, tuple[str, ...]] = {
    "programs": ("program",),
    "the optimizer's updates": ("update",),
    "drives": ("read", "write"),
}
"""Parts of a step, as the plan has them and as a step's line does."""


class Prediction:
    """A run's plan, held against its steps.

    Args:
      planned: the plan, which may still be made; None if there is none, and nothing is
        said then.
    """

    def __init__(self, planned: "Future[RunPlan | None]") -> None:
        self._coming = planned
        self._written: Future[None] | None = None
        self._steps: list[StepLine] = []
        self._num_slow = 0
        self._is_told = False

    @classmethod
    def of(cls, config: TrainConfig, batch: Batch) -> "Prediction":
        """Plans a run; blocks, with ``--machine`` for some seconds.

        Several processes, and cards, which only one may open, have no plan.

        Raises:
          UsageError: ``--machine`` names none, or one that lacks a rate.
        """
        if config.distributed or not config.csd.startswith("host"):
            return cls(_done(None))
        if config.machine is not None:
            return cls(_done(plan(config, batch)))
        with_thread = ThreadPoolExecutor(1, thread_name_prefix="jaxinf-plan")
        coming = with_thread.submit(_try_plan, config, batch)
        with_thread.shutdown(wait=False)
        return cls(coming)

    @property
    def _planned(self) -> RunPlan | None:
        """The plan; blocks until it is made."""
        return self._coming.result()

    def write(self, path: Path, step: int) -> None:
        """Writes the plan of a start of the run after `step` steps when it is made."""

        written = self._written = Future[None]()

        def write(_: object) -> None:
            try:
                if (planned := self._planned) is not None:
                    write_plan(planned)
            finally:
                written.set_result(None)

        def write_plan(planned: RunPlan) -> None:
            num_steps = max(0, planned.config.steps - step)
            document = {"version": 1, "first_step": step + 1, "num_steps": num_steps}
            text = json.dumps(document | planned.to_json(), indent=1)
            write_bytes_atomically(path, text.encode() + b"\n")

        self._coming.add_done_callback(write)

    # --- found ---------------------------------------------------------------------

    def add(self, line: StepLine) -> None:
        """Takes a step's complete line; warns once if steps stay slow."""
        if line.step_s is None:
            return
        self._steps.append(line)
        if len(self._steps) > _NUM_KEPT + _NUM_FIRST:
            del self._steps[_NUM_FIRST]
        planned = self._planned if self._coming.done() else None
        found = None if planned is None else planned.found
        if found is None:
            return
        is_slow = line.step_s > _TOLERANCE * found.step_s
        self._num_slow = self._num_slow + 1 if is_slow else 0
        if self._num_slow >= _NUM_SLOW and not self._is_told:
            self._is_told = True
            self._warn(found.step_s, found.phases)

    def _warn(self, planned_s: float, planned: Mapping[str, float]) -> None:
        last = self._steps[-_NUM_SLOW:]
        found_s = statistics.median(line.step_s or 0.0 for line in last)
        excess = {}
        for part, names in _PARTS.items():
            took = statistics.median(_seconds(line, part) for line in last)
            expected = sum(planned.get(name, 0.0) for name in names)
            excess[part] = took - expected, took, expected
        part = max(excess, key=lambda name: excess[name][0])
        _, took, expected = excess[part]
        _LOG.warning(
            "the last %d steps took %.3g s each, %.3g s were predicted; the part that "
            "is slower than predicted is %s: %.3g s, not %.3g. Measure this machine "
            "with 'jaxinf doctor --machine FILE', or see what else it does",
            _NUM_SLOW,
            found_s,
            planned_s,
            part,
            took,
            expected,
        )

    def lines(self) -> list[str]:
        """Says what was predicted, and what was found."""
        steps = self._steps[_NUM_FIRST:] or self._steps
        found = format_bytes(peak_rss_bytes())
        whole = self._planned
        if self._written is not None:
            self._written.result()  # the file is there when the run has ended
        if whole is None or not steps:
            return [f"memory  at most {found} resident"]
        planned, sizes = whole.found, whole.sizes
        found_s = statistics.median(line.step_s or 0.0 for line in steps)
        if planned is not None:
            said = f"predicted {planned.step_s:.3g} s a step"
            said += f", found {found_s:.3g} ({_off(found_s, planned.step_s)})"
        else:
            said = f"found {found_s:.3g} s a step; nothing predicted without --machine"
        lines = [f"time    {said}"]
        if (commits_s := _with_commit(steps, found_s)) is not None:
            lines.append(f"        {commits_s:.3g} s a step that commits (median)")
        if sizes.read_bytes or sizes.written_bytes:
            lines.append(f"drives  predicted {whole.most}{_traffic(sizes, steps)}")
        most = f"{format_bytes(sizes.memory_bytes)} beside the process and activations"
        if planned is not None and planned.peak_bytes is not None:
            most = format_bytes(planned.peak_bytes)
        lines.append(
            f"memory  predicted at most {most}, found at most {found} resident"
        )
        return lines


def _with_commit(steps: Sequence[StepLine], usual_s: float) -> float | None:
    """Returns the time of a step that commits; None if all do, or none.

    Most of a commit is beside the next step, so what that takes longer counts.
    """
    found = [
        (one.step_s or 0.0) + (after.step_s or 0.0) - usual_s
        for one, after in pairwise(steps)
        if one.commit_s is not None and after.commit_s is None
    ]
    return statistics.median(found) if found else None


def _traffic(sizes: Sizes, steps: Sequence[StepLine]) -> str:
    # A mean: with commits every k steps, most steps may write nothing.
    read = round(statistics.fmean(line.drive_read_bytes or 0 for line in steps))
    written = round(statistics.fmean(line.drive_write_bytes or 0 for line in steps))
    return (
        f"{format_bytes(sizes.read_bytes)} read and "
        f"{format_bytes(sizes.written_bytes)} written a step, found "
        f"{format_bytes(read)} and {format_bytes(written)}"
    )


def _try_plan(config: TrainConfig, batch: Batch) -> RunPlan | None:
    """Returns a run's plan; None, with a warning, for a run that cannot be planned."""
    try:
        return plan(config, batch)
    except (JaxinfError, UsageError) as error:
        _LOG.warning("the run goes on without a plan of it: %s", error)
        return None


def _done(planned: RunPlan | None) -> "Future[RunPlan | None]":
    made: Future[RunPlan | None] = Future()
    made.set_result(planned)
    return made


def _seconds(line: StepLine, part: str) -> float:
    phases = line.phases or {}
    return sum(phases.get(name, 0.0) for name in _PHASES[part])


def _off(found: float, planned: float) -> str:
    return f"{100 * (found / planned - 1):+.0f} %"
