"""Finds and opens the files of a store at its path.

      options ─► lock ─► formats compared ─► leftovers removed ─► step to go on from
                   └─► no store: `bind_optimizer` makes it

The stores of several processes are opened together if they are the members of one run.
Invariant: everything on disk is checked before anything is written, and nothing is
written without the store's lock. Each process judges the same summaries of the members,
so that all refuse them alike. Nothing here is thread-safe.
"""

import contextlib
import fnmatch
import hashlib
import json
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from jaxinf.documents import first_few
from jaxinf.engine.description import check_formats
from jaxinf.engine.engine import Engine
from jaxinf.engine.options import StoreOptions, check_writable
from jaxinf.engine.step_runner import StepRunner
from jaxinf.engine.store_files import open_fleet
from jaxinf.engine.subgroup_table import SubgroupTable
from jaxinf.errors import ProcessError, StoreFormatError, StoreMismatchError
from jaxinf.processes import Group, join_group
from jaxinf.store import (
    CommitRecord,
    HeldSteps,
    Manifest,
    StepId,
    StoreDirectory,
    StoreLock,
    agree_on_step,
    check_never_committed,
    find_members,
    find_step,
    go_to_step,
    is_unfinished,
    lock_exclusively,
    open_for_writing,
    package_versions,
    read_held_steps,
    restore_checkpoint,
    take_over,
)
from jaxinf.typing import JsonValue

# Files that may be in the directory of a new store.
_HARMLESS = ("lost+found", "lock", "publish.lock", "checkpoints.lock")
_HARMLESS += ("current.tmp", ".jaxinf*")


def has_store(path: Path) -> bool:
    """Whether there is a store, or the remains of an interrupted creation."""
    return (path / "jaxinf.json").exists()


def join_run(path: Path) -> Group:
    """Returns the group of the processes that open this path."""
    group = join_group(path)
    if not group.is_alone and has_store(path):
        _check_count(path, 1, group)  # the store of one process
    return group


def _check_count(path: Path, num_members: int, group: Group) -> None:
    if num_members != group.count:
        raise StoreMismatchError(
            f"{path}: the store is divided among {num_members} process(es), this run "
            f"has {group.count}; start as many, which call jax.distributed.initialize "
            "before open_store and open this path, or divide it: jaxinf store copy "
            f'"{path}" "{path}" --processes {group.count} (the trainer\'s --elastic '
            "does it)"
        )


def check_place(path: Path, group: Group) -> None:
    """Refuses what is no store, or not this run's; another process may be making it."""
    check_writable(path)
    if not path.exists() or has_store(path):
        return
    for place in find_members(path)[:1]:
        member = Manifest.read(place / "jaxinf.json").member
        _check_count(path, member.count if member else 1, group)
    foreign = sorted(
        entry.name
        for entry in path.iterdir()
        if not any(fnmatch.fnmatchcase(entry.name, pattern) for pattern in _HARMLESS)
    )
    # A second look, since another process may have begun to make the store.
    if foreign and not has_store(path):
        raise StoreFormatError(
            f"store {path}: expected a jaxinf store or an empty directory, found "
            f"neither jaxinf.json nor emptiness ({first_few(foreign)}); give another "
            "path"
        )


def open_engine(
    options: StoreOptions, group: Group, path_lock: threading.RLock
) -> Engine:
    """Locks and opens the store of a run, if there is one.

    The engine has no files if there is no store, or if its creation was interrupted:
    the remains are locked, and `bind_optimizer` makes the store again.
    """
    engine, path = Engine(options, group, path_lock), options.path
    check_place(path, group)
    if not has_store(path) and group.is_alone:
        _check_restorable(engine)
        return engine

    def lock_store() -> JsonValue:
        if not has_store(path):
            return None
        engine.store_lock = StoreLock(path)
        return None if group.is_alone else _member_summary(path, group, options.restore)

    with contextlib.ExitStack() as undo:
        undo.callback(engine.release_lock)
        step = _common_step(group, path, group.gather("open_store", lock_store))
        attach_steps(engine, "open_store", partial(_open_existing, engine, step))
        undo.pop_all()
    return engine


def attach_steps(
    engine: Engine, what: str, make: Callable[[], StepRunner | None]
) -> None:
    """Gives an engine its steps, or closes their files if another process fails."""
    with contextlib.ExitStack() as undo:

        def make_undoable() -> StepRunner | None:
            if (steps := make()) is not None:
                undo.callback(steps.files.close)
            return steps

        engine.steps = engine.group.in_all(what, make_undoable)
        undo.pop_all()


