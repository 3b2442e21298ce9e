"""Finds the plugins for other platforms, and prints what was compiled at the end.

They are not in the environment of the other tests, where JAX would start them.
"""

import os
import sys
from collections.abc import Callable

import pytest

PLUGINS = os.environ.get("JAXINF_TEST_ACCELERATORS")
if PLUGINS and PLUGINS not in sys.path:
    sys.path.append(PLUGINS)

collect_ignore_glob = [] if PLUGINS else ["test_*.py"]


@pytest.fixture(autouse=True, scope="session")
def keeps_what_is_compiled() -> None:
    """Replaces the suite's: nothing here is compiled twice."""


@pytest.fixture
def note(request: pytest.FixtureRequest) -> Callable[..., None]:
    """Puts a line into the table of what was compiled."""

    def add(program: str, target: str, built: list) -> None:
        row = (
            program,
            target,
            round(sum(one.seconds for one in built), 1),
            sum(one.memory.alias_size_in_bytes for one in built),
            max(one.memory.temp_size_in_bytes for one in built),
            sum(len(one.callbacks) for one in built),
        )
        request.node.user_properties.append(("compiled", row))

    return add


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Prints the table: seconds, bytes of aliases and temporaries, callbacks."""
    rows = [
        row
        for reports in terminalreporter.stats.values()
        for report in reports
        if getattr(report, "when", None) == "call"
        for name, row in report.user_properties
        if name == "compiled"
    ]
    if not rows:
        return
    terminalreporter.section("compiled ahead of time")
    titles = ("program", "device", "seconds", "alias", "temporaries", "callbacks")
    for row in [titles, *sorted(map(tuple, rows))]:
        terminalreporter.write_line("{:<26}{:<9}{:>8}{:>12}{:>13}{:>11}".format(*row))
