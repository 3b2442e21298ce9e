"""Ctrl-C and SIGTERM: the first asks for a clean stop, the second ends at once.

Invariant: both work while the main thread is inside a long computation, where Python
  cannot run signal handlers. A thread of our own reads the interpreter's wake-up pipe.
"""

import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from types import TracebackType

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_SHOW_CURSOR = "\x1b[?25h"


class StopRequest:
    """Within its context, signals request a stop instead of ending the process.

    It does nothing outside the main thread, where Python allows no signal handlers.

    Args:
      on_request: called once, from another thread, with the first signal's name.

    Attributes:
      number: the first signal's number, or 0 before.
    """

    def __init__(self, on_request: Callable[[str], None]) -> None:
        self._on_request = on_request
        self.number = 0
        self._previous: dict[signal.Signals, object] = {}

    def __enter__(self) -> "StopRequest":
        if threading.current_thread() is not threading.main_thread():
            return self
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        self._old_fd = signal.set_wakeup_fd(self._writer.fileno())
        for number in _SIGNALS:
            self._previous[number] = signal.signal(number, _ignore)
        self._thread = threading.Thread(target=self._watch, name="signals", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not self._previous:
            return
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        signal.set_wakeup_fd(self._old_fd)
        self._writer.close()
        self._thread.join()
        self._reader.close()

    def _watch(self) -> None:
        while received := self._reader.recv(1):
            number = received[0]
            if number not in _SIGNALS:
                continue
            if self.number:
                if sys.stdout.isatty():
                    os.write(sys.stdout.fileno(), _SHOW_CURSOR.encode())
                os._exit(128 + number)
            self.number = number
            self._on_request(signal.Signals(number).name)


def _ignore(number: int, frame: object) -> None:
    """Does nothing; the watching thread handles the signal."""
