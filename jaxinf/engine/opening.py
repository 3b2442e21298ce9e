"""Finds and opens the files of a store at its path.

      options ─► lock ─► form compared ─► leftovers removed ─► step to go on from
                   └─► nothing there: made by `bind_optimizer`

The stores of several processes are opened together, if they are the members of one run.
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
from pathlib import Path
from typing import Any

from jaxinf.documents import first_few
from jaxinf.engine.description import check_form
from jaxinf.engine.engine import Engine
from jaxinf.engine.options import StoreOptions, check_writable
from jaxinf.engine.step_runner import StepRunner
from jaxinf.engine.store_files import StoreFiles, open_fleet
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
    agreed_step,
    check_never_committed,
    find_members,
    find_step,
    held_steps,
    is_unfinished,
    lock_exclusively,
    package_versions,
    read_owned,
    restore_checkpoint,
    take_over,
    to_step,
)
from jaxinf.typing import JsonValue

# Files that may be in the directory of a new store.
_HARMLESS = ("lost+found", "lock", "publish.lock", "checkpoints.lock")
_HARMLESS += ("current.tmp", ".jaxinf*")


# --- a place --------------------------------------------------------------------------


def is_there(path: Path) -> bool:
    """Whether there is a store, or the remains of an interrupted creation."""
    return (path / "jaxinf.json").exists()


def join_run(path: Path) -> Group:
    """Finds out who has a path, which is no store of one process if several have it."""
    group = join_group(path)
    if not group.is_alone and is_there(path):
        _check_count(path, 1, group)
    return group


def _check_count(path: Path, found: int, group: Group) -> None:
    """Refuses a store or run that is divided among another number of processes."""
    if found != group.count:
        raise StoreMismatchError(
            f"{path}: the store is divided among {found} process(es), this run has "
            f"{group.count}; start as many, which call jax.distributed.initialize "
            "before open_store and open this path, or divide it: jaxinf store copy "
            f'"{path}" "{path}" --processes {group.count} (the trainer\'s --elastic '
            "does it)"
        )


def check_place(path: Path, group: Group) -> None:
    """Refuses a path that is neither a store nor a place for one."""
    check_writable(path)
    if not path.exists() or is_there(path):
        return
    for place in find_members(path)[:1]:
        member = Manifest.read(place / "jaxinf.json").member
        _check_count(path, member.count if member else 1, group)
    foreign = sorted(
        entry.name
        for entry in path.iterdir()
        if not any(fnmatch.fnmatchcase(entry.name, known) for known in _HARMLESS)
    )
    # A second look, since another process may have begun to make the store.
    if foreign and not is_there(path):
        raise StoreFormatError(
            f"store {path}: expected a jaxinf store or an empty directory, found "
            f"neither jaxinf.json nor emptiness ({first_few(foreign)}); give another "
            "path"
        )


# --- a store that is there ------------------------------------------------------------


def open_engine(
    options: StoreOptions, group: Group, path_lock: threading.RLock
) -> Engine:
    """Locks and opens the store of a run, if there is one.

    Returns:
      What this process knows of the path. It has no files if there is no store, or if
      its creation was interrupted; that one is locked, and must be made again. After an
      error the lock is given back.

    Raises:
      StoreError: as `jaxinf.open_store` documents.
    """
    engine, path = Engine(options, group, path_lock), options.path
    check_place(path, group)
    if not is_there(path) and group.is_alone:
        _check_restorable(engine)
        return engine

    def hold() -> JsonValue:
        if not is_there(path):
            return None
        engine.lock = StoreLock(path)
        return None if group.is_alone else _held_summary(path, group, options.restore)

    def recover() -> StepRunner | None:
        if engine.lock is None:
            return None
        if not group.is_alone:
            directory = StoreDirectory.open(path)
            directory.lock = engine.lock
            to_step([directory], step)
        return _open_locked(engine, engine.lock)

    with contextlib.ExitStack() as undo:
        undo.callback(engine.release)
        step = _common_step(group, path, group.gather("open_store", hold))
        open_in_all(engine, "open_store", recover)
        undo.pop_all()
    return engine


def open_in_all(
    engine: Engine, what: str, make: Callable[[], StepRunner | None]
) -> None:
    """Gives an engine steps, or closes their files if another process has none."""
    with contextlib.ExitStack() as undo:

        def made() -> StepRunner | None:
            if (steps := make()) is not None:
                undo.callback(steps.files.close)
            return steps

        engine.steps = engine.group.in_all(what, made)
        undo.pop_all()


def open_steps(
    engine: Engine, directory: StoreDirectory, commit: CommitRecord | None
) -> StepRunner:
    """Opens the files of a store, new if it has no commit to go on from."""
    subgroups = SubgroupTable(engine.options, directory)
    fleet = open_fleet(subgroups, engine.meters)
    return StepRunner(engine, StoreFiles(engine, subgroups, commit, fleet))


def _check_restorable(engine: Engine) -> None:
    """Refuses to restore if there is no store with a committed step."""
    if engine.options.restore is not None:
        raise ValueError(
            f"{engine.options.path}: expected a store with a checkpoint "
            f"{engine.options.restore!r} to restore, found no committed step"
        )


def _open_locked(engine: Engine, lock: StoreLock) -> StepRunner | None:
    """Opens the store at the step to continue from; removes leftovers."""
    options, path = engine.options, engine.options.path
    with lock_exclusively(path / "checkpoints.lock"):
        if is_unfinished(path):
            _check_restorable(engine)
            check_never_committed(read_owned(path, unmade=True))
            return None  # it will be made anew
        directory = read_owned(path)
        directory.lock = lock
        _check_own(directory, engine.group)
        check_form(options, directory.manifest)
        # A damaged record is refused before anything is written.
        commit = None if options.restore else directory.read_commit()
        take_over(directory)
        if options.restore is not None:
            commit = restore_checkpoint(directory, options.restore)
    return open_steps(engine, directory, commit)


# --- members of a run -----------------------------------------------------------------


def _check_own(directory: StoreDirectory, group: Group) -> None:
    """Refuses a store that is not of this process's kind, or another member's."""
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


def _held_summary(path: Path, group: Group, restore: str | None) -> JsonValue:
    """Describes an existing member to the others, or refuses it."""
    directory = StoreDirectory.open(path)
    _check_own(directory, group)
    member, kept = directory.manifest.member, None
    assert member is not None
    directory.read_commit()  # refuses one that is damaged
    if restore is not None:
        record = find_step(directory, restore).commit
        kept = [record.step, record.commit]
    steps = list(held_steps(directory))
    common = in_common(directory.manifest)
    return {**common, "run": member.run, "steps": steps, "restore": kept}


def _common_step(group: Group, path: Path, found: Sequence[Any]) -> StepId | None:
    """Returns the step that all members go on from; None if none has one.

    With a checkpoint to restore they need none in common.

    Args:
      found: a `_held_summary` of each process, or None where there is no member.
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
    check_alike(
        group,
        found,
        run="the run of the members",
        contents="the members' leaves, optimizer and division",
        restore="the commit of the checkpoint to restore",
    )
    try:
        return agreed_step(steps, path.parent)  # the run's, which commands take
    except ProcessError:
        if found[0]["restore"] is not None:
            return None
        raise


def check_alike(group: Group, found: Sequence[Any], **what: str) -> None:
    """Refuses summaries of which these values differ, or the versions of packages."""
    versions = "the versions of jaxinf, jax and optax"
    for key, named in {"versions": versions, **what}.items():
        values, remedy = [one[key] for one in found], "use the same in all of them"
        group.check_alike(named, values, remedy, StoreMismatchError)


def in_common(manifest: Manifest) -> dict[str, JsonValue]:
    """Returns what the members of a run must have alike, for `check_alike`."""
    text = json.dumps(manifest.common, sort_keys=True)
    contents = hashlib.sha256(text.encode()).hexdigest()
    return {"contents": contents, "versions": {**package_versions()}}
