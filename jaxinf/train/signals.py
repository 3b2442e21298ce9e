"""Ctrl-C and SIGTERM: the first asks for a clean stop, the second ends at once.

Invariant: processes of one run end after the same step. Python runs a handler between
the main thread's own instructions: after a program of XLA that is under way, at the
latest after the step.
"""

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

from jaxinf.processes import Group

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextlib.contextmanager
def stop_requests() -> Iterator[list[int]]:
    """Within its context, a first signal requests a stop instead of ending the process.

    It yields a list, to which the number of that signal is added. Outside the main
    thread, where Python allows no signal handlers, it does nothing.
    """
    requests: list[int] = []

    def ask(number: int, frame: Any) -> None:
        requests.append(number)
        for one in _SIGNALS:
            signal.signal(one, signal.SIG_DFL)
        text = f"{signal.Signals(number).name}: finishing this step; once more ends at "
        with contextlib.suppress(OSError):  # a handler may interrupt a print
            os.write(1, f"{text}once\n".encode())

    is_main = threading.current_thread() is threading.main_thread()
    before = {number: signal.signal(number, ask) for number in _SIGNALS if is_main}
    try:
        yield requests
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def stop_number(group: Group, step: int, requests: list[int]) -> int:
    """Returns the number of the signal after which all stop now; 0 to go on.

    A process that gets a signal before a step says so, makes that step, and stops. The
    others cannot begin the step after it before they can see that, since a step ends in
    all processes together.

    Args:
      step: the number of the step that would begin.
      requests: the signal that this process has got, if any.
    """
    if group.is_alone:
        return requests[0] if requests else 0
    said = group.published("stop")
    if due := [one for first, one in said.values() if first < step]:
        return due[0]
    if requests and group.number not in said:
        group.publish("stop", [step, requests[0]])
    return 0
