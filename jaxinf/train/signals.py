"""Ctrl-C and SIGTERM: the first asks for a clean stop, the second ends at once.

Invariant: both work while the main thread is inside a long computation, where Python
  cannot run signal handlers. A thread of our own reads the interpreter's wake-up pipe.
  Processes of one run end after the same step.
"""

import contextlib
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator

from jaxinf.processes import Group

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_SHOW_CURSOR = "\x1b[?25h"


@contextlib.contextmanager
def stop_requests(say: Callable[[str], None]) -> Iterator[list[int]]:
    """Within its context, signals request a stop instead of ending the process.

    It does nothing outside the main thread, where Python allows no signal handlers.

    Args:
      say: called once, from another thread, with the first signal's name.

    Yields:
      A list, to which the number of the first signal is added.
    """
    requests: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield requests
        return
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    old_fd = signal.set_wakeup_fd(writer.fileno())
    # They do nothing; the watching thread sees the number.
    handlers = {n: signal.signal(n, lambda *_: None) for n in _SIGNALS}
    given = (reader, requests, say)
    watching = threading.Thread(target=_watch, args=given, name="signals", daemon=True)
    watching.start()
    try:
        yield requests
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(old_fd)
        writer.close()
        watching.join()
        reader.close()


def _watch(
    reader: socket.socket, requests: list[int], say: Callable[[str], None]
) -> None:
    while received := reader.recv(1):
        number = received[0]
        if number not in _SIGNALS:
            continue
        if requests:
            if sys.stdout.isatty():
                os.write(sys.stdout.fileno(), _SHOW_CURSOR.encode())
            os._exit(128 + number)
        requests.append(number)
        say(signal.Signals(number).name)


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
    said = group.said("stop")
    if due := [one for first, one in said.values() if first < step]:
        return due[0]
    if requests and group.number not in said:
        group.say("stop", [step, requests[0]])
    return 0
