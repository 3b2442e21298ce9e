"""What happens after Ctrl-C: steps run on a thread that no interrupt leaves half-way.

    caller   run(body) ─► waits ─ Ctrl-C ─► gives it up, waits ─ Ctrl-C ─► raises
    thread   body ─► body ─► …                each ends by itself or at a `check`

Python raises an interrupt in the main thread, between any two instructions. Here that
thread only waits, and a body that was given up is over before the next one begins.

Invariant: bodies run one after another, and each to its end.
"""

import contextvars
import threading
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias, TypeVar

import jax

from jaxinf import compat
from jaxinf.errors import StreamError
from jaxinf.interrupts import Work, start_thread
from jaxinf.typing import PyTree

Check: TypeAlias = Callable[[], None]
"""Called where a step can be given up; raises if it is."""

_T = TypeVar("_T")


class StepThread:
    """Runs bodies on a thread of its own; one caller at a time."""

    def __init__(self) -> None:
        self._queue = start_thread("jaxinf-step")
        self._last: _Body | None = None
        # Not at the end of the process: a last step may come after that.
        weakref.finalize(self, self._queue.put, None).atexit = False

    def run(self, body: Callable[[Check], _T]) -> _T:
        """Returns what a body returns; blocks until it has ended.

        An interrupt is raised when the body has ended, by itself or at its next check;
        a second one at once.

        Raises:
          StreamError: Another thread waits for its body.
        """
        last = self._last
        if last is not None and last.is_anothers:
            raise StreamError(
                "jaxinf.stream: expected one thread, found a step under way in "
                "another; a step and its functions run one at a time, so call them "
                "from one thread, or hold a lock"
            )
        run = self._last = _Body(body)
        try:
            self._queue.put(run)
            run.ending.wait()
        except BaseException:
            run.is_given_up = True
            self._queue.put(run)  # unless it was; none runs twice
            run.ending.wait()
            raise
        return run.take()

    def settle(self) -> None:
        """Waits for a body that was given up; raises as `run`."""
        if self._last is not None and not self._last.ending.is_reached:
            self.run(lambda check: None)


class _Body(Work):
    """A body to run, in the caller's context, and what it returned or raised."""

    def __init__(self, body: Callable[[Check], Any]) -> None:
        super().__init__(partial(self._call, body))
        self._context = contextvars.copy_context()
        config: Any = jax.config  # a context of this thread's alone counts, too
        self._device, self._x64 = config.jax_default_device, config.jax_enable_x64
        self._caller = threading.get_ident()
        self._value: Any = None
        self.is_given_up = False

    @property
    def is_anothers(self) -> bool:
        """Whether another thread than this one waits for it."""
        is_over = self.is_given_up or self.ending.is_reached
        return not is_over and self._caller != threading.get_ident()

    def _call(self, body: Callable[[Check], Any]) -> None:
        self.check()
        with jax.default_device(self._device), jax.enable_x64(self._x64):
            self._value = self._context.run(body, self.check)

    def check(self) -> None:
        if self.is_given_up:
            raise KeyboardInterrupt

    def take(self) -> Any:
        """Returns the body's value, or raises its error; forgets both."""
        value, error = self._value, self.error
        self._value = self.error = None
        if error is None:
            return value
        try:
            raise error
        finally:
            del error  # its traceback refers to this frame


def check_not_traced(*trees: PyTree) -> None:
    """Refuses a call inside `jax.jit`, `jax.grad`, `jax.vmap`, …: StreamError."""
    leaves = jax.tree.leaves(trees)
    is_traced = any(isinstance(leaf, compat.Tracer) for leaf in leaves)
    if is_traced or compat.is_in_transformation():
        raise StreamError(
            "jaxinf.stream: a step or function reads the store and runs programs of "
            "its own, found a call inside a function that JAX traces (jit, grad, vmap, "
            "scan, …); call it outside. Its gradients are taken inside already"
        )
