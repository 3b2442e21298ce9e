"""Whether a store can be used, and whether the program knows why it cannot.

Invariant: a failure is never lost, and once the program knows of it, `close` is silent.
"""

import logging
import os
from pathlib import Path

from jaxinf.errors import StoreClosedError
from jaxinf.transfer import Failure

_LOG = logging.getLogger("jaxinf")


class StoreHealth:
    """Whether a store can be used: it is open and has not failed."""

    def __init__(self, path: Path) -> None:
        self.failure = Failure()  # of the store's threads
        self.is_closed = False
        self._path = path
        self._was_raised = False  # by `check`, perhaps in a callback of JAX
        self._is_known = False  # to the program itself

    @property
    def error(self) -> BaseException | None:
        return self.failure.error

    def raise_to_program(self) -> None:
        """Raises as `check`, in a call of the program, which then knows the failure."""
        self._is_known |= self.error is not None
        self.check()

    def check(self) -> None:
        """Raises the exception that stopped the store, or `StoreClosedError`."""
        self._was_raised |= self.error is not None
        self.failure.raise_error()
        if self.is_closed:
            raise StoreClosedError(
                f"{self._path}: the store is closed; open it again with "
                "jaxinf.open_store to go on at its last committed step"
            )

    def fail(self, error: BaseException) -> None:
        """Stops the store for good, its workers too; the first error wins."""
        if not (self.is_closed and isinstance(error, StoreClosedError)):
            self.failure.fail(error)

    def fail_announced(self, error: BaseException) -> None:
        """Stops the store for an exception that reaches the program by no computation.

        The failure is logged once, and the next call that gets a state raises it. It
        may be older: a worker or a commit failed in the background.
        """
        self.fail_unannounced(error)
        if not (self.error is None or self._is_settled or self in _announced):
            _announced.append(self)
            _LOG.error(
                "%s: %s. The update is NaN, since other JAX devices wait for this one; "
                "the next step raises the error",
                self._path,
                f"{type(self.error).__name__}: {self.error}",
            )

    def fail_unannounced(self, error: BaseException) -> None:
        """Stops the store; nothing is logged, and no next call raises the exception.

        For a failure that the other processes do not know of: if this one raised it,
        they would wait for it in the next step. In that step all calls fail, and the
        statuses tell all processes.
        """
        self.fail(error)
        self._was_raised = self._is_known

    @property
    def is_unraised(self) -> bool:
        return self.error is not None and not self._was_raised

    @property
    def _is_settled(self) -> bool:
        return self.is_closed or self._is_known

    def detach_fork(self) -> None:
        """Refuses every use of the store in a forked child; the parent keeps it."""
        self.failure = Failure()  # a thread of the parent may hold the old one's lock
        self.failure.fail(
            StoreClosedError(
                f"{self._path}: the store was opened by process {os.getppid()}, this "
                "is a fork of it, and a store has one process; use it there, or open "
                "it here after it is closed there"
            )
        )
        self.is_closed = True


_announced: list[StoreHealth] = []


def raise_announced() -> None:
    """Raises a failure that no computation could raise.

    Each call raises it until the program knows of it by `StoreHealth.raise_to_program`
    or has closed the store, since JAX may try a call in two ways.
    """
    _announced[:] = [health for health in _announced if not health._is_settled]
    for health in _announced:
        health.check()
