"""Exports of committed steps to a URL while training goes on.

     commit of a due step ─► pin ─► thread: chunks ─► documents ─► manifest ─► no pin
                       └──► skipped, if an earlier step is still under way

Invariant: an export reads a pinned step alone, so no step waits for the destination,
and no failure of an export stops the run. In a run of several processes all export the
same step, each the chunks that it holds.
"""

import contextlib
import itertools
import logging
import threading
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from jaxinf.engine.options import StoreOptions
from jaxinf.errors import JaxinfError, ProcessError
from jaxinf.exchange import (
    ObjectStore,
    StepFiles,
    Transit,
    UrlExport,
    carried_files,
    check_exports,
    copy_chunks,
    export_url,
    files_beside,
    least_memory,
    url_of_step,
)
from jaxinf.processes import Group
from jaxinf.store import (
    CommitRecord,
    PinnedStep,
    StoreDirectory,
    check_pinnable,
    pinned_step,
    whole_manifest,
    whole_record,
)
from jaxinf.terminal import format_bytes
from jaxinf.typing import JsonValue, ProgressCallback

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
    """One export, and the group of processes that make it."""

    def __init__(self, step: int, url: str, run: Group, number: int) -> None:
        self.step, self.url = step, url
        self.stop, self.ended = threading.Event(), threading.Event()
        self.group = run.part(f"export-{number}", stop=self.stop)
        self.done_bytes, self.total_bytes = 0, 0

    def note(self, done_bytes: int, total_bytes: int) -> None:
        self.done_bytes, self.total_bytes = done_bytes, total_bytes

    def __str__(self) -> str:
        done, total = format_bytes(self.done_bytes), format_bytes(self.total_bytes)
        return f"step {self.step}, of which {done} of {total} are exported"


