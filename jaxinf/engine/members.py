"""Judges whether the stores of several processes are the members of one run.

Invariant: each process judges the same summaries, so that all refuse them alike.
Nothing is written here.
"""

import hashlib
import json
import os
import socket
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any

from jaxinf.engine.options import StoreOptions
from jaxinf.errors import ProcessError, StoreMismatchError
from jaxinf.processes import Group
from jaxinf.store import (
    HeldSteps,
    Manifest,
    StepId,
    StoreDirectory,
    agreed_step,
    find_checkpoint,
    held_steps,
)
from jaxinf.typing import JsonValue

_VERSIONS = "the same jaxinf, jax and optax in all processes"


def division_advice(path: Path, count: int) -> str:
    return (
        f'divide it among {count}: jaxinf store copy "{path}" "{path}" --processes '
        f"{count} (the trainer's --elastic does it), or start it as before"
    )


def check_alone(directory: StoreDirectory, group: Group) -> None:
    """Refuses a store that is not of this process's kind, or another member's."""
    held, path = directory.manifest.member, directory.path
    found = None if held is None else (held.number, held.count)
    expected = None if group.is_alone else (group.number, group.count)
    if found == expected:
        return
    if found is None:
        remedy = "run it in one, or give another path"
    elif expected is None:
        remedy = (
            f"start {found[1]} processes, call jax.distributed.initialize before "
            f"open_store, and open the run's path ({path.parent})"
        )
    else:
        remedy = f"run with {found[1]} processes, each with its directory of before"
        if found[1] != group.count:
            remedy += f", or {division_advice(path.parent, group.count)}"
    raise StoreMismatchError(
        f"{path}: expected {_whose(expected)}, found {_whose(found)}; {remedy}"
    )


def _whose(member: tuple[int, int] | None) -> str:
    if member is None:
        return "the store of one process"
    return f"member {member[0]} of a run of {member[1]} processes"


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
    held_two, kept = held_steps(directory), None
    steps = (held_two.current, held_two.spare)
    if restore is not None:
        record = find_checkpoint(directory, restore)
        kept = [record.step, record.commit]
    return {
        "run": held.run,
        **_in_common(directory.manifest),
        "steps": [one and [one.step, one.commit] for one in steps],
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
    pairs = [(None, None) if one is None else one["steps"] for one in found]
    steps = [HeldSteps(*(one and StepId(*one) for one in pair)) for pair in pairs]
    if not any(step.current for step in steps):
        return None  # no step was ever committed: the store is made anew
    missing = [n for n, one in enumerate(found) if one is None]
    if missing:
        raise ProcessError(
            f"{path}: expected a member of the run in each of {len(found)} processes, "
            f"found none in process {', '.join(map(str, missing))}; start the run with "
            "its processes at the same numbers as before, mount what is missing, or "
            "move the run's directory aside, in all places where it lies, and start "
            "anew",
        )
    _check_equal(
        path,
        found,
        run="members of one run",
        contents="members with the same leaves, optimizer and division",
        versions=_VERSIONS,
        restore="the checkpoint to restore to be of one commit in all members",
    )
    try:
        return agreed_step(steps)
    except LookupError:
        if found[0]["restore"] is not None:
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
        ) from None


def planned_summary(manifest: Manifest, options: StoreOptions) -> JsonValue:
    """Describes a member that is about to be made."""
    host = socket.gethostname()
    roots = [[host, os.path.realpath(root)] for root in options.csds]
    return {**_in_common(manifest), "roots": roots}


def check_plans(path: Path, found: Sequence[Any]) -> None:
    """Refuses members that would not fit each other, before they are made.

    Raises:
      StoreMismatchError: another optimizer, tree, mesh or version in one of them.
      ValueError: two processes of one host share a CSD root.
    """
    same = "the same params, mesh, shardings and optimizer in all processes"
    _check_equal(path, found, versions=_VERSIONS, contents=same)
    roots = sorted(tuple(root) for one in found for root in one["roots"])
    for (host, root), after in pairwise(roots):
        if (host, root) == after and len(found) > 1:
            raise ValueError(
                f"csds: expected roots of its own in each process of host {host}, "
                f"found {root} in several; give a template, such as "
                "'/mnt/nvme{process}'"
            )


def _check_equal(path: Path, found: Sequence[Mapping[str, Any]], **what: str) -> None:
    for key, wanted in what.items():
        values = [json.dumps(one[key]) for one in found]
        if len(set(values)) > 1:
            listed = "; ".join(f"process {n}: {text}" for n, text in enumerate(values))
            raise StoreMismatchError(f"{path}: expected {wanted}, found {listed}")


def _in_common(manifest: Manifest) -> dict[str, JsonValue]:
    text = json.dumps(manifest.common, sort_keys=True)
    return {
        "contents": hashlib.sha256(text.encode()).hexdigest(),
        "versions": {name: version(name) for name in ("jaxinf", "jax", "optax")},
    }


def _shown(step: StepId | None) -> str:
    return "none" if step is None else f"{step.step} (commit {step.commit[-12:]})"
