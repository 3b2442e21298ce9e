"""Exports of committed steps to a URL while training goes on.

     commit of a due step ─► pin ─► thread: chunks ─► documents ─► manifest ─► no pin
                       └──► skipped, if an earlier step is still under way

Invariant: an export reads a pinned step alone, so no step waits for the destination,
and no failure of an export stops the run.
"""

import contextlib
import itertools
import logging
import threading
from dataclasses import dataclass, replace
from typing import Literal

from jaxinf.engine.options import StoreOptions
from jaxinf.errors import ExchangeError, JaxinfError
from jaxinf.exchange import (
    Transit,
    check_exports,
    export_url,
    least_memory,
    url_of_step,
)
from jaxinf.processes import Group
from jaxinf.store import (
    PinnedStep,
    StoreDirectory,
    check_pinnable,
    files_beside,
    pinned_step,
    step_of,
)
from jaxinf.terminal import format_bytes
from jaxinf.typing import ProgressCallback

_LOG = logging.getLogger("jaxinf")
_LOOK_S = 0.2
_PATIENCE_LOOKS = 5


@dataclass(frozen=True)
class ExportInfo:
    """A step that was due for export.

    Attributes:
      step: its number.
      url: where it is, or was to be.
      outcome: ``"skipped"``: the step before was still under way.
      problem: why it failed; else empty.
    """

    step: int
    url: str
    outcome: Literal["exported", "skipped", "failed", "under way"]
    problem: str = ""


class _Export:
    """A step that is due, and its export in a thread of its own."""

    def __init__(self, step: int, url: str) -> None:
        self.info = ExportInfo(step, url, "under way")
        self.stop, self.ended = threading.Event(), threading.Event()
        self.done_bytes, self.total_bytes = 0, 0

    def note(self, done_bytes: int, total_bytes: int) -> None:
        self.done_bytes, self.total_bytes = done_bytes, total_bytes

    def __str__(self) -> str:
        done, total = format_bytes(self.done_bytes), format_bytes(self.total_bytes)
        return f"step {self.info.step}, of which {done} of {total} are exported"


class Exports:
    """The exports of a store. Thread-safe.

    Raises:
      ExchangeError: the run has several processes, none of which can be sure to see
        all chunks.
    """

    def __init__(self, options: StoreOptions, group: Group) -> None:
        url, path = options.export_to, group.where
        if url is not None and not group.is_alone:
            raise ExchangeError(
                f"{path}: expected one process for exports beside training "
                f"(export_to={url}), found {group.count}; leave it out, keep "
                "checkpoints, and export them where all members can be seen, also "
                f"beside the run: jaxinf checkpoint export {path} URL --checkpoint NAME"
            )
        self._options = options
        self._due: list[_Export] = []
        self._current: _Export | None = None
        self._is_checked = False

    def check(self, step: int) -> None:
        """Refuses a place that cannot be used, once, before the first step; blocks.

        Args:
          step: the step from which the run goes on.

        Raises:
          ExchangeError: the place cannot be used, or has another run's export.
        """
        url, every = self._options.export_to, self._options.export_every
        if not self._is_checked and url is not None:
            check_exports(url, (step // every + 1) * every)
            self._is_checked = True

    def infos(self) -> list[ExportInfo]:
        """Returns the steps that were due so far, the last one perhaps under way."""
        return [export.info for export in self._due]

    # --- a step --------------------------------------------------------------------

    def begin(self, directory: StoreDirectory, step: int) -> None:
        """Begins the export of the step just committed, or skips it.

        Called before the next step writes; blocks while the step is pinned. What
        prevents the export is logged.
        """
        url = self._options.export_to
        assert url is not None
        export, last = _Export(step, url_of_step(url, step)), self._current
        self._due.append(export)
        if last is not None and not last.ended.is_set():
            export.info = replace(export.info, outcome="skipped")
            _LOG.warning(
                "%s: step %d is not exported, since an earlier one is still under way: "
                "%s; training goes on. Export fewer steps",
                self._options.path,
                step,
                last,
            )
            return
        pin = contextlib.ExitStack()
        try:
            check_pinnable(directory)
            pinned = pin.enter_context(pinned_step(directory))
            self._current = export
            threading.Thread(
                target=self._run,
                args=(export, pinned, pin),
                name="jaxinf-export",
                daemon=True,
            ).start()
        except (JaxinfError, OSError, RuntimeError) as error:
            pin.close()
            self._end(export, error)

    def _run(
        self, export: _Export, pinned: PinnedStep, pin: contextlib.ExitStack
    ) -> None:
        problem: Exception | None = None
        try:
            with pin:
                self._write(export, pinned)
        except Exception as error:
            problem = error
        self._end(export, problem)

    def _end(self, export: _Export, error: Exception | None) -> None:
        outcome, problem = "exported", ""
        if error is not None:
            outcome, problem = "failed", f"{type(error).__name__}: {error}"
            _LOG.warning(
                "%s: step %d is not exported to %s: %s. What is there, if anything, is "
                "no export yet%s",
                self._options.path,
                export.info.step,
                export.info.url,
                problem,
                "" if export.stop.is_set() else "; training goes on",
            )
        export.info = replace(export.info, outcome=outcome, problem=problem)
        export.ended.set()

    def _write(self, export: _Export, pinned: PinnedStep) -> None:
        step = step_of(pinned.directory, pinned.path)
        step.check()
        transit = Transit(
            least_memory(step.manifest), progress=export.note, stop=export.stop
        )
        beside = files_beside(self._options.path)
        export_url(step, export.info.url, beside=beside, transit=transit)

    # --- the end -------------------------------------------------------------------

    def end(
        self, *, waits: bool = True, progress: ProgressCallback | None = None
    ) -> None:
        """Waits for the export under way, or gives it up; its pin is gone then.

        Args:
          waits: whether it waits. Ctrl-C gives the export up, and is raised.
          progress: called from time to time with the bytes done and those in all.
        """
        export = self._current
        if export is None or export.ended.is_set():
            return
        try:
            while waits and not export.ended.wait(_LOOK_S):
                if progress is not None:
                    progress(export.done_bytes, export.total_bytes)
        except KeyboardInterrupt:
            export.stop.set()
            export.ended.wait()
            raise
        export.stop.set()
        export.ended.wait()

    def close(self, *, waits: bool) -> None:
        """As `end`, and says that it waits, if that is not for a moment."""
        looks = itertools.count()

        def tell(done_bytes: int, total_bytes: int) -> None:
            if next(looks) == _PATIENCE_LOOKS:
                _LOG.warning(
                    "%s: closing waits for the export of %s; Ctrl-C gives it up",
                    self._options.path,
                    self._current,
                )

        self.end(waits=waits, progress=tell)
