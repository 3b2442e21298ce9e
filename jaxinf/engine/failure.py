"""The one failure of a store: what stopped it, shared by all that must stop.

Invariant: the first error wins and is kept as the object it is; whoever is told of a
failure is told of that one.
"""

import threading
from collections.abc import Callable
from pathlib import Path

from jaxinf.errors import StoreClosedError

__all__ = ["Failure", "closed_error"]


class Failure:
    """Set once. Thread-safe; no method blocks for long."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._error: BaseException | None = None
        self._listeners: list[Callable[[], None]] = []

    @property
    def error(self) -> BaseException | None:
        """The first error, the same object every time; None while all is well."""
        return self._error

    def set(self, error: BaseException) -> None:
        """Keeps the error if it is the first, and then tells the listeners."""
        with self._lock:
            if self._error is not None:
                return
            self._error = error
            listeners = list(self._listeners)
        for listener in listeners:
            listener()

    def check(self) -> None:
        """Raises the error, if there is one."""
        if self._error is not None:
            raise self._error

    def listen(self, listener: Callable[[], None]) -> None:
        """Calls the listener, on the thread that fails, after the error is kept."""
        with self._lock:
            self._listeners.append(listener)


def closed_error(path: Path) -> StoreClosedError:
    """What is raised to those who ask something of a closed store."""
    return StoreClosedError(
        f"{path}: the store is closed; open it again with jaxinf.open_store to go on "
        "at its last committed step"
    )
