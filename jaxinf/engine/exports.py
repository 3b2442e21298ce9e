"""Exports of committed steps to a URL while training goes on.

     commit of a due step ─► pin ─► thread: chunks ─► documents ─► manifest ─► no pin
                       └──► skipped, if an earlier step is still under way

Invariant: an export reads a pinned step alone, so no step waits for the destination,
and no failure of an export stops the run.
"""

import contextlib
import logging
import threading
from dataclasses import dataclass
from typing import Literal, TypeAlias

from jaxinf.engine.options import StoreOptions
from jaxinf.errors import ExchangeError, JaxinfError
from jaxinf.exchange import (
    ExportOptions,
    check_exports,
    export_url,
    least_memory,
    url_of_step,
)
from jaxinf.processes import Group
from jaxinf.store import (
    StoreDirectory,
    WholeStep,
    check_pinnable,
    files_beside,
    pinned_step,
)
from jaxinf.terminal import format_bytes
from jaxinf.typing import ProgressCallback

_LOG = logging.getLogger("jaxinf")
_LOOK_S = 0.2


_Outcome: TypeAlias = Literal["exported", "skipped", "failed", "under way"]


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
    outcome: _Outcome
    problem: str = ""


class Exports:
    """The exports of a store, one at a time. Thread-safe.

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
        self._path, self._url, self._every = options.path, url, options.export_every
        self._infos: dict[int, ExportInfo] = {}
        self._is_checked = False
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()  # of the thread's export, as are:
        self._step = 0
        self._bytes = 0, 0

    def check(self, step: int) -> None:
        """Refuses a place that cannot be used, once, before the first step; blocks.

        Args:
          step: the step from which the run goes on.

        Raises:
          ExchangeError: the place cannot be used, or has another run's export.
        """
        if not self._is_checked and self._url is not None:
            check_exports(self._url, (step // self._every + 1) * self._every)
            self._is_checked = True

    def infos(self) -> list[ExportInfo]:
        """Returns the steps that were due so far, the last one perhaps under way."""
        return list(self._infos.values())

    def begin(self, directory: StoreDirectory, step: int) -> None:
        """Begins the export of the step just committed, or skips it.

        Called before the next step writes; blocks while the step is pinned. What
        prevents the export is logged.
        """
        if self._is_under_way:
            self._note(step, "skipped")
            _LOG.warning(
                "%s: step %d is not exported, since an earlier one is still under way: "
                "%s; training goes on. Export fewer steps",
                self._path,
                step,
                self._progress(),
            )
            return
        self._note(step, "under way")
        self._step, self._bytes, self._stop = step, (0, 0), threading.Event()
        pin = contextlib.ExitStack()
        try:
            check_pinnable(directory)
            pinned = pin.enter_context(pinned_step(directory))
            self._thread = threading.Thread(
                target=self._run, args=(pinned, pin), name="jaxinf-export", daemon=True
            )
            self._thread.start()
        except (JaxinfError, OSError, RuntimeError) as error:
            self._thread = None
            pin.close()
            self._note_failure(error)

    def end(
        self, *, waits: bool = True, progress: ProgressCallback | None = None
    ) -> None:
        """Waits for the export under way, or gives it up; its pin is gone then.

        Args:
          waits: whether it waits. Ctrl-C gives the export up, and is raised.
          progress: called from time to time with the bytes done and those in all.
        """
        thread = self._thread
        if thread is None or not thread.is_alive():
            return
        try:
            while waits and thread.is_alive():
                thread.join(_LOOK_S)
                if progress is not None:
                    progress(*self._bytes)
        finally:
            self._stop.set()
            thread.join()

    def close(self, *, waits: bool) -> None:
        """As `end`, and says that it waits."""
        if waits and self._is_under_way:
            _LOG.warning(
                "%s: closing waits for the export of %s; Ctrl-C gives it up",
                self._path,
                self._progress(),
            )
        self.end(waits=waits)

    # --- inside --------------------------------------------------------------------

    @property
    def _is_under_way(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def _run(self, step: WholeStep, pin: contextlib.ExitStack) -> None:
        def note(done_bytes: int, total_bytes: int) -> None:
            self._bytes = done_bytes, total_bytes

        try:
            with pin:
                step.check()
                memory_bytes = least_memory(step.manifest)
                options = ExportOptions(memory_bytes, progress=note, stop=self._stop)
                url = self._infos[self._step].url
                beside = files_beside(self._path)
                export_url(step, url, beside=beside, options=options)
            self._note(self._step, "exported")
        except Exception as error:
            self._note_failure(error)

    def _note(self, step: int, outcome: _Outcome, problem: str = "") -> None:
        assert self._url is not None
        url = url_of_step(self._url, step)
        self._infos[step] = ExportInfo(step, url, outcome, problem)

    def _note_failure(self, error: Exception) -> None:
        problem = f"{type(error).__name__}: {error}"
        self._note(self._step, "failed", problem)
        _LOG.warning(
            "%s: step %d is not exported to %s: %s. What is there, if anything, is "
            "no export yet%s",
            self._path,
            self._step,
            self._infos[self._step].url,
            problem,
            "" if self._stop.is_set() else "; training goes on",
        )

    def _progress(self) -> str:
        done, total = map(format_bytes, self._bytes)
        return f"step {self._step}, of which {done} of {total} are exported"
