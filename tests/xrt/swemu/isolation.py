"""Runs each test in a sandbox, and fails it if it leaves anything behind."""

import json
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from _pytest.capture import CaptureManager
from _pytest.runner import runtestprotocol

from .build import Runtime
from .sandbox import Finished, Leftovers, Sandbox

__all__ = ["Totals", "run_isolated"]

LIMIT_S = 100.0
"""For a test; its `timeout` mark has another."""


class Totals:
    """What all tests together left behind."""

    def __init__(self):
        self.tests = 0
        self.processes = 0
        self.files = 0

    def add(self, leftovers: Leftovers) -> None:
        """Counts one test."""
        self.tests += 1
        self.processes += len(leftovers.processes)
        self.files += len(leftovers.files)


def run_isolated(item: pytest.Item, runtime: Runtime, totals: Totals) -> None:
    """Runs a test, fixtures and all, in a process of its own, and reports on it."""
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    mark = item.get_closest_marker("timeout")
    limit_s = mark.args[0] if mark else LIMIT_S
    with TemporaryDirectory() as scratch:
        file = Path(scratch) / "reports.json"
        sandbox = Sandbox(runtime)
        try:
            finished = sandbox.call(lambda: _run(item, file), limit_s=limit_s)
        finally:
            leftovers = sandbox.close()
        totals.add(leftovers)
        reports = _reports(item, file, finished)
    if problem := _problem(leftovers):
        reports.append(_failure(item, "teardown", problem))
    for report in reports:
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)


def _run(item: pytest.Item, file: Path) -> None:
    """In the test's process."""
    reports = runtestprotocol(item, log=False)
    hook = item.config.hook.pytest_report_to_serializable
    text = json.dumps([hook(config=item.config, report=report) for report in reports])
    file.write_text(text)


def _reports(
    item: pytest.Item, file: Path, finished: Finished
) -> list[pytest.TestReport]:
    if finished.status == 0:
        hook = item.config.hook.pytest_report_from_serializable
        data = json.loads(file.read_text())
        return [hook(config=item.config, data=one) for one in data]
    if finished.timed_out:
        return [_failure(item, "call", "the test's time was over; it was killed")]
    text = f"the test's process ended with status {finished.status}"
    return [_failure(item, "call", f"{text}\n{_captured(item)}")]


def _captured(item: pytest.Item) -> str:
    """What the test's process wrote: its output went to this process's files."""
    manager = item.config.pluginmanager.getplugin("capturemanager")
    assert isinstance(manager, CaptureManager)
    return "\n".join(manager.read_global_capture())


def _problem(leftovers: Leftovers) -> str:
    lines = [f"process left: {line}" for line in leftovers.processes]
    lines += [f"file left: {name}" for name in leftovers.files]
    return "\n".join(lines)


def _failure(item: pytest.Item, when: str, text: str) -> pytest.TestReport:
    return pytest.TestReport(
        nodeid=item.nodeid,
        location=item.location,
        keywords=dict.fromkeys(item.keywords, 1),
        outcome="failed",
        longrepr=text,
        when=when,  # type: ignore[arg-type]
    )
