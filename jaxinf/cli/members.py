"""Commands on a run in several processes: each member, and the whole.

    one process, which sees all members ──┐
    process 0 looks at its member ──┐     ├─► the report, and one exit status
    process 1 looks at its member ──┴─────┘

Invariant: what cannot be seen is listed, and makes the exit status 2; a process that is
silent for the time limit is named, and no process waits for it any longer.
"""

import contextlib
import io
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import tyro

from jaxinf.command_line import UsageError
from jaxinf.errors import JaxinfError, ProcessError, StoreFormatError
from jaxinf.processes import LIMIT_S, all_processes, end_process
from jaxinf.store import (
    HeldSteps,
    StepId,
    StoreDirectory,
    agreed_step,
    find_members,
    held_steps,
    is_run,
    look_at_store,
    member_name,
    missing_members,
)
from jaxinf.terminal import make_console, printable
from jaxinf.train.devices import connect
from jaxinf.train.options import LaunchOptions
from jaxinf.typing import JsonValue

_UNSEEN = 2  # the status where a member is not seen


@dataclass(frozen=True)
class OverMembers(LaunchOptions):
    """A command that processes make together where each sees its own member alone."""

    # For --distributed: a process that is silent for so long is named, in seconds.
    timeout: Annotated[float, tyro.conf.arg(metavar="SECONDS")] = LIMIT_S

    def over(self, store: str, action: Callable[[str], bool], *, as_json: bool) -> int:
        """Does something for a store, or for each member of a run.

        Args:
          action: does it for a path, and prints; whether that went well.
          as_json: print no lines of text around its output, which is a JSON document
            for each member.

        Returns:
          The exit status: 2 if a member cannot be seen, 1 if the action failed for one,
          else 0; the same in all processes.
        """
        path = Path(store).expanduser().absolute()
        if self.timeout <= 0:
            raise UsageError(f"--timeout: expected more than 0, got {self.timeout:g}")
        if self.distributed:
            connect(self.distributed, self.timeout)
            return _in_all(path, action, as_json=as_json, limit_s=self.timeout)
        if is_run(path):
            return _report(_seen_here(path, action), as_json=as_json)
        return 0 if action(store) else 1


@dataclass(frozen=True)
class _Seen:
    """A member of a run.

    Attributes:
      steps: its steps, if it can be seen.
      show: prints what came of the action; whether it went well.
      problem: why it cannot be seen.
    """

    steps: HeldSteps | None = None
    show: Callable[[], bool] = lambda: False
    problem: str = "cannot be seen from here"


def _report(members: Mapping[int, _Seen], *, as_json: bool) -> int:
    """Prints what was seen of all members, by number; returns the exit status."""
    console = make_console(sys.stderr if as_json else sys.stdout)
    held = [one.steps for one in members.values() if one.steps is not None]
    title = f"run of {len(members)} processes"
    try:
        step = agreed_step(held)
        agreed = "no step yet" if step is None else f"step {step.step}"
        console.print(f"{title}: {agreed}, from which all go on")
        status = 0
    except LookupError:
        shown = "; ".join(f"{one.current} and {one.spare}" for one in held)
        console.print(f"{title}: no step that all have: {shown}")
        status = 1
    for number, one in sorted(members.items()):
        if one.steps is not None:
            console.print(f"\n{member_name(number)}")
            status = max(status, 0 if one.show() else 1)
            continue
        status = _UNSEEN
        console.print(printable(f"\nprocess {number}: {one.problem}"))
    return status


def _seen_here(path: Path, action: Callable[[str], bool]) -> dict[int, _Seen]:
    """Returns all members, also those that this process cannot see.

    Raises:
      StoreFormatError: no member can be opened.
    """
    found, opened = dict[int, _Seen](), list[StoreDirectory]()
    refused: StoreFormatError | None = None
    for place in find_members(path):
        number = int(place.name.rpartition("-")[2])
        try:
            opened.append(look_at_store(place))
            show = partial(action, str(place))
            found[number] = _Seen(held_steps(opened[-1]), show)
        except StoreFormatError as error:  # a drive is gone
            found[number] = _Seen(problem=str(error))
            refused = error
    if refused is not None and not opened:
        raise refused
    return dict.fromkeys(missing_members(opened), _Seen()) | found


def _in_all(
    path: Path, action: Callable[[str], bool], *, as_json: bool, limit_s: float
) -> int:
    """Looks at the members of all processes; the first one prints the report."""
    group = all_processes("command", limit_s=limit_s)
    place = path / member_name(group.number)

    def report() -> JsonValue:
        members = {n: _as_seen(one) for n, one in enumerate(found)}
        return _report(members, as_json=as_json)

    try:
        group.agree("the path of the run", lambda: str(path), "give all the same")
        with group.living():
            found = group.gather("its member", lambda: _looked(place, action))
        return group.first("the report", report)
    except ProcessError as error:
        print(f"jaxinf: {error}", file=sys.stderr, flush=True)
        sys.stdout.flush()
        if not group.is_alone:
            end_process(group, _UNSEEN)  # JAX would wait for the silent one at exit
        return _UNSEEN


def _looked(place: Path, action: Callable[[str], bool]) -> JsonValue:
    """Looks at this process's member; returns its steps, and what was printed."""
    if not place.exists():
        return {"problem": "has no member of the run"}
    printed, is_well = io.StringIO(), False
    try:
        held = held_steps(look_at_store(place))
    except StoreFormatError as error:  # a drive is gone
        return {"problem": str(error)}
    try:
        with contextlib.redirect_stdout(printed):
            is_well = action(str(place))
    except (JaxinfError, OSError, ValueError) as error:
        printed.write(printable(f"{error}\n"))
    steps = [one and [one.step, one.commit] for one in (held.current, held.spare)]
    return {"steps": steps, "text": printed.getvalue(), "is_well": is_well}


def _as_seen(told: Mapping[str, Any]) -> _Seen:
    if "problem" in told:
        return _Seen(problem=told["problem"])

    def show() -> bool:
        print(told["text"], end="", flush=True)
        return told["is_well"]

    return _Seen(HeldSteps(*(one and StepId(*one) for one in told["steps"])), show)
