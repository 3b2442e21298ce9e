"""The one failure of all threads that must stop then.

Invariant: the first error is kept as it is, and every listener gets that object.
"""

import threading
from collections.abc import Callable
from types import TracebackType


class Failure:
    """Set once. Thread-safe; no method blocks for long.

    Attributes:
      note: makes a note for the error, or None; called before anyone sees the error.
    """

    def __init__(self) -> None:
        self.note: Callable[[], str | None] = lambda: None
        self._lock = threading.Lock()
        self._error: BaseException | None = None
        self._traceback: TracebackType | None = None
        self._listeners: list[Callable[[], None]] = []

    @property
    def error(self) -> BaseException | None:
        """The first error, the same object every time; None if there is none."""
        return self._error

    def fail(self, error: BaseException) -> None:
        """Keeps the error if it is the first, and then tells the listeners."""
        with self._lock:
            if self._error is not None:
                return
            note = self.note()
            if note is not None:
                error.add_note(note)
            listeners = list(self._listeners)
            self._error, self._traceback = error, error.__traceback__
        for listener in listeners:
            listener()

    def raise_error(self) -> None:
        """Raises the error, if there is one."""
        if self._error is not None:
            raise self._error.with_traceback(self._traceback)

    def listen(self, listener: Callable[[], None]) -> None:
        """Registers a listener; the failing thread calls it with the error kept."""
        with self._lock:
            self._listeners.append(listener)
