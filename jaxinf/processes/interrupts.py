"""Callbacks and steps that Ctrl-C does not leave half-way, and waits that it may end.

    main thread   callback ─► waits ─ Ctrl-C: kept ─► returns ─► next call raises it
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


class Completion:
    """The end of another thread's work, for which any number of threads may wait.

    An interrupt may end a wait. `threading.Thread.join` is not used: before Python 3.13
    one that Ctrl-C has ended takes the thread for ended, and the next does not wait.
    """

    def __init__(self) -> None:
        self.is_complete = False
        self._lock = threading.Lock()
        self._lock.acquire()

    def complete(self) -> None:
        """Ends all waits, also those that have not begun."""
        self.is_complete = True
        self._lock.release()

    def wait(self) -> None:
        """Blocks until the end."""
        while not self.is_complete:
            if self._lock.acquire(timeout=_WAIT_S):  # it wakes; the flag decides
                self._lock.release()


class BackgroundCall:
    """A function to call once on another thread, and its exception."""

    def __init__(self, function: Callable[[], None]) -> None:
        self._function: Callable[[], None] | None = function
        self.error: BaseException | None = None
        self.completion = Completion()

    def run(self) -> None:
        """Calls the function unless it was called, and keeps its exception."""
        function, self._function = self._function, None
        if function is None:
            return
        try:
            function()
        except BaseException as error:
            self.error = error
        self.completion.complete()


_kept_interrupts: list[BaseException] = []
"""At most one interrupt."""


def run_uninterrupted(
    function: Callable[[], None], give_up: Callable[[], None] | None = None
) -> None:
    """Runs the function of a callback, or of a step, to its end; blocks.

    For the main thread another one runs it, after those before it. An interrupt is kept
    for `raise_kept_interrupt`.

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
    call, interrupts = BackgroundCall(function), list[BaseException]()
    num_ignored = math.inf if give_up is None else 1
    while True:
        try:
            while not call.completion.is_complete and len(interrupts) <= num_ignored:
                if give_up is None:
                    _kept_interrupts.extend(interrupts[: not _kept_interrupts])
                elif interrupts:
                    give_up()
                queue.put(call.run)  # perhaps again, but none runs twice
                call.completion.wait()
            break
        except BaseException as interrupt:
            interrupts += [interrupt]  # no more: another interrupt here would get out
    if give_up is None:
        _kept_interrupts.extend(interrupts[: not _kept_interrupts])
    is_interrupted = bool(interrupts) and give_up is not None
    error = interrupts.pop() if is_interrupted else call.error
    call.error = None
    try:
        if error is not None:
            raise error
    finally:
        del error  # its traceback refers to this frame


def is_interrupt_kept() -> bool:
    """Whether an interrupt waits for the program's next call to raise it."""
    return bool(_kept_interrupts)


def raise_kept_interrupt() -> None:
    """Raises an interrupt that came during a callback, once, in the main thread."""
    if _kept_interrupts and threading.get_ident() == threading.main_thread().ident:
        raise _kept_interrupts.pop().with_traceback(None)


@functools.cache
def _queue(are_callbacks: bool) -> "SimpleQueue[Callable[[], None]]":
    """Returns the queue of a thread that calls functions of the main thread in turn.

    Callbacks have one, and steps another. RuntimeError if there may be no more threads.
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
