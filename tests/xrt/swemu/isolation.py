"""Runs each test function in a sandbox, and fails it if it leaves anything behind.

All parameters of a function share a process, so that JAX is started and optimizers are
traced only once for them.
"""

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from _pytest.capture import CaptureManager
from _pytest.runner import runtestprotocol

from .build import Runtime
from .sandbox import Finished, Sandbox

__all__ = ["Isolation"]

LIMIT_S, LIMIT_EACH_S = 100.0, 20.0
"""Time for a function, and for each of its parameters; a `timeout` mark has others."""


class Isolation:
    """Tests of a run, by function."""

    def __init__(self):
        self._reports: dict[str, list[pytest.TestReport]] = {}

    def run(self, item: pytest.Item, runtime: Runtime) -> None:
        """Runs a test, fixtures and all, in a process of its own, and reports on it."""
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        if item.nodeid not in self._reports:
            function = _function(item)
            group = [one for one in item.session.items if _function(one) == function]
            self._reports |= self._run_together(group, runtime)
        for report in self._reports.pop(item.nodeid):
            item.ihook.pytest_runtest_logreport(report=report)
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)

    def _run_together(
        self, items: Sequence[pytest.Item], runtime: Runtime
    ) -> dict[str, list[pytest.TestReport]]:
        mark = items[0].get_closest_marker("timeout")
        limit_s = mark.args[0] if mark else LIMIT_S + LIMIT_EACH_S * len(items)
        with TemporaryDirectory() as scratch:
            file = Path(scratch) / "reports"
            file.touch()
            sandbox = Sandbox(runtime)
            try:
                finished = sandbox.call(lambda: _run(items, file), limit_s=limit_s)
            finally:
                left = sandbox.close()
            reports = _reports(items, file, finished)
        if left:
            last, text = items[-1], f"processes left: {left}"
            reports[last.nodeid].append(_failure(last, "teardown", text))
        return reports


def _function(item: pytest.Item) -> str:
    return item.nodeid.partition("[")[0]


def _run(items: Sequence[pytest.Item], file: Path) -> None:
    """Runs tests in their process; writes a line of reports for each."""
    # Otherwise pytest keeps temporary files in a directory of $USER.
    os.environ["PYTEST_DEBUG_TEMPROOT"] = str(file.parent)
    with file.open("a", buffering=1) as lines:
        for item, following in zip(items, [*items[1:], None], strict=True):
            reports = runtestprotocol(item, log=False, nextitem=following)
            hook = item.config.hook.pytest_report_to_serializable
            data = [hook(config=item.config, report=report) for report in reports]
            lines.write(json.dumps([item.nodeid, data]) + "\n")
    _close_cards()


def _close_cards() -> None:
    """Closes cards, which jaxinf keeps open until the end of a program.

    It works even if something, such as a traceback, still refers to a store.
    """
    if module := sys.modules.get("jaxinf.csd.cards.xrt"):
        for card in module._OPEN.values():
            for kernel in card._kernels.values():
                vars(kernel).clear()
            vars(card).clear()
    if module := sys.modules.get("jaxinf.csd.cards.library"):
        module.close_all()


def _reports(
    items: Sequence[pytest.Item], file: Path, finished: Finished
) -> dict[str, list[pytest.TestReport]]:
    found = dict(json.loads(line) for line in file.read_text().splitlines())
    reports = {}
    for item in items:
        hook = item.config.hook.pytest_report_from_serializable
        data = found.get(item.nodeid, ())
        reports[item.nodeid] = [hook(config=item.config, data=one) for one in data]
    if finished.status:
        missing = [item for item in items if item.nodeid not in found] or items[-1:]
        text = f"the test's process ended with status {finished.status}"
        if finished.timed_out:
            text = "the test's time was over; it was killed"
        for item in missing:
            reports[item.nodeid].append(_failure(item, "call", text + _captured(item)))
    return reports


def _captured(item: pytest.Item) -> str:
    """Returns the output of the test's process, which went to this process's files."""
    manager = item.config.pluginmanager.getplugin("capturemanager")
    assert isinstance(manager, CaptureManager)
    return "\n".join(("", *manager.read_global_capture()))


def _failure(item: pytest.Item, when: str, text: str) -> pytest.TestReport:
    return pytest.TestReport(
        nodeid=item.nodeid,
        location=item.location,
        keywords=dict.fromkeys(item.keywords, 1),
        outcome="failed",
        longrepr=text,
        when=when,  # type: ignore[arg-type]
    )
