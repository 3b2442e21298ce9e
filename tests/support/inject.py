"""Does something at calls of functions of the real code: a kill, an error, a note."""

import builtins
import itertools
import os
import signal


def at_call(owner, name, number, action, *, after=False, patch=builtins):
    """Does something before, or after, the `number`-th call from now on, from 1.

    With pytest's monkeypatch as `patch` the function comes back.
    """
    calls = itertools.count(1)

    def act(*_, **__):
        if next(calls) == int(number):
            action()

    at_each_call(patch, owner, name, act, after=after)


def at_each_call(patch, owner, name, action, *, after=False):
    """Calls an action with the arguments of each call of a function, before or after.

    What the action raises is raised in place of the call.
    """
    real = getattr(owner, name)

    def called(*args, **kwargs):
        if not after:
            action(*args, **kwargs)
        result = real(*args, **kwargs)
        if after:
            action(*args, **kwargs)
        return result

    patch.setattr(owner, name, called)


def raising(error):
    def call(*_, **__):
        raise error

    return call


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def stop():
    os.kill(os.getpid(), signal.SIGSTOP)


def interrupt():
    os.kill(os.getpid(), signal.SIGINT)
