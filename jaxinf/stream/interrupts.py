"""Ctrl-C during a step: raised only where the step can be given up or is complete.

Invariant: an interrupt is never lost. It is raised by `check`, or at the end.
"""

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

from jaxinf.interrupts import is_replaceable

__all__ = ["Interrupts"]


class Interrupts:
    """Holds back Ctrl-C while programs run that read memory of the step.

    Python would raise it between any two instructions, also between a program's start
    and the record of that start. A second Ctrl-C is raised at once, so that a user need
    not wait for a drive that hangs. A handler that the user has set is not replaced.
    """

    def __init__(self) -> None:
        self._is_pending = False

    @contextlib.contextmanager
    def held_back(self) -> Iterator[None]:
        """Holds back interrupts during the body, and raises one at its end."""
        is_main = threading.current_thread() is threading.main_thread()
        handler = signal.getsignal(signal.SIGINT)
        if not is_main or not is_replaceable(handler):
            yield
            return
        self._is_pending = False
        signal.signal(signal.SIGINT, self._note)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, handler)
        self.check()

    def check(self) -> None:
        """Raises an interrupt that was held back.

        Raises:
          KeyboardInterrupt: Ctrl-C was pressed.
        """
        if self._is_pending:
            self._is_pending = False
            raise KeyboardInterrupt

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._is_pending:
            signal.default_int_handler(number, frame)
        self._is_pending = True
