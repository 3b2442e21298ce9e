"""Exports of committed steps to a URL, each after its commit.

Invariant: no failure of an export stops the run. The next step's update waits for it.
"""

import logging
import threading
from dataclasses import dataclass

from jaxinf.engine.options import StoreOptions
from jaxinf.errors import ExchangeError
from jaxinf.exchange import (
    ExportOptions,
    check_exports,
    export_url,
    least_memory,
    url_of_step,
)
from jaxinf.processes import Group, is_interrupt_kept
from jaxinf.store import StoreDirectory, pinned_step, read_files_beside

_LOG = logging.getLogger("jaxinf")


@dataclass(frozen=True)
class ExportInfo:
    """A step that was due for export.

    Attributes:
      problem: Why it is not at the URL; empty if it is.
    """

    step: int
    url: str
    problem: str = ""


class _StopEvent(threading.Event):
    """Is set, too, while Ctrl-C waits for a callback, perhaps one that waits here."""

    def is_set(self) -> bool:
        return super().is_set() or is_interrupt_kept()


class Exports:
    """The exports of a store since it was opened.

    Attributes:
      current_url: The target of the export under way; empty without one.
      stop: When set, gives up the export under way and later ones.
    """

    def __init__(self, options: StoreOptions, group: Group) -> None:
        if options.export_to is not None and not group.is_alone:
            # None of the processes can be sure to see all chunks.
            raise ExchangeError(
                f"{group.where}: expected one process for exports beside training "
                f"(export_to={options.export_to}), found {group.count}; leave it out, "
                "keep checkpoints, and export them where all members can be seen: "
                f"jaxinf checkpoint export {group.where} URL --checkpoint NAME"
            )
        self.infos: list[ExportInfo] = []
        self.current_url, self.stop = "", _StopEvent()
        self._options, self._is_checked = options, False

    def check_url(self, last_step: int) -> None:
        """Refuses a URL that cannot take the next export; looks at it once."""
        every, url = self._options.export_every, self._options.export_to
        if url is not None and not self._is_checked:
            check_exports(url, (last_step // every + 1) * every)
            self._is_checked = True

    def export_step(self, directory: StoreDirectory, step: int) -> None:
        """Exports the step just committed; logs what prevents it; blocks."""
        path, url, problem = self._options.path, self._options.export_to, ""
        assert url is not None
        self.current_url = url = url_of_step(url, step)
        try:
            with pinned_step(directory) as pinned:
                pinned.check()
                options = ExportOptions(least_memory(pinned.manifest), stop=self.stop)
                export_url(pinned, url, beside=read_files_beside(path), options=options)
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
            goes_on = "" if self.stop.is_set() else "; training goes on"
            text = "%s: step %d is not exported to %s: %s. What is there is no export%s"
            _LOG.warning(text, path, step, url, problem, goes_on)
        self.infos.append(ExportInfo(step, url, problem))
        self.current_url = ""
