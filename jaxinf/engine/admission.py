"""Checks whether a store can be opened, or its place can get one, and by whom.

Invariant: nothing is written here. What the members of a run have in common is judged
by each process from the same summaries, so that all refuse it alike.
"""

import fnmatch
import hashlib
import json
import logging
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from jaxinf.engine.description import StoreDescription
from jaxinf.engine.options import StoreOptions, check_writable
from jaxinf.errors import (
    DeviceConfigurationError,
    ProcessError,
    StoreFormatError,
    StoreMismatchError,
)
from jaxinf.processes import Group, join_group
from jaxinf.store import (
    CODECS,
    Codecs,
    HeldSteps,
    Manifest,
    StepId,
    StoreDirectory,
    agreed_step,
    chunk_holders,
    coded_leaf,
    find_checkpoint,
    held_steps,
    member_name,
    store_codecs,
)
from jaxinf.typing import AVERAGE, JsonValue

_LOG = logging.getLogger("jaxinf")

# Files that may be in the directory of a new store.
_HARMLESS = ("lost+found", "lock", "publish.lock", "checkpoints.lock")
_HARMLESS += ("current.tmp", ".jaxinf*")

# --- a place --------------------------------------------------------------------------


def is_there(path: Path) -> bool:
    """Whether there is a store, or the remains of an interrupted creation."""
    return (path / "jaxinf.json").exists()


def check_place(path: Path) -> None:
    """Refuses a path that is neither a store nor a place for one."""
    if path.exists() and not path.is_dir():
        raise NotADirectoryError(
            f"store {path}: expected a directory or nothing there yet, found a file; "
            "give another path"
        )
    check_writable(path)
    if not path.exists() or is_there(path):
        return
    if any(path.glob("process-[0-9]*/jaxinf.json")):
        num = len(list(path.glob("process-[0-9]*")))
        raise StoreFormatError(
            f"store {path}: expected the store of one process, found the members of a "
            f"run of several ({num} of them); start as many processes, and call "
            "jax.distributed.initialize before open_store, or "
            + _division_advice(path, 1)
        )
    foreign = sorted(
        entry.name
        for entry in path.iterdir()
        if not any(fnmatch.fnmatchcase(entry.name, known) for known in _HARMLESS)
    )
    # A second look, since another process may have begun to make the store.
    if foreign and not is_there(path):
        raise StoreFormatError(
            f"store {path}: expected a jaxinf store or an empty directory, found "
            f"neither jaxinf.json nor emptiness ({', '.join(foreign[:3])}, …); give "
            "another path"
        )


def join_run(path: Path) -> Group:
    """Finds out who has a path, which is no store of one process if several have it.

    Raises:
      ProcessError: some processes do not come, or give another path.
      StoreFormatError: there is a store of one process at the path.
    """
    group = join_group(path)
    if not group.is_alone and is_there(path):
        raise StoreFormatError(
            f"{path}: expected a run of {group.count} processes, which has a store in "
            f"{member_name(0)} and so on, found the store of one process; "
            f"{_division_advice(path, group.count)}"
        )
    return group


def _division_advice(path: Path, count: int) -> str:
    return (
        f'divide it among {count}: jaxinf store copy "{path}" "{path}" --processes '
        f"{count} (the trainer's --elastic does it), or start it as before"
    )


# --- a store --------------------------------------------------------------------------


def check_alone(directory: StoreDirectory, group: Group) -> None:
    """Refuses a store that is not of this process's kind, or another member's."""
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
        advice = ""
        if held.count != group.count:
            advice = f", or {_division_advice(path.parent, group.count)}"
        raise StoreMismatchError(
            f"{path}: expected member {group.number} of {group.count}, found "
            f"member {held.number} of {held.count}; run with {held.count} processes, "
            f"each with its number and its directory of before{advice}"
        )


def check_form(options: StoreOptions, manifest: Manifest) -> None:
    """Refuses a store on other CSDs, or in another format, than is asked for."""
    path, wanted = options.path, options.state
    given = tuple(str(root) for root in options.csd_roots)
    if given and given != manifest.csds:
        raise StoreMismatchError(
            f"{path}: the store's CSD roots are "
            f"{list(manifest.csds) or 'the store itself'}, given were "
            f"{list(given)}; leave csds out when opening an existing store"
        )
    found = store_codecs(manifest)
    asked = replace(found, state=wanted if wanted in CODECS else "")
    if wanted is not None and any(
        leaf != coded_leaf(leaf, asked) for leaf in manifest.leaves
    ):
        raise StoreMismatchError(
            f"{path}: the store holds its state as {found.state or 'fp32'}, asked for "
            f"was state={wanted!r}; leave it out, or make a store of the other kind "
            f'from this one ("jaxinf store copy {path} NEW --state {wanted}")'
        )
    if options.master == "none" and found.master != "bf16":
        raise StoreMismatchError(
            f"{path}: the store has master params, asked for was master='none'; leave "
            "it out, or make a store without from this one "
            f'("jaxinf store copy {path} NEW --master none")'
        )


