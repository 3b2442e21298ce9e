"""Callbacks and steps that Ctrl-C does not leave half-way, and waits that it may end.

    main thread   callback ─► waits ─ Ctrl-C: kept ─► returns ─► … ─► raise_kept
    thread        its function ─────────────────────► its end

    main thread   step ─► waits ─ Ctrl-C: gives it up ─► raises it    a second: at once
    thread        its function ─────────► its next check │ its end

Python raises an interrupt in the main thread, between any two instructions, and JAX may
run callbacks there. Invariant: no handler of a signal is installed or replaced; each
function runs to its end, before the next one. An interrupt that came during a callback
is raised by the program's next call.
"""

import functools
import math
import os
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

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
    """A function to call once on another thread, and its exception."""

    def __init__(self, function: Callable[[], None]) -> None:
        self._function: Callable[[], None] | None = function
        self.error: BaseException | None = None
        self.ending = Ending()

    def run(self) -> None:
        """Calls the function, at the first call, and keeps its exception."""
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


def run_whole(
    function: Callable[[], None], give_up: Callable[[], None] | None = None
) -> None:
    """Runs the function of a callback, or of a step, to its end; blocks.

    In the main thread it is run by another one, after those before it. An interrupt is
    kept for `raise_kept`.

    Args:
      give_up: Asks the function to end early. Then an interrupt calls this and is
        raised once the function has ended; a second one is raised at once, and the
        function still ends before the next one begins.
    """
    if threading.get_ident() != threading.main_thread().ident:
        function()
        return
    try:
        queue = _queue(give_up is None)  # callbacks do not wait for a given-up step
    except RuntimeError:  # the process may have no more threads
        function()
        return
    work, came = Work(function), list[BaseException]()
    num_borne = math.inf if give_up is None else 1
    while True:
        try:
            while not work.ending.is_reached and len(came) <= num_borne:
                if give_up is None:
                    _KEPT.extend(came[: not _KEPT])
                elif came:
                    give_up()
                queue.put(work.run)  # perhaps again, but none runs twice
                work.ending.wait()
            break
        except BaseException as interrupt:
            came += [interrupt]  # no more: another interrupt here would get out
    if give_up is None:
        _KEPT.extend(came[: not _KEPT])
    error = came.pop() if came and give_up is not None else work.error
    work.error = None
    try:
        if error is not None:
            raise error
    finally:
        del error  # its traceback refers to this frame


def is_kept() -> bool:
    """Whether an interrupt waits for the end of a callback, or for `raise_kept`."""
    return bool(_KEPT)


def raise_kept() -> None:
    """Raises an interrupt that came during a callback, once, in the main thread."""
    if _KEPT and threading.get_ident() == threading.main_thread().ident:
        raise _KEPT.pop().with_traceback(None)


@functools.cache
def _queue(are_callbacks: bool) -> "SimpleQueue[Callable[[], None]]":
    """Returns the queue of a thread that calls functions of the main thread in turn.

    Args:
      are_callbacks: Whether these are callbacks, or steps.

    Raises:
      RuntimeError: the process may have no more threads.
    """
    queue: SimpleQueue[Callable[[], None]] = SimpleQueue()
    args = (queue,)
    threading.Thread(target=serve, args=args, name="jaxinf-whole", daemon=True).start()
    return queue


def serve(queue: "SimpleQueue[Any]") -> None:
    """Calls functions of a queue in turn until there is None; a thread's target."""
    while (function := queue.get()) is not None:
        function()
        del function  # it would stay in memory until the next one


os.register_at_fork(after_in_child=_queue.cache_clear)