class Exports:
    """The exports of a store. Thread-safe."""

    def __init__(self, options: StoreOptions, group: Group) -> None:
        self._options, self._group = options, group
        self._found: dict[int, ExportInfo] = {}  # by the number of the due step
        self._current: _Export | None = None
        self._is_checked = False

    def check(self, step: int) -> None:
        """Refuses a place that cannot be used, once, before the first step; blocks.

        In a run of several processes all call it.

        Args:
          step: the step from which the run goes on.

        Raises:
          ExchangeError: the place cannot be used, or has another run's export.
          ProcessError: another process cannot use it, or has another.
        """
        url, every = self._options.export_to, self._options.export_every
        if self._is_checked or url is None:
            return
        due = (step // every + 1) * every

        def checked() -> JsonValue:
            check_exports(url, due)
            return [url, every]

        what = "export_to and export_every"
        self._group.agree(what, checked, "give the same to open_store in all")
        self._is_checked = True

    def infos(self) -> list[ExportInfo]:
        """Returns the steps that were due so far, the last one perhaps under way."""
        return list(self._found.values())

    # --- a step --------------------------------------------------------------------

    def begin(self, directory: StoreDirectory, step: int) -> None:
        """Begins the export of the step just committed, or skips it.

        Called before the next step writes; blocks while the step is pinned. What
        prevents the export is logged.
        """
        assert self._options.export_to is not None
        number, last = len(self._found), self._current
        url = url_of_step(self._options.export_to, step)
        export = _Export(step, url, self._group, number)
        self._found[number] = ExportInfo(step, export.url, "under way")
        pin = contextlib.ExitStack()
        try:
            if self._is_skipped(export.group, last):
                self._skip(number, export, last)
                return
            check_pinnable(directory)
            pinned = pin.enter_context(pinned_step(directory))
            self._current = export
            threading.Thread(
                target=self._run,
                args=(number, export, pinned, pin),
                name="jaxinf-export",
                daemon=True,
            ).start()
        except (JaxinfError, OSError, RuntimeError) as error:
            pin.close()
            self._end(number, export, error)

    def _is_skipped(self, group: Group, last: _Export | None) -> bool:
        """Whether the step is skipped; the first process decides for all."""
        is_skipped = group.first(
            "a step's turn", lambda: last is not None and not last.ended.is_set()
        )
        if last is not None and not is_skipped:
            last.stop.set()  # the first process has told its end, perhaps a failure
            last.ended.wait()
        return is_skipped

    def _skip(self, number: int, export: _Export, last: _Export | None) -> None:
        self._found[number] = ExportInfo(export.step, export.url, "skipped")
        if self._group.number == 0:
            _LOG.warning(
                "%s: step %d is not exported, since an earlier one is still under way: "
                "%s; training goes on. Export fewer steps",
                self._options.path,
                export.step,
                last,
            )

    def _run(
        self,
        number: int,
        export: _Export,
        pinned: PinnedStep,
        pin: contextlib.ExitStack,
    ) -> None:
        problem: Exception | None = None
        try:
            with pin:
                self._write(export, pinned)
        except Exception as error:
            problem = error
        self._end(number, export, problem)

    def _end(
        self, number: int, export: _Export, error: Exception | None = None
    ) -> None:
        outcome, problem = "exported", ""
        if error is not None:
            outcome, problem = "failed", f"{type(error).__name__}: {error}"
            with contextlib.suppress(ProcessError):  # the service is gone
                export.group.say("failed", problem)
            _LOG.warning(
                "%s: step %d is not exported to %s: %s. What is there, if anything, is "
                "no export yet%s",
                self._options.path,
                export.step,
                export.url,
                problem,
                "" if export.stop.is_set() else "; training goes on",
            )
        self._found[number] = ExportInfo(export.step, export.url, outcome, problem)
        export.ended.set()

    def _write(self, export: _Export, pinned: PinnedStep) -> None:
        manifest = pinned.directory.manifest
        step = StepFiles(pinned.path, manifest)
        memory_bytes = least_memory(manifest)
        transit = Transit(memory_bytes, progress=export.note, stop=export.stop)
        if self._group.is_alone:
            beside = files_beside(self._options.path)
            export_url(step, export.url, beside=beside, transit=transit)
            return
        with export.group.living():
            self._write_part(export, step, transit)

    def _write_part(self, export: _Export, step: StepFiles, transit: Transit) -> None:
        """Writes this process's part of an export of all."""
        group, place = export.group, ObjectStore(export.url, export.stop)
        parts = group.gather("record", lambda: _part_of_record(step.commit))
        records = [_as_record(step.commit, part) for part in parts]
        if len({record.commit for record in records}) > 1:
            raise ProcessError(
                f"{group.where}: expected step {step.commit.step} in all processes, "
                f"found steps {[record.step for record in records]}"
            )
        made: list[UrlExport] = []

        def begin() -> None:
            manifest = whole_manifest(step.manifest)
            record = whole_record(step.manifest, records)
            beside = {**files_beside(self._options.path), **carried_files(step)}
            made.append(UrlExport(place, manifest, record, beside))
            made[0].begin()

        def end() -> None:
            made[0].complete()

        group.first("the beginning", begin)
        group.in_all("the copy", lambda: copy_chunks(place, step, transit))
        group.first("the end", end)

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


def _part_of_record(record: CommitRecord) -> dict[str, Any]:
    sums = {n: s.astype(">u4").tobytes().hex() for n, s in record.checksums.items()}
    inexact = dict(record.inexact)
    return {
        "step": record.step,
        "commit": record.commit,
        "sums": sums,
        "inexact": inexact,
    }


def _as_record(own: CommitRecord, part: Mapping[str, Any]) -> CommitRecord:
    """Returns another process's record of a step; what all have is this one's."""
    sums = {
        name: np.frombuffer(bytes.fromhex(text), ">u4").astype(np.uint32)
        for name, text in part["sums"].items()
    }
    given = {name: part[name] for name in ("step", "commit", "inexact")}
    return replace(own, checksums=sums, **given)
