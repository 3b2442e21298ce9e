"""Ctrl-C while the main thread runs a callback of JAX's, or waits for a thread.

    SIGINT ─► handler ─► no callback is running ─► KeyboardInterrupt
                    └──► one is: a watcher calls the handler again when it has returned

An exception in a callback would fail the computation, and the store with it. Invariant:
only Python's own handler is replaced; a program's handler is called as always.
"""

import _thread
import signal
import sys
import threading
import time
from types import FrameType

from jaxinf import compat

__all__ = ["PATIENCE_S", "Ending", "Interrupts", "interrupts"]

_POLL_S = 1e-4
_WAIT_S = 0.1
PATIENCE_S = 1.0
"""Seconds from the first Ctrl-C in a callback after which a second ends it."""


class Interrupts:
    """Delivers SIGINT as `KeyboardInterrupt`, but not inside a callback.

    A second Ctrl-C after a second is delivered at once: the callback may wait for a
    drive that never answers.

    Attributes:
      num_raised: number of exceptions raised so far.
    """

    def __init__(self) -> None:
        self.num_raised = 0
        self._guard = threading.RLock()  # a handler may interrupt its own holder
        self._waiting_since_s: float | None = None
        self._is_watchers_call = False
        self._is_ending = False

    def install(self) -> None:
        """Replaces Python's own handler of SIGINT, in the main thread.

        Some programs set that handler again from time to time, as notebooks do for each
        cell, so every callback calls this. In other threads it does nothing.
        """
        if (
            threading.get_ident() == threading.main_thread().ident
            and signal.getsignal(signal.SIGINT) is signal.default_int_handler
        ):
            signal.signal(signal.SIGINT, self.handle)

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Handles SIGINT."""
        if self._is_ending:
            return
        is_watchers, self._is_watchers_call = self._is_watchers_call, False
        is_impatient = not is_watchers and self._has_waited_long()
        if is_impatient or not compat.is_in_callback(frame):
            self._end_wait()
            self.num_raised += 1
            signal.default_int_handler(number, frame)
        elif self._waiting_since_s is None:
            self._waiting_since_s = since_s = time.monotonic()
            # Not a `threading.Thread`: starting one takes locks.
            _thread.start_new_thread(self._watch, (since_s,))

    def _has_waited_long(self) -> bool:
        since_s = self._waiting_since_s
        return since_s is not None and time.monotonic() - since_s >= PATIENCE_S

    def _end_wait(self) -> None:
        """Ends the watcher's calls, including one that may be due right now."""
        with self._guard:
            self._waiting_since_s = None
        self._is_ending = True
        for _ in range(4):  # Python calls a due handler at the end of each turn
            pass
        self._is_ending = self._is_watchers_call = False

    def _watch(self, since_s: float) -> None:
        """Calls the handler in the main thread until it has raised."""
        main = threading.main_thread().ident
        assert main is not None
        while self._waiting_since_s == since_s:
            time.sleep(_POLL_S)
            if compat.is_in_callback(sys._current_frames().get(main)):
                continue
            with self._guard:
                if self._waiting_since_s == since_s:
                    self._is_watchers_call = True
                    _thread.interrupt_main()


interrupts = Interrupts()
"""The interrupts of this process."""


class Ending:
    """The end of another thread's work. A wait may be interrupted anywhere.

    `threading.Thread.join` is not used: before Python 3.13 one that Ctrl-C has ended
    takes the thread for ended, and the next one does not wait.

    Attributes:
      is_reached: Whether the work has ended.
    """

    def __init__(self) -> None:
        self.is_reached = False
        self._lock = threading.Lock()
        self._lock.acquire()

    def reach(self) -> None:
        """Notes the end, once."""
        self.is_reached = True
        self._lock.release()

    def wait(self) -> None:
        """Blocks until the end. Several threads may wait."""
        while not self.is_reached:
            if self._lock.acquire(timeout=_WAIT_S):  # the flag tells, this wakes
                self._lock.release()
