"""Callbacks that Ctrl-C does not leave half-way, and waits that it may end.

    main thread   callback ─► waits ─ Ctrl-C: kept ─► returns ─► … ─► raise_kept
    thread        its function ─────────────────────► its end

Python raises an interrupt in the main thread, between any two instructions, and JAX may
run callbacks there. Invariant: no handler of a signal is installed or replaced; the
function of a callback runs to its end, and an interrupt that came meanwhile is raised
by the program's next call.
"""

import functools
import os
import threading
from collections.abc import Callable
from queue import SimpleQueue

_WAIT_S = 0.1


class Ending:
    """The end of another thread's work. A wait may be interrupted anywhere.

    `threading.Thread.join` is not used: before Python 3.13 one that Ctrl-C has ended
    takes the thread for ended, and the next one does not wait.
    """

    def __init__(self) -> None:
        self.is_reached = False
        self._lock = threading.Lock()
        self._lock.acquire()

    def reach(self) -> None:
        """Ends all waits, those to come included."""
        self.is_reached = True
        self._lock.release()

    def wait(self) -> None:
        """Blocks until the end. Several threads may wait."""
        while not self.is_reached:
            if self._lock.acquire(timeout=_WAIT_S):  # the flag tells, this wakes
                self._lock.release()


class Work:
    """A function to run once on another thread, and its exception."""

    def __init__(self, function: Callable[[], None]) -> None:
        self._function: Callable[[], None] | None = function
        self.error: BaseException | None = None
        self.ending = Ending()

    def run(self) -> None:
        """Runs the function, at the first call, and keeps its exception."""
        function, self._function = self._function, None
        if function is None:
            return
        try:
            function()
        except BaseException as error:
            self.error = error
        self.ending.reach()


_KEPT: list[BaseException] = []
"""At most one interrupt."""


def run_whole(function: Callable[[], None]) -> None:
    """Runs the function of a callback to its end; blocks.

    In the main thread it is run by another one. An interrupt is kept for `raise_kept`.
    """
    if threading.get_ident() != threading.main_thread().ident:
        function()
        return
    try:
        queue = _queue()
    except RuntimeError:  # the process may have no more threads
        function()
        return
    work, came = Work(function), list[BaseException]()
    while True:
        try:
            while not work.ending.is_reached:
                _KEPT.extend(came[: not _KEPT])
                queue.put(work)  # perhaps again, but none runs twice
                work.ending.wait()
            break
        except BaseException as interrupt:
            came += [interrupt]  # no more: another interrupt here would get out
    _KEPT.extend(came[: not _KEPT])
    if work.error is not None:
        raise work.error


def is_kept() -> bool:
    """Whether an interrupt waits for the end of a callback, or for `raise_kept`."""
    return bool(_KEPT)


def raise_kept() -> None:
    """Raises an interrupt that came during a callback, once, in the main thread."""
    if _KEPT and threading.get_ident() == threading.main_thread().ident:
        raise _KEPT.pop().with_traceback(None)


def start_thread(name: str) -> "SimpleQueue[Work | None]":
    """Returns the queue of a new thread, which runs works in turn until it gets None.

    Raises:
      RuntimeError: the process may have no more threads.
    """
    queue: SimpleQueue[Work | None] = SimpleQueue()
    threading.Thread(target=_serve, args=(queue,), name=name, daemon=True).start()
    return queue


def _serve(queue: "SimpleQueue[Work | None]") -> None:
    while (work := queue.get()) is not None:
        work.run()
        del work  # it would stay in memory until the next one


@functools.cache
def _queue() -> "SimpleQueue[Work | None]":
    """Returns the queue of the thread that runs callbacks of the main thread."""
    return start_thread("jaxinf-callback")


os.register_at_fork(after_in_child=_queue.cache_clear)
