"""The end of a process that waits in a collective for one that never comes.

Invariant: all processes leave JAX's service together, the one that runs it last.
"""

import atexit
import logging
import os
import sys
import threading
import time
from collections.abc import Callable

from jaxinf import compat
from jaxinf.processes.group import Group, silent_groups

_GRACE_S = 10.0
_LEAVE_S = 1.5
_exit_lock = threading.Lock()  # held until the process ends
_is_exiting = threading.Event()


def exit_unless_known(
    group: Group, is_known: Callable[[], bool], error: BaseException
) -> None:
    """Ends this process soon if the program does not learn of a failure.

    Its main thread may wait in a collective for a process that never comes, and JAX
    cannot end that wait. The exit status is 1. Does not block.
    """
    if group.is_alone or not group.may_hang:
        return

    def watch() -> None:
        until_s = time.monotonic() + _GRACE_S
        while time.monotonic() < until_s:
            if is_known():
                return
            time.sleep(0.1)
        print(
            f"{type(error).__name__}: {error}\n{group.where}: process {group.number} "
            "ends, since it waits for another one in a collective",
            file=sys.stderr,
            flush=True,
        )
        with _exit_lock:
            end_process(group, 1)

    atexit.register(_exit)
    threading.Thread(target=watch, name="jaxinf-end", daemon=True).start()


def end_process(group: Group, status: int) -> None:
    """Ends this process at once; JAX would wait for the others.

    JAX aborts a process that finds another one or the service gone, so the process that
    runs the service waits longest.
    """
    assert group.service is not None
    leave_s = _LEAVE_S if group.number else 2 * _LEAVE_S
    if _is_exiting.is_set():  # JAX leaves already
        time.sleep(leave_s)
    else:
        group.service.leave(leave_s)
    os._exit(status)


def exit_if_peer_is_silent() -> None:
    """Ends this process with status 1 if another one is silent; called at its exit.

    JAX would wait for the silent one until its heartbeats count as missing, and abort.
    """
    if silent_groups and compat.coordination() is not None:
        logging.shutdown()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        with _exit_lock:
            _is_exiting.clear()  # JAX has not begun to leave
            end_process(silent_groups[0], 1)


def _exit() -> None:
    """Runs at exit, before JAX leaves the service; only one thread may leave it."""
    _is_exiting.set()
    with _exit_lock:
        pass
