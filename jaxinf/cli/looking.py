"""Committed steps for commands beside a run: of a store, or of each member of a run.

Invariant: if a step could not be pinned, and so may change, a warning says so. Members
that cannot be seen are listed, and make the exit status 2.
"""

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from jaxinf.errors import ProcessError, StoreFormatError, printable
from jaxinf.store import (
    CommittedStep,
    StoreDirectory,
    agreed_step,
    find_members,
    held_steps,
    is_run,
    look_at_store,
    member_name,
    missing_members,
    readable_step,
)
from jaxinf.terminal import make_console

_FAILED, _UNSEEN = 1, 2


@contextlib.contextmanager
def open_committed(path: Path) -> Iterator[tuple[StoreDirectory, CommittedStep]]:
    """Yields a store, and its step as `jaxinf.store.readable_step`."""
    with readable_step(look_at_store(path)) as step:
        say_warning(path, step)
        yield StoreDirectory(path, step.manifest), step


def say_warning(path: Path, step: CommittedStep) -> None:
    if step.warning:
        make_console(sys.stderr).print(f"warning: {path}: {step.warning}")


def over_members(
    path: Path, action: Callable[[Path], bool], *, as_json: bool = False
) -> int:
    """Does something for a store, or for each member of a run.

    Args:
      action: does it for a path, and prints; whether that went well.
      as_json: print no lines of text around its output, which is a JSON document for
        each member.

    Returns:
      The exit status: 2 if a member cannot be seen, 1 if the action failed for one,
      else 0.
    """
    if not is_run(path):
        return 0 if action(path) else _FAILED
    members, refused = list[StoreDirectory](), dict[str, StoreFormatError]()
    for place in find_members(path):
        try:
            members.append(look_at_store(place))
        except StoreFormatError as error:  # a drive is gone
            refused[place.name] = error
    if not members:
        raise next(iter(refused.values()))
    unseen = missing_members(members)
    console = make_console(sys.stderr if as_json else sys.stdout)
    num = len(members) + len(unseen)
    console.print(f"run of {num} processes: {_agreed(members)}")
    status = 0
    for one in members:
        console.print(f"\n{one.path.name}")
        if not action(one.path):
            status = _FAILED
    for number in sorted(unseen):
        why = refused.get(member_name(number), "cannot be seen from here")
        console.print(printable(f"process {number}: {why}"))
        status = _UNSEEN
    return status


def _agreed(members: Sequence[StoreDirectory]) -> str:
    held = [held_steps(member) for member in members]
    try:
        step = agreed_step(held)
    except ProcessError as error:
        return str(error)
    agreed = "no step yet" if step is None else f"step {step.step}"
    return f"{agreed}, from which all go on"
