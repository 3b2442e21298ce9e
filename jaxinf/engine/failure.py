"""Whether a store can be used, and who has been told why it cannot.

Invariant: nobody is told of a failure twice, and it is never lost.
"""

import enum
import logging
import os
from pathlib import Path

from jaxinf.engine.dispatched import has_unread_failure
from jaxinf.errors import StoreClosedError
from jaxinf.transfer import Failure

_LOG = logging.getLogger("jaxinf")


class _Told(enum.IntEnum):
    """Who has been told of a failure, so that nobody is told twice."""

    NOT = 0
    READERS = 1  # by JAX, of the results of a computation
    A_CALLER = 2  # by `check`, perhaps in a callback
    THE_PROGRAM = 3


class StoreHealth:
    """Whether a store can be used: it is open and has not failed.

    Attributes:
      failure: the failure that stopped the store; workers listen to it.
    """

    def __init__(self, path: Path) -> None:
        self.failure = Failure()
        self.is_closed = False
        self._path = path
        self._told = _Told.NOT

    def tell(self) -> None:
        """As `check`, called by the program itself."""
        if self.failure.error is not None:
            self._told = _Told.THE_PROGRAM
        self.check()

    def check(self) -> None:
        """Raises the failure that stopped the store, the original exception, if any."""
        if self.failure.error is not None:
            self._told = max(self._told, _Told.A_CALLER)
            self.failure.check()
        if self.is_closed:
            raise closed_error(self._path)

    @property
    def error(self) -> BaseException | None:
        """The exception that stopped the store."""
        return self.failure.error

    def fail(self, error: BaseException) -> None:
        """Stops the store for good, its workers too; the first error wins."""
        if not (self.is_closed and isinstance(error, StoreClosedError)):
            self.failure.set(error)

    def fail_computation(self, error: BaseException) -> None:
        """As `fail`, for an exception that fails a computation of the program's.

        The results of that computation tell it.
        """
        self.fail(error)
        self._told = max(self._told, _Told.READERS)

    def fail_beside_others(self, error: BaseException) -> None:
        """As `fail`, for an exception that gets to the program by no computation.

        The failure is logged once, and the next call that gets a state raises it. It
        may be older: a worker or a commit failed in the background.
        """
        self.fail_unannounced(error)
        self._announce()

    def fail_unannounced(self, error: BaseException) -> None:
        """As `fail_beside_others`, but nothing is logged, and no next call raises it.

        For a failure that the other processes do not know of: if this one raised it,
        they would wait for it in the next step. In that step all calls fail, and the
        statuses tell all processes.
        """
        self.fail(error)
        if self._told is not _Told.THE_PROGRAM:
            self._told = _Told.NOT

    def _announce(self) -> None:
        """Logs a failure that raises nowhere, and keeps it for `check_announced`."""
        error = self.failure.error
        if not (error is None or self.is_over or self in _ANNOUNCED):
            _ANNOUNCED.append(self)
            _LOG.error(
                "%s: %s: %s. The update is NaN, since other JAX devices wait for this "
                "one; the next step raises the error",
                self._path,
                type(error).__name__,
                error,
            )

    @property
    def is_unreported(self) -> bool:
        """Whether there is a failure that `check` has not raised yet."""
        return self.failure.error is not None and self._told < _Told.A_CALLER

    @property
    def is_untold(self) -> bool:
        """Whether there is a failure that neither `check` nor JAX has raised.

        JAX raises that of a computation at its call, or to those who read its results.
        """
        is_read = self._told is _Told.READERS and not has_unread_failure()
        return self.is_unreported and not is_read

    @property
    def is_over(self) -> bool:
        """Whether the program knows of the failure, or has closed the store."""
        return self.is_closed or self._told is _Told.THE_PROGRAM

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


def check_announced() -> None:
    """Raises a failure that no computation could raise.

    It does so again until the program knows of it by `StoreHealth.tell`, or has closed
    the store, since JAX may try a call in two ways.
    """
    if _ANNOUNCED:
        _ANNOUNCED[:] = [health for health in _ANNOUNCED if not health.is_over]
        for health in _ANNOUNCED:
            health.check()


def closed_error(path: Path) -> StoreClosedError:
    return StoreClosedError(
        f"{path}: the store is closed; open it again with jaxinf.open_store to go on "
        "at its last committed step"
    )


_ANNOUNCED: list[StoreHealth] = []