def open_steps(
    engine: Engine, directory: StoreDirectory, commit: CommitRecord | None
) -> StepRunner:
    """Opens the files of a store, new if it has no commit to go on from."""
    subgroups = SubgroupTable(engine.options, directory)
    fleet = open_fleet(subgroups, engine.meters)
    return engine.make_steps(subgroups, commit, fleet)


def _check_restorable(engine: Engine) -> None:
    if engine.options.restore is not None:
        raise ValueError(
            f"{engine.path}: expected a store with a checkpoint "
            f"{engine.options.restore!r} to restore, found no committed step"
        )


def _open_existing(engine: Engine, common_step: StepId | None) -> StepRunner | None:
    """Opens a locked store at the step to go on from; removes leftovers."""
    lock, options, path = engine.store_lock, engine.options, engine.path
    if lock is None:
        return None
    if not engine.group.is_alone:
        directory = StoreDirectory.open(path)
        directory.lock = lock
        go_to_step([directory], common_step)
    with lock_exclusively(path / "checkpoints.lock"):
        if is_unfinished(path):
            _check_restorable(engine)
            check_never_committed(open_for_writing(path, unmade=True))
            return None
        directory = open_for_writing(path)
        directory.lock = lock
        _check_member(directory, engine.group)
        check_formats(options, directory.manifest)
        # A damaged record is refused before anything is written.
        commit = None if options.restore else directory.read_commit()
        take_over(directory)
        if options.restore is not None:
            commit = restore_checkpoint(directory, options.restore)
            if not engine.group.is_alone:  # all go back before a step begins
                directory.flip(directory.require_committed_slot())
    return open_steps(engine, directory, commit)


def _check_member(directory: StoreDirectory, group: Group) -> None:
    member, path = directory.manifest.member, directory.path
    if member is None:
        _check_count(path, 1, group)
        return
    _check_count(path.parent, member.count, group)
    if member.number != group.number:
        raise StoreMismatchError(
            f"{path}: expected member {group.number} of the run, found member "
            f"{member.number}; give each process its directory of before"
        )


def _member_summary(path: Path, group: Group, restore: str | None) -> JsonValue:
    """Describes an existing member to the other processes, or refuses it."""
    directory = StoreDirectory.open(path)
    _check_member(directory, group)
    member, restored = directory.manifest.member, None
    assert member is not None
    directory.read_commit()  # refuses a damaged record
    if restore is not None:
        record = find_step(directory, restore).commit
        restored = [record.step, record.commit]
    return {
        **contents_summary(directory.manifest),
        "run": member.run,
        "steps": list(read_held_steps(directory)),
        "restore": restored,
    }


def _common_step(group: Group, path: Path, summaries: Sequence[Any]) -> StepId | None:
    """Returns the step that all members go on from, by their summaries, if any.

    With a checkpoint to restore they need none in common.
    """
    pairs = [summary["steps"] if summary else (None, None) for summary in summaries]
    steps = [HeldSteps(*(step and StepId(*step) for step in pair)) for pair in pairs]
    if not any(step.current for step in steps):
        return None  # no step was ever committed: the store is made again
    missing = [n for n, summary in enumerate(summaries) if summary is None]
    if missing:
        raise ProcessError(
            f"{path}: expected a member of the run in each of {len(summaries)} "
            f"processes, found none in process {', '.join(map(str, missing))}; start "
            "the run with its processes at the same numbers as before, mount what is "
            "missing, or move the run's directory aside, in all places where it lies, "
            "and start anew",
        )
    check_summaries(
        group,
        summaries,
        run="the run of the members",
        contents="the members' leaves, optimizer and division",
        restore="the commit of the checkpoint to restore",
    )
    try:
        return agree_on_step(steps, path.parent)  # the run's path, which commands take
    except ProcessError:
        if summaries[0]["restore"] is not None:
            return None
        raise


def check_summaries(group: Group, summaries: Sequence[Any], **meanings: str) -> None:
    """Refuses summaries of processes that differ in these values, or in versions."""
    meanings = {"versions": "the versions of jaxinf, jax and optax", **meanings}
    for key, meaning in meanings.items():
        values = [summary[key] for summary in summaries]
        remedy = "use the same in all of them"
        group.check_alike(meaning, values, remedy, StoreMismatchError)


def contents_summary(manifest: Manifest) -> dict[str, JsonValue]:
    """Returns what the members of a run have alike, for `check_summaries`."""
    text = json.dumps(manifest.common, sort_keys=True)
    contents = hashlib.sha256(text.encode()).hexdigest()
    return {"contents": contents, "versions": {**package_versions()}}
