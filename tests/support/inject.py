"""Does something at the n-th call of a function of the real code: a kill, an error."""

import os
import signal
from collections.abc import Callable
from typing import Any


def at_call(
    owner: Any,
    name: str,
    number: int | str,
    action: Callable[[], None],
    *,
    after: bool = False,
) -> None:
    """Does something before, or after, the `number`-th call from now on, from 1.

    Args:
      owner: the class or module that has the function.
      name: of the function.
    """
    real, left = getattr(owner, name), int(number)

    def called(*args: Any, **kwargs: Any) -> Any:
        nonlocal left
        left -= 1
        is_now = not left
        if is_now and not after:
            action()
        result = real(*args, **kwargs)
        if is_now and after:
            action()
        return result

    setattr(owner, name, called)


def die() -> None:
    """Kills this process."""
    os.kill(os.getpid(), signal.SIGKILL)


def stop() -> None:
    """Stops this process until SIGCONT."""
    os.kill(os.getpid(), signal.SIGSTOP)


def interrupt() -> None:
    """Sends this process Ctrl-C."""
    os.kill(os.getpid(), signal.SIGINT)
