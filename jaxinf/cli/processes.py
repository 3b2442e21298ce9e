"""A command in all processes of a run, each of which sees its own member alone.

    process 0:  looks at its member ──┐            ┌─► prints the report of all
    process 1:  looks at its member ──┴─► service ─┴─► ends with the same status

Invariant: a process that works says so all the while; one that is silent for the time
  limit is named, and no process waits for it any longer.
"""

import contextlib
import io
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from jaxinf.cli.members import lost_chunks, over_members, title_of
from jaxinf.command_line import UsageError
from jaxinf.engine.member_opening import join_run
from jaxinf.errors import JaxinfError, ProcessError, StoreFormatError
from jaxinf.processes import LIMIT_S, Group, all_processes, end_process
from jaxinf.store import (
    HeldSteps,
    StepId,
    StoreDirectory,
    agreed_step,
    held_steps,
    is_run,
    look_at_store,
    member_name,
)
from jaxinf.terminal import make_console, printable
from jaxinf.train.options import Launch, LaunchOptions
from jaxinf.train.processes import connect
from jaxinf.typing import JsonValue

_UNSEEN = 2  # the status where a member is not seen


@dataclass(frozen=True)
class TogetherOptions(LaunchOptions):
    """How processes make a command together."""

    # For --distributed: a process that is silent for so long is named, in seconds.
    timeout: Annotated[float, tyro.conf.arg(metavar="SECONDS")] = LIMIT_S

    def check_together(self) -> None:
        """Refuses a limit of no time."""
        if self.timeout <= 0:
            raise UsageError(f"--timeout: expected more than 0, got {self.timeout:g}")


def over_processes(
    path: Path,
    action: Callable[[str], bool],
    launch: LaunchOptions,
    *,
    as_json: bool,
    timeout_s: float,
) -> int:
    """Does something for the member of each process; process 0 prints what came of it.

    Args:
      path: the run's path, the same in all processes.
      action: does it for a member's path, and prints; whether that went well.

    Returns:
      In all processes 2 if one has no member or is silent, 1 if the action failed for
      one, else 0.

    Raises:
      UsageError: they cannot be connected, or do not give one path.
      ProcessError: not all have made this call.
    """
    path = path.expanduser().absolute()
    connect(launch.distributed or Launch(), timeout_s)
    group = join_run(path)
    if group.is_alone:
        if not all_processes("program").is_alone:
            raise UsageError(
                f"{path}: expected one path in all processes, found others"
            )
        if not is_run(path):
            return 0 if action(str(path)) else 1
        return over_members(path, action, as_json=as_json)
    group = group.part("command", limit_s=timeout_s)

    def report() -> JsonValue:
        found = [_heard(group, number) for number in range(group.count)]
        return [_report(path, found, as_json=as_json), None in found]

    try:
        with group.living():
            group.say("seen", _seen(path / member_name(group.number), action))
            status, has_silent = group.first("the report", report)
    except ProcessError as error:
        print(f"jaxinf: {error}", file=sys.stderr)
        status, has_silent = _UNSEEN, True
    if has_silent:  # JAX would wait for it at exit
        sys.stdout.flush()
        sys.stderr.flush()
        end_process(group, status)
    return status


def _heard(group: Group, number: int) -> Any:
    """Returns what a process has seen; None if it is silent for too long."""
    try:
        return group.hear("seen", number)
    except ProcessError:
        return None


def _seen(place: Path, action: Callable[[str], bool]) -> JsonValue:
    """Looks at this process's member; returns its steps, and what was printed."""
    printed, steps = io.StringIO(), None
    if not place.exists():
        return {"text": "", "is_well": False, "steps": None}
    try:
        held = held_steps(look_at_store(place))
        ids = [held.current, held.spare]
        steps = [None if one is None else [one.step, one.commit] for one in ids]
        with contextlib.redirect_stdout(printed):
            is_well = action(str(place))
    except StoreFormatError as error:  # a drive is gone
        return {"text": "", "is_well": False, "steps": None, "why": str(error)}
    except (JaxinfError, OSError, ValueError) as error:
        is_well = False
        printed.write(printable(f"{error}\n"))
    return {"text": printed.getvalue(), "is_well": is_well, "steps": steps}


def _report(path: Path, found: list[Any], *, as_json: bool) -> int:
    """Prints what all processes have seen; returns the exit status of all."""
    console = make_console(sys.stderr if as_json else sys.stdout)
    held = [one["steps"] for one in found if one is not None and one["steps"]]
    steps = [
        HeldSteps(*(None if one is None else StepId(*one) for one in ids))
        for ids in held
    ]
    try:
        console.print(title_of(agreed_step(steps), len(found)))
    except LookupError:
        shown = "; ".join(f"{one.current} and {one.spare}" for one in steps)
        console.print(f"run of {len(found)} processes: no step that all have: {shown}")
    is_lost = False
    for number, one in enumerate(found):
        if one is not None and (one["steps"] or one["text"]):
            console.print(f"\n{member_name(number)}")
            print(one["text"], end="", flush=True)
            continue
        is_lost = True
        why = "does not answer"
        if one is not None:
            why = one.get("why", "has no member of the run")
        console.print(f"\nprocess {number}: {printable(why)}")
        with contextlib.suppress(JaxinfError):
            manifest = StoreDirectory.open(path / member_name(0)).manifest
            for line in lost_chunks(manifest, number):
                console.print(printable(f"  {line}"))
    if is_lost:
        return _UNSEEN
    has_step = len(held) == len(found)
    return 0 if has_step and all(one["is_well"] for one in found) else 1
