"""Does something at calls of functions of the real code: a kill, an error, a note."""

import builtins
import itertools
import os
import signal
from collections.abc import Callable
from typing import Any, NoReturn


def at_call(
    owner: Any,
    name: str,
    number: int | str,
    action: Callable[[], Any],
    *,
    after: bool = False,
    patch: Any = builtins,
) -> None:
    """Does something before, or after, the `number`-th call from now on, from 1.

    Args:
      owner: the class or module that has the function.
      name: of the function.
      patch: pytest's monkeypatch, if the function is to come back.
    """
    calls = itertools.count(1)

    def act(*_: Any, **__: Any) -> None:
        if next(calls) == int(number):
            action()

    at_each_call(patch, owner, name, act, after=after)


def at_each_call(
    patch: Any,
    owner: Any,
    name: str,
    action: Callable[..., Any],
    *,
    after: bool = False,
) -> None:
    """Calls an action with the arguments of each call of a function, before or after.

    What the action raises is raised in place of the call.
    """
    real = getattr(owner, name)

    def called(*args: Any, **kwargs: Any) -> Any:
        if not after:
            action(*args, **kwargs)
        result = real(*args, **kwargs)
        if after:
            action(*args, **kwargs)
        return result

    patch.setattr(owner, name, called)


def raising(error: BaseException) -> Callable[..., NoReturn]:
    """Returns a function that raises, whatever it is given."""

    def call(*_: Any, **__: Any) -> NoReturn:
        raise error

    return call


def die() -> None:
    """Kills this process."""
    os.kill(os.getpid(), signal.SIGKILL)


def stop() -> None:
    """Stops this process until SIGCONT."""
    os.kill(os.getpid(), signal.SIGSTOP)


def interrupt() -> None:
    """Sends this process Ctrl-C."""
    os.kill(os.getpid(), signal.SIGINT)
