"""The opening of a run's members: what they must have in common, and at which step.

Invariant: what is refused is refused in all processes alike, before anything is
written, since each judges the same summaries of all.
"""

import hashlib
import json
import os
import socket
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from jaxinf.engine.options import StoreOptions
from jaxinf.errors import ProcessError, StoreFormatError, StoreMismatchError
from jaxinf.processes import Group, join_group
from jaxinf.store import (
    HeldSteps,
    Manifest,
    Member,
    StepId,
    StoreDirectory,
    agreed_step,
    find_checkpoint,
    held_steps,
    member_name,
)
from jaxinf.typing import JsonValue

_ASIDE = "move the run's directory aside, in all places where it lies, and start anew"


def join_run(path: Path) -> Group:
    """Finds out who has a path, which is no store of one process if several have it.

    Raises:
      ProcessError: some processes do not come, or give another path.
      StoreFormatError: there is a store of one process at the path.
    """
    group = join_group(path)
    if not group.is_alone and (path / "jaxinf.json").exists():
        raise StoreFormatError(
            f"{path}: expected a run of {group.count} processes, which has a store in "
            f"{member_name(0)} and so on, found the store of one process; "
            f"{division_advice(path, group.count)}"
        )
    return group


def division_advice(path: Path, count: int) -> str:
    """Says how a run goes on with another number of processes."""
    return (
        f'divide it among {count}: jaxinf store copy "{path}" "{path}" --processes '
        f"{count} (the trainer's --elastic does it), or start it as before"
    )


def own_member(group: Group) -> Member | None:
    """Returns this process's part in a run that begins now; None if it is alone."""
    if group.is_alone:
        return None
    return Member(group.session, group.number, group.count)


def held_summary(path: Path, group: Group, restore: str | None) -> JsonValue:
    """Describes an existing member to the others.

    Args:
      restore: the checkpoint that the run is to go on from.

    Raises:
      StoreError: it is not this process's member, is damaged, or lacks the checkpoint.
    """
    directory = StoreDirectory.open(path)
    check_alone(directory, group)
    held = directory.manifest.member
    assert held is not None
    directory.read_commit()  # refuses one that is damaged
    steps, kept = held_steps(directory), None
    if restore is not None:
        record = find_checkpoint(directory, restore)
        kept = [record.step, record.commit]
    return {
        "run": held.run,
        "contents": _digest(directory.manifest),
        "versions": _versions(),
        "current": _as_json(steps.current),
        "spare": _as_json(steps.spare),
        "restore": kept,
    }


def check_members(path: Path, found: Sequence[Any]) -> StepId | None:
    """Returns the step that all members go on from; None if none has one.

    With a checkpoint to restore they need none in common.

    Args:
      found: a `held_summary` of each process, or None where there is no member.

    Raises:
      ProcessError: a member is missing, or they have no step in common.
      StoreMismatchError: they are not of one run.
    """
    steps = [_held_steps(one) for one in found]
    there = [one for one in found if one is not None]
    if not any(step.current for step in steps):
        return None  # no step was ever committed: the store is made anew
    missing = [n for n, one in enumerate(found) if one is None]
    if missing:
        raise ProcessError(
            f"{path}: expected a member of the run in each of {len(found)} processes, "
            f"found none in process {', '.join(map(str, missing))}; start the run with "
            "its processes at the same numbers as before, mount what is missing, or "
            + _ASIDE,
            missing,
        )
    for key, what in (
        ("run", "members of one run"),
        ("contents", "members with the same leaves, optimizer and division"),
        ("versions", "the same jaxinf, jax and optax in all processes"),
        ("restore", "the checkpoint to restore to be of one commit in all members"),
    ):
        values = [json.dumps(one[key]) for one in there]
        if len(set(values)) > 1:
            listed = "; ".join(f"process {n}: {text}" for n, text in enumerate(values))
            raise StoreMismatchError(f"{path}: expected {what}, found {listed}")
    try:
        return agreed_step(steps)
    except LookupError:
        if there[0]["restore"] is not None:
            return None
        listed = "; ".join(
            f"process {n}: step {_shown(one.current)}, in its other slot "
            f"{_shown(one.spare)}"
            for n, one in enumerate(steps)
        )
        raise ProcessError(
            f"{path}: expected a step that all members have, found none: {listed}. "
            "Was one of them restored from a backup, or restored alone? Restore a "
            "checkpoint that all have: open_store(path, restore=NAME)",
            range(len(found)),
        ) from None


