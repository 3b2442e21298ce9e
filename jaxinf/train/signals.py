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
    """Makes a first signal request a stop instead of ending the process.

    Outside the main thread, where Python allows no signal handlers, it does nothing.

    Yields:
      A list, to which the number of that signal is added.
    """
    requests: list[int] = []

    def request_stop(number: int, frame: Any) -> None:
        requests.append(number)
        for handled in _SIGNALS:
            signal.signal(handled, signal.SIG_DFL)
        text = f"{signal.Signals(number).name}: finishing this step; once more ends at "
        with contextlib.suppress(OSError):  # a handler may interrupt a print
            os.write(1, f"{text}once\n".encode())

    is_main = threading.current_thread() is threading.main_thread()
    before = {n: signal.signal(n, request_stop) for n in _SIGNALS if is_main}
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

    `step` would begin now; `requests` are the signals that this process has got.
    """
    if group.is_alone:
        return requests[0] if requests else 0
    announced = group.posted("stop")
    if due := [number for first, number in announced.values() if first < step]:
        return due[0]
    if requests and group.number not in announced:
        group.post("stop", [step, requests[0]])
    return 0
