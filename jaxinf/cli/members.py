"""Commands on the path of a run in several processes: each member, and the whole.

Invariant: what cannot be seen is listed, and makes the exit status 2.
"""

import sys
from collections.abc import Callable, Iterable
from pathlib import Path

from jaxinf.errors import StoreFormatError
from jaxinf.store import (
    HeldSteps,
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

_FAILED, _UNSEEN = 1, 2


def over_members(
    store: str, action: Callable[[Path], bool], *, as_json: bool = False
) -> int:
    """Does something for a store, or for each member of a run.

    Args:
      action: does it for a path, and prints; whether that went well.
      as_json: print no lines of text around its output, which is a JSON document for
        each member.

    Returns:
      The exit status: 2 if a member cannot be seen, 1 if the action failed for one,
      else 0.

    Raises:
      StoreFormatError: no member can be opened.
    """
    path = Path(store).expanduser().absolute()
    if not is_run(path):
        return 0 if action(path) else _FAILED
    members, unseen = _look(path)
    count = len(members) + len(unseen)
    console = make_console(sys.stderr if as_json else sys.stdout)
    console.print(f"run of {count} processes: {_agreed(map(held_steps, members))}")
    status = 0
    for one in members:
        console.print(f"\n{one.path.name}")
        if not action(one.path):
            status = _FAILED
    for number, why in sorted(unseen.items()):
        console.print(printable(f"process {number}: {why}"))
        status = _UNSEEN
    return status


def _look(path: Path) -> tuple[list[StoreDirectory], dict[int, str]]:
    """Returns the members that can be seen, and by number why others cannot."""
    members, refused = list[StoreDirectory](), dict[str, StoreFormatError]()
    for place in find_members(path):
        try:
            members.append(look_at_store(place))
        except StoreFormatError as error:  # a drive is gone
            refused[place.name] = error
    if not members:
        raise next(iter(refused.values()))
    missing = missing_members(members)
    why = {number: refused.get(member_name(number)) for number in missing}
    return members, {n: str(e or "cannot be seen from here") for n, e in why.items()}


def _agreed(held: Iterable[HeldSteps]) -> str:
    held = list(held)
    try:
        step = agreed_step(held)
    except LookupError:
        shown = "; ".join(f"{one.current} and {one.spare}" for one in held)
        return f"no step that all have: {shown}"
    agreed = "no step yet" if step is None else f"step {step.step}"
    return f"{agreed}, from which all go on"
