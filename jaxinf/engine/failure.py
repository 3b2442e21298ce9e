"""The one failure of a store, shared by all threads that must stop.

Invariant: the first error is kept as it is, and every listener gets that object.
"""

import os
import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from jaxinf.errors import StoreClosedError

__all__ = ["Failure", "StoreHealth", "closed_error"]


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

    def set(self, error: BaseException) -> None:
        """Keeps the error if it is the first, and then tells the listeners."""
        with self._lock:
            if self._error is not None:
                return
            note = self.note()
            if note is not None:
                error.add_note(note)
            self._error, self._traceback = error, error.__traceback__
            listeners = list(self._listeners)
        for listener in listeners:
            listener()

    def check(self) -> None:
        """Raises the error, if there is one."""
        if self._error is not None:
            raise self._error.with_traceback(self._traceback)

    def listen(self, listener: Callable[[], None]) -> None:
        """Registers a listener; the failing thread calls it with the error kept."""
        with self._lock:
            self._listeners.append(listener)


class StoreHealth:
    """Whether a store can be used: it is open and has not failed.

    Attributes:
      failure: the failure that stopped the store; workers listen to it.
      is_closed: whether `close` was called.
    """

    def __init__(self, path: Path) -> None:
        self.failure = Failure()
        self.is_closed = False
        self._path = path
        self._is_reported = False

    def check(self) -> None:
        """Raises the failure that stopped the store, the original exception, if any."""
        if self.failure.error is not None:
            self._is_reported = True
            self.failure.check()
        if self.is_closed:
            raise closed_error(self._path)

    def is_for(self, error: BaseException) -> bool:
        """Whether an error is a failure, and not a consequence of `close`."""
        return not (self.is_closed and isinstance(error, StoreClosedError))

    @property
    def is_unreported(self) -> bool:
        """Whether there is a failure that `check` has not raised yet."""
        return self.failure.error is not None and not self._is_reported

    def disown(self) -> None:
        """Ends the use of the store in a forked child; the parent keeps it."""
        self.failure = Failure()
        self.failure.set(
            StoreClosedError(
                f"{self._path}: the store was opened by process {os.getppid()}, this "
                "is a fork of it, and a store has one process; use it there, or open "
                "it here after it is closed there"
            )
        )
        self.is_closed = True


def closed_error(path: Path) -> StoreClosedError:
    """Makes the error for calls on a closed store."""
    return StoreClosedError(
        f"{path}: the store is closed; open it again with jaxinf.open_store to go on "
        "at its last committed step"
    )
