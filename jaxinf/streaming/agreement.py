"""Processes begin and end a step alike.

    begin ─► programs, whose collectives need all ─► agree ─► updates ─► agree ─► commit

A process that fails on the way, or is interrupted, goes on with zeros in place of what
it lacks, since the others would wait for it in a collective. It says so where all
agree.

Invariant: all processes run the same programs in the same order, and end the same
steps. What one keeps until then is in a list of errors, which is empty for one alone.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence

import jax
import numpy as np
from jax.dtypes import result_type

from jaxinf.engine import Engine
from jaxinf.errors import ProcessError
from jaxinf.processes import Group
from jaxinf.typing import JsonValue, PyTree


def begin(
    group: Group,
    engine: Engine | None,
    what: str,
    batch: PyTree,
    prepare: Callable[[], None],
) -> None:
    """Begins a step or a call of a function in all processes.

    Args:
      prepare: Prepares for it; meets no other process.

    Raises:
      ProcessError: Another process has failed, does not come, or has a batch of
        another form.
    """

    def form() -> JsonValue:
        prepare()
        leaves, tree = jax.tree.flatten(batch)
        shapes = [(str(result_type(leaf)), np.shape(leaf)) for leaf in leaves]
        return f"{tree} {shapes}"

    try:
        group.agree(f"the batch of {what}", form, "give all the same shapes")
    except ProcessError as error:
        if engine is not None and group.has_failed:
            engine.health.fail(error)
        raise


@contextlib.contextmanager
def holding(group: Group, errors: list[BaseException]) -> Iterator[None]:
    """Keeps an error, or an interrupt, of its context until all agree."""
    try:
        yield
    except (Exception, KeyboardInterrupt) as error:
        if group.is_alone:
            raise
        errors.append(error)


def agree(
    engine: Engine | None,
    errors: Sequence[BaseException],
    action: Callable[[], Sequence[str]],
) -> list[str]:
    """Returns the leaves that refuse the step, those of all processes.

    Args:
      errors: What this process has kept.
      action: Waits for what is under way; returns the leaves that refuse the step here.
        Meets no other process.

    Raises:
      KeyboardInterrupt: This process was interrupted.
      ProcessError: Another one was, or failed.
      Exception: What this process has kept, or the action has raised.
    """
    if engine is None or engine.group.is_alone:
        return list(action())
    group, step = engine.group, engine.opened.finished.step + 1

    def value() -> JsonValue:
        refusing = list(action())
        for error in errors:  # those that the action has kept, too
            if isinstance(error, Exception):
                raise error
        return [refusing, bool(errors)]

    try:
        found = group.gather(f"the end of step {step}", value)
    except BaseException as error:
        engine.health.fail(error)
        raise
    if errors:  # interrupts alone
        raise errors[0]
    gave_up = [n for n, (_, is_interrupted) in enumerate(found) if is_interrupted]
    if gave_up:
        raise ProcessError(
            f"{group.where}: step {step}: process "
            f"{', '.join(map(str, gave_up))} was interrupted (Ctrl-C), so all "
            f"gave the step up; the store stays at step {step - 1}",
            gave_up,
            step,
        )
    return list(dict.fromkeys(name for refusing, _ in found for name in refusing))
