"""A command in all processes of a run, each of which sees its own member alone.

    process 0:  looks at its member ──┐            ┌─► prints the report of all
    process 1:  looks at its member ──┴─► service ─┴─► ends with the same status

Invariant: a process that works says so all the while; one that is silent for the time
  limit is named, and no process waits for it any longer.
"""

import contextlib
import io
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxinf import compat
from jaxinf.cli.members import is_run, lost_chunks, over_members, title_of
from jaxinf.command_line import UsageError
from jaxinf.engine.members import join_members, member_path
from jaxinf.errors import JaxinfError, StoreFormatError
from jaxinf.store import (
    HeldSteps,
    StepId,
    StoreDirectory,
    agreed_step,
    held_steps,
    look_at_store,
)
from jaxinf.terminal import make_console, printable
from jaxinf.train.options import LaunchOptions
from jaxinf.train.processes import connect
from jaxinf.typing import JsonValue

__all__ = ["SILENCE_S", "over_processes"]

SILENCE_S = 60.0
"""The usual time limit."""

_LEAVE_S = 1.5
_UNSEEN = 2  # the status where a member is not seen


def over_processes(
    path: Path,
    action: Callable[[str], bool],
    launch: LaunchOptions,
    *,
    as_json: bool,
    timeout_s: float = SILENCE_S,
) -> int:
    """Does something for the member of each process; process 0 prints what came of it.

    Args:
      path: the run's path, the same in all processes.
      action: does it for a member's path, and prints; whether that went well.
      launch: who the processes are.
      as_json: as for `over_members`.
      timeout_s: the longest silence of a process.

    Returns:
      In all processes 2 if one has no member or is silent, 1 if the action failed for
      one, else 0.

    Raises:
      UsageError: they cannot be connected, or do not give one path.
      ProcessError: not all have made this call.
    """
    path = path.expanduser().absolute()
    connect(launch, timeout_s)
    service = compat.coordination()
    if service is None:
        if not is_run(path):
            return 0 if action(str(path)) else 1
        return over_members(path, action, as_json=as_json)
    member = join_members(path, timeout_s).member
    if member is None:
        raise UsageError(f"{path}: expected one path in all processes, found others")
    talk = _Talk(service, member.run, timeout_s)
    with talk.living():
        talk.say(_seen(member_path(path, member.number), action))
        if service.process == 0:
            found = [talk.hear(number) for number in range(member.count)]
            status = _report(path, found, as_json=as_json)
            verdict = [status, None in found]
            talk.say(verdict, "verdict")
        else:
            verdict = talk.hear(0, "verdict")
    if verdict is None:
        text = f"jaxinf: {path}: process 0 is silent; look at its output"
        print(text, file=sys.stderr)
    status, has_silent = verdict or (_UNSEEN, True)
    if has_silent:  # JAX would wait for it at exit
        sys.stdout.flush()
        sys.stderr.flush()
        if service.process == 0:
            service.leave(_LEAVE_S)
        os._exit(status)
    return status


@dataclass(frozen=True)
class _Talk:
    """What processes tell each other, by the name of this call."""

    service: compat.Coordination
    name: str
    timeout_s: float

    @contextlib.contextmanager
    def living(self) -> Iterator[None]:
        """Says all the while that this process is there."""
        ended = threading.Event()

        def live() -> None:
            number = 0
            while not ended.wait(self.timeout_s / 4):
                number += 1
                self.service.put(f"{self._alive(self.service.process)}/{number}", "")

        thread = threading.Thread(target=live, name="jaxinf-live", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def say(self, value: JsonValue, what: str = "seen") -> None:
        """Tells the others a value."""
        key = f"jaxinf/{self.name}/{what}/{self.service.process}"
        self.service.put(key, json.dumps(value))

    def hear(self, number: int, what: str = "seen") -> Any:
        """Waits for what a process says; None if it is silent for too long."""
        num_signs, since_s = -1, time.monotonic()
        while True:
            text = self.service.get(f"jaxinf/{self.name}/{what}/{number}", 1.0)
            if text is not None:
                return json.loads(text)
            found = len(self.service.below(self._alive(number)))
            if found != num_signs:
                num_signs, since_s = found, time.monotonic()
            elif time.monotonic() - since_s > self.timeout_s:
                return None

    def _alive(self, number: int) -> str:
        return f"jaxinf/{self.name}/alive/{number}"


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
            console.print(f"\n{member_path(path, number).name}")
            print(one["text"], end="", flush=True)
            continue
        is_lost = True
        why = "does not answer"
        if one is not None:
            why = one.get("why", "has no member of the run")
        console.print(f"\nprocess {number}: {printable(why)}")
        with contextlib.suppress(JaxinfError):
            manifest = StoreDirectory.open(member_path(path, 0)).manifest
            for line in lost_chunks(manifest, number):
                console.print(printable(f"  {line}"))
    if is_lost:
        return _UNSEEN
    has_step = len(held) == len(found)
    return 0 if has_step and all(one["is_well"] for one in found) else 1
