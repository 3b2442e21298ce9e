"""The exit status of a program whose store failed without its knowledge.

Invariant: everything that Python does at exit is done before the status is set.
"""

import ctypes


def fail_at_exit() -> None:
    """Makes the process end with status 1; called while the interpreter exits.

    Python offers no way to change the status at that time. The C library calls its own
    functions after Python's, the last one first.
    """
    c = ctypes.CDLL(None)
    c.fflush(None)
    c.__cxa_atexit(c._exit, ctypes.c_void_p(1), None)
