"""Commands on the path of a run in several processes: each member, and the whole.

Invariant: what cannot be seen is listed, and makes the exit status 2.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from jaxinf.errors import StoreFormatError
from jaxinf.store import (
    Manifest,
    StepId,
    StoreDirectory,
    agreed_of,
    find_members,
    look_at_store,
    missing_members,
)
from jaxinf.terminal import make_console, printable


def over_members(path: Path, action: Callable[[str], bool], *, as_json: bool) -> int:
    """Does something for each member that can be seen; returns the exit status.

    Args:
      action: does it for a member's path; whether that went well.
      as_json: print no lines of text around its output, which is a JSON document for
        each member.

    Returns:
      2 if a member cannot be seen, 1 if the action failed for one, else 0.
    """
    path = path.expanduser().absolute()
    console = make_console(sys.stderr if as_json else sys.stdout)
    members: list[StoreDirectory] = []
    refused: list[StoreFormatError] = []  # a drive is gone
    for place in find_members(path):
        try:
            members.append(look_at_store(place))
        except StoreFormatError as error:
            refused.append(error)
    if not members:
        raise refused[0]
    missing = missing_members(members)
    console.print(title_of(agreed_of(members), len(members) + len(missing)))
    are_well = []
    for one in members:
        console.print(f"\n{one.path.name}")
        are_well.append(action(str(one.path)))
    for number in missing:
        console.print(f"process {number}: cannot be seen from here")
        for line in lost_chunks(members[0].manifest, number):
            console.print(printable(f"  {line}"))
    for error in refused:
        console.print(printable(f"  {error}"))
    if missing:
        return 2
    return 0 if all(are_well) else 1


def title_of(step: StepId | None, count: int) -> str:
    """Says which step the members of a run agree on."""
    agreed = "no step yet" if step is None else f"step {step.step}"
    return f"run of {count} processes: {agreed}, from which all go on"


def lost_chunks(manifest: Manifest, number: int) -> Iterator[str]:
    """Says which chunks of which leaves a member has, as all the others know."""
    for leaf in manifest.leaves:
        held = [chunk for chunk, owner in enumerate(leaf.owners) if owner == number]
        if held:
            states = ", ".join(state.name for state in leaf.states)
            chunks = f"chunks {_runs(held)} of {len(leaf.csds)}"
            yield f"leaf {leaf.name}: it has {chunks}, of {states}"


def _runs(numbers: Sequence[int]) -> str:
    """Returns ascending numbers as text, such as ``0-3, 7``."""
    found: list[list[int]] = []
    for number in numbers:
        if found and found[-1][1] == number - 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return ", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in found)
