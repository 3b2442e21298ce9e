"""What happens after Ctrl-C: steps run on a thread that no interrupt leaves half-way.

    caller   run(body) ─► waits ─ Ctrl-C ─► gives it up, waits ─ Ctrl-C ─► raises
    thread   body ─► body ─► …                each ends by itself or at a `check`

Python raises an interrupt in the main thread, between any two instructions. Here that
thread only waits, and a body that was given up is over before the next one begins. What
it has begun is ended by who began it: programs by `Runner` (run.py), reads and updates
by `CompiledStep.run` (compiled_step.py), which leaves the store at its last step. One
that is past its last `check` still commits; the interrupt is raised all the same, and
the loss is gone.

Invariant: bodies run one after another, and each to its end.
"""

import contextvars
import threading
import weakref
from collections.abc import Callable
from typing import Any, TypeAlias

import jax

from jaxinf import compat
from jaxinf.errors import StreamError
from jaxinf.processes import Work, start_thread
from jaxinf.typing import PyTree

Check: TypeAlias = Callable[[], None]
"""Called where a step can be given up; raises if it is."""

RunBody: TypeAlias = Callable[[Callable[[Check], Any]], Any]
"""Returns what a body returns; blocks until it has ended, and all before it.

An interrupt is raised when the body has ended, by itself or at its next check; a second
one at once. Raises StreamError if another thread waits for its body.
"""


def step_thread() -> tuple[RunBody, Callable[[], None]]:
    """Starts a thread for bodies.

    Returns:
      What runs bodies, with which the thread ends; and what waits for one that was
      given up, if it is still under way.
    """
    queue = start_thread("jaxinf-step")
    last: list[tuple[Work, int, threading.Event]] = []

    def run(body: Callable[[Check], Any]) -> Any:
        caller, given_up = threading.get_ident(), threading.Event()
        for work, other, is_over in last:
            if not (work.ending.is_reached or is_over.is_set() or other == caller):
                raise StreamError(
                    "jaxinf.stream: expected one thread, found a step under way in "
                    "another; a step and its functions run one at a time, so call them "
                    "from one thread, or hold a lock"
                )
        found: list[Any] = []
        work = Work(_in_context(body, given_up, found))
        last[:] = [(work, caller, given_up)]
        try:
            queue.put(work)
            work.ending.wait()
        except BaseException:
            given_up.set()
            queue.put(work)  # unless it was; none runs twice
            work.ending.wait()
            raise
        error, work.error = work.error, None
        if error is None:
            return found.pop()
        try:
            raise error
        finally:
            del error  # its traceback refers to this frame

    def settle() -> None:
        if last and not last[0][0].ending.is_reached:
            run(lambda check: None)

    # Not at the end of the process: a last step may come after that.
    weakref.finalize(run, queue.put, None).atexit = False
    return run, settle


def _in_context(
    body: Callable[[Check], Any], given_up: threading.Event, found: list[Any]
) -> Callable[[], None]:
    """Returns a function that runs a body in the caller's context, and its config."""
    config: Any = jax.config  # what is set for this thread alone counts, too
    device, x64 = config.jax_default_device, config.jax_enable_x64
    context = contextvars.copy_context()

    def check() -> None:
        if given_up.is_set():
            raise KeyboardInterrupt

    def call() -> None:
        check()
        with jax.default_device(device), jax.enable_x64(x64):
            found.append(context.run(body, check))

    return call


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
