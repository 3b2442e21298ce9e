"""Ctrl-C and SIGTERM: the first asks for a clean stop, the second ends at once.

Invariant: both work while the main thread is inside a long computation, where Python
  cannot run signal handlers. A thread of our own reads the interpreter's wake-up pipe.
"""

import contextlib
import dataclasses
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_SHOW_CURSOR = "\x1b[?25h"


@dataclasses.dataclass
class StopRequest:
    """The number of the first signal, or 0 before."""

    number: int = 0


@contextlib.contextmanager
def stop_request(say: Callable[[str], None]) -> Iterator[StopRequest]:
    """Within its context, signals request a stop instead of ending the process.

    It does nothing outside the main thread, where Python allows no signal handlers.

    Args:
      say: called once, from another thread, with the first signal's name.
    """
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    old_fd = signal.set_wakeup_fd(writer.fileno())
    handlers = {number: signal.signal(number, _ignore) for number in _SIGNALS}
    given = (reader, request, say)
    watching = threading.Thread(target=_watch, args=given, name="signals", daemon=True)
    watching.start()
    try:
        yield request
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(old_fd)
        writer.close()
        watching.join()
        reader.close()


def _watch(
    reader: socket.socket, request: StopRequest, say: Callable[[str], None]
) -> None:
    while received := reader.recv(1):
        number = received[0]
        if number not in _SIGNALS:
            continue
        if request.number:
            if sys.stdout.isatty():
                os.write(sys.stdout.fileno(), _SHOW_CURSOR.encode())
            os._exit(128 + number)
        request.number = number
        say(signal.Signals(number).name)


def _ignore(number: int, frame: object) -> None:
    """Does nothing; the watching thread handles the signal."""
