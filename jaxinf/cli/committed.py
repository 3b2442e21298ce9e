"""The committed step of a store, for a command beside a run.

Invariant: if a step could not be pinned, and so may change, a warning says so.
"""

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

from jaxinf.store import StoreDirectory, WholeStep, look_at_store, readable_step
from jaxinf.terminal import make_console


@contextlib.contextmanager
def open_committed(path: Path) -> Iterator[tuple[StoreDirectory, WholeStep]]:
    """Yields a store, and its step as `jaxinf.store.readable_step`."""
    with readable_step(look_at_store(path)) as step:
        say_warning(path, step)
        yield StoreDirectory(path, step.manifest), step


def say_warning(path: Path, step: WholeStep) -> None:
    if step.warning:
        make_console(sys.stderr).print(f"warning: {path}: {step.warning}")