def check_same(directory: StoreDirectory, description: StoreDescription) -> None:
    """Refuses a store of another optimizer or tree; shows the difference."""
    held, wanted = directory.manifest, description.contents
    _check_average(directory, description)
    lines = held.tree_difference(wanted)
    if not lines:
        lines = held.kernel_difference(wanted)
        if lines and dict(held.created_by) != dict(wanted.created_by):
            _LOG.warning(
                "%s: the optimizer's equations differ from those the store was made "
                "with; so do the versions of jax or optax (%s then, %s now). The state "
                "has the same form, so training goes on:\n  %s",
                directory.path,
                dict(held.created_by),
                dict(wanted.created_by),
                "\n  ".join(lines),
            )
            return
    if lines:
        shown = "\n  ".join(lines[:40])
        raise StoreMismatchError(
            f"{directory.path}: the store holds the state of another optimizer or "
            f"model than it is opened with:\n  {shown}\nOpen it with the optimizer and "
            "the model that it was made with, or use another store"
        )


def _check_average(directory: StoreDirectory, description: StoreDescription) -> None:
    """Refuses a store with an average where none is asked for, and the reverse."""
    path, held = directory.path, directory.manifest
    forms = {"": "fp32", "bf16": "bf16"}
    names = {state.name for leaf in description.leaves for state in leaf.states}
    asked = forms[description.average] if AVERAGE in names else "none"
    found = "none"
    if AVERAGE in held.state_names:
        found = forms[store_codecs(held).average]
        if asked != "none" and not any(
            coded_leaf(leaf, Codecs(average="bf16")).state(AVERAGE).codec
            for leaf in held.leaves
        ):
            return  # no leaf is large enough for an average in fewer bits
    if found == asked or not held.leaves:
        return
    remedy = f'"jaxinf store copy {path} NEW --average {asked}" makes a store with'
    if found == "none":
        remedy += " one, which begins as a copy of the params; or leave average out"
    elif asked == "none":
        remedy += "out; or give average=jaxinf.ema(…)"
    else:
        remedy += f" this form; or give form={found!r}"
    shown = {"none": "no average"}
    raise StoreMismatchError(
        f"{path}: the store has {shown.get(found, f'an average in {found}')} of the "
        f"params, asked for was {shown.get(asked, f'an average in {asked}')}; {remedy}"
    )


def check_division(directory: StoreDirectory, description: StoreDescription) -> None:
    """Refuses a run whose mesh gives the chunks of a member to other processes."""
    if directory.manifest.member is None:
        return
    for record, leaf in zip(directory.manifest.leaves, description.leaves, strict=True):
        if not leaf.holders:
            raise DeviceConfigurationError(
                f"{directory.path}: expected params on a mesh of all processes of the "
                "run, found none; put them on one"
            )
        places = chunk_holders(record, leaf.shard_counts, leaf.holders)
        for number, holders in enumerate(places):
            if record.owners[number] not in holders:
                raise StoreMismatchError(
                    f"{directory.path}: leaf {leaf.name}: chunk {number} is process "
                    f"{record.owners[number]}'s, and on this run's mesh its params are "
                    f"in process {', '.join(map(str, holders))}; use the mesh and the "
                    "shardings that the store was made with"
                )


# --- the members of a run -------------------------------------------------------------


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
        **_in_common(directory.manifest),
        "steps": [
            None if one is None else [one.step, one.commit]
            for one in (steps.current, steps.spare)
        ],
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
    steps = [
        HeldSteps(*(None if one is None else StepId(*one) for one in summary["steps"]))
        if summary is not None
        else HeldSteps(None, None)
        for summary in found
    ]
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
            missing,
        )
    _check_equal(
        path,
        found,
        run="members of one run",
        contents="members with the same leaves, optimizer and division",
        versions="the same jaxinf, jax and optax in all processes",
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
            range(len(found)),
        ) from None


def planned_summary(manifest: Manifest, options: StoreOptions) -> JsonValue:
    """Describes a member that is about to be made."""
    host = socket.gethostname()
    roots = [[host, os.path.realpath(root)] for root in options.csd_roots]
    return {**_in_common(manifest), "roots": roots}


def check_plans(path: Path, found: Sequence[Any]) -> None:
    """Refuses members that would not fit each other, before they are made.

    Raises:
      StoreMismatchError: another optimizer, tree, mesh or version in one of them.
      ValueError: two processes of one host share a CSD root.
    """
    _check_equal(
        path,
        found,
        versions="the same jaxinf, jax and optax in all processes",
        contents="the same params, mesh, shardings and optimizer in all processes",
    )
    roots = [tuple(root) for one in found for root in one["roots"]]
    twice = {root for root in roots if roots.count(root) > 1}
    if len(found) > 1 and twice:
        host, root = min(twice)
        raise ValueError(
            f"csds: expected roots of its own in each process of host {host}, found "
            f"{root} in several; give a template, such as '/mnt/nvme{{process}}'"
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