def check_alone(directory: StoreDirectory, group: Group) -> None:
    """Refuses a store that is not of this process's kind, or another member's.

    Raises:
      StoreMismatchError: names the difference.
    """
    held, path = directory.manifest.member, directory.path
    if held is None and group.is_alone:
        return
    if held is None:
        raise StoreMismatchError(
            f"{path}: expected the member of a run of {group.count} processes, found "
            "the store of one process; run it in one, or give another path"
        )
    if group.is_alone:
        raise StoreMismatchError(
            f"{path}: expected the store of one process, found member {held.number} of "
            f"a run of {held.count} processes; start these, call "
            "jax.distributed.initialize before open_store, and open the run's path "
            f"({path.parent})"
        )
    if (held.number, held.count) != (group.number, group.count):
        raise StoreMismatchError(
            f"{path}: expected member {group.number} of {group.count}, found "
            f"member {held.number} of {held.count}; run with {held.count} processes, "
            "each with its number and its directory of before"
            + (
                ""
                if held.count == group.count
                else f", or {division_advice(path.parent, group.count)}"
            )
        )


def planned_summary(manifest: Manifest, options: StoreOptions) -> JsonValue:
    """Describes a member that is about to be made."""
    return {
        "contents": _digest(manifest),
        "versions": _versions(),
        "roots": [_place_of_root(root) for root in options.csd_roots],
    }


def check_plans(path: Path, found: Sequence[Any]) -> None:
    """Refuses members that would not fit each other, before they are made.

    Raises:
      StoreMismatchError: another optimizer, tree, mesh or version in one of them.
      ValueError: two processes of one host share a CSD root.
    """
    for key, what in (
        ("versions", "the same jaxinf, jax and optax"),
        ("contents", "the same params, mesh, shardings and optimizer"),
    ):
        values = [json.dumps(one[key]) for one in found]
        if len(set(values)) > 1:
            others = [n for n, text in enumerate(values) if text != values[0]]
            raise StoreMismatchError(
                f"{path}: expected {what} in all processes, found others in process "
                f"{', '.join(map(str, others))} than in process 0"
            )
    roots = [tuple(root) for one in found for root in one["roots"]]
    twice = {root for root in roots if roots.count(root) > 1}
    if len(found) > 1 and twice:
        host, root = min(twice)
        raise ValueError(
            f"csds: expected roots of its own in each process of host {host}, found "
            f"{root} in several; give a template, such as '/mnt/nvme{{process}}'"
        )


def _as_json(step: StepId | None) -> list[Any] | None:
    return None if step is None else [step.step, step.commit]


def _held_steps(summary: Any) -> HeldSteps:
    if summary is None:
        return HeldSteps(None, None)
    ids = [summary[name] for name in ("current", "spare")]
    return HeldSteps(*(None if one is None else StepId(*one) for one in ids))


def _place_of_root(root: Path) -> JsonValue:
    """Returns what tells whether two processes would share a CSD root."""
    return [socket.gethostname(), os.path.realpath(root)]


def _digest(manifest: Manifest) -> str:
    text = json.dumps(manifest.common, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _versions() -> JsonValue:
    return {name: version(name) for name in ("jaxinf", "jax", "optax")}


def _shown(step: StepId | None) -> str:
    return "none" if step is None else f"{step.step} (commit {step.commit[-12:]})"
