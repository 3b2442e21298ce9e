"""Committed steps of a store, or of each member of a run, for commands beside a run.

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
    agree_on_step,
    find_members,
    is_run,
    member_name,
    missing_members,
    open_for_reading,
    read_held_steps,
    readable_step,
)
from jaxinf.terminal import make_console

_FAILED, _UNSEEN = 1, 2


@contextlib.contextmanager
def open_committed(path: Path) -> Iterator[tuple[StoreDirectory, CommittedStep]]:
    with readable_step(open_for_reading(path)) as step:
        print_warning(path, step)
        yield StoreDirectory(path, step.manifest), step


def print_warning(path: Path, step: CommittedStep) -> None:
    if step.warning:
        make_console(sys.stderr).print(f"warning: {path}: {step.warning}")


def for_each_member(
    path: Path, action: Callable[[Path], bool], *, as_json: bool = False
) -> int:
    """Calls an action for a store, or for each member of a run; the exit status.

    It is 2 if a member cannot be seen, 1 if the action returned False for one, else 0.

    Args:
      action: Prints about the store of a path; returns whether it is sound.
      as_json: Whether lines of text go to standard error.
    """
    if not is_run(path):
        return 0 if action(path) else _FAILED
    members, errors = list[StoreDirectory](), dict[str, StoreFormatError]()
    for member_path in find_members(path):
        try:
            members.append(open_for_reading(member_path))
        except StoreFormatError as error:  # a drive is gone
            errors[member_path.name] = error
    if not members:
        raise next(iter(errors.values()))
    unseen = missing_members(members)
    console = make_console(sys.stderr if as_json else sys.stdout)
    num = len(members) + len(unseen)
    console.print(f"run of {num} processes: {_describe_agreement(members)}")
    status = 0
    for member in members:
        console.print(f"\n{member.path.name}")
        if not action(member.path):
            status = _FAILED
    for number in sorted(unseen):
        why = errors.get(member_name(number), "cannot be seen from here")
        console.print(printable(f"process {number}: {why}"))
        status = _UNSEEN
    return status


def _describe_agreement(members: Sequence[StoreDirectory]) -> str:
    try:
        step = agree_on_step([read_held_steps(member) for member in members])
    except ProcessError as error:
        return str(error)
    agreed = "no step yet" if step is None else f"step {step.step}"
    return f"{agreed}, from which all go on"
