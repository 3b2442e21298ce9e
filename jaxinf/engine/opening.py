"""Finds, opens and makes the files of a store at its path.

      options ─► lock ─► form compared ─► leftovers removed ─► step to go on from
                   └─► nothing there: made by `create`, once a description is known

The stores of several processes are opened or made together, if they are the members of
one run. Invariant: everything on disk is checked before anything is written, and
nothing is written without the store's lock. Each process judges the same summaries of
the members, so that all refuse them alike. Nothing here is thread-safe.
"""

import contextlib
import fnmatch
import hashlib
import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxinf.engine.description import (
    StoreDescription,
    check_form,
    kernel_needs,
    planned,
)
from jaxinf.engine.opened import OpenStore
from jaxinf.engine.options import check_writable
from jaxinf.engine.shape import StoreShape
from jaxinf.errors import ProcessError, StoreFormatError, StoreMismatchError
from jaxinf.processes import Group, join_group
from jaxinf.store import (
    HeldSteps,
    Manifest,
    StepId,
    StoreDirectory,
    StoreLock,
    agreed_step,
    check_never_committed,
    check_space,
    create_store,
    discard_store,
    find_members,
    find_step,
    held_steps,
    is_unfinished,
    lock_exclusively,
    other_slot,
    package_versions,
    read_owned,
    restore_checkpoint,
    take_over,
    to_step,
)
from jaxinf.transfer import translated
from jaxinf.typing import JsonValue

if TYPE_CHECKING:  # which opens its files by these functions
    from jaxinf.engine.engine import Engine

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


def _check_place(path: Path, group: Group) -> None:
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
            f"neither jaxinf.json nor emptiness ({', '.join(foreign[:3])}, …); give "
            "another path"
        )


# --- a store that is there ------------------------------------------------------------


def open_place(engine: "Engine") -> OpenStore | None:
    """Locks and opens the store of a run, if there is one.

    Returns:
      The open store; None if there is none, or if its creation was interrupted. It is
      then locked, and must be made again. After an error the lock is given back.
    """
    options, group, path = engine.options, engine.group, engine.options.path
    _check_place(path, group)
    if not is_there(path) and group.is_alone:
        _check_restorable(engine)
        return None

    def hold() -> JsonValue:
        if not is_there(path):
            return None
        engine.lock = StoreLock(path)
        return None if group.is_alone else _held_summary(path, group, options.restore)

    def recover() -> OpenStore | None:
        if engine.lock is None:
            return None
        if not group.is_alone:
            directory = StoreDirectory.open(path)
            directory.lock = engine.lock
            to_step([directory], step)
        return _open_locked(engine, engine.lock)

    with contextlib.ExitStack() as undo:
        undo.callback(engine.release)
        step = _common_step(path, group.gather("open_store", hold))
        opened = _in_all(group, "open_store", recover)
        undo.pop_all()
    return opened


def _in_all(
    group: Group, what: str, make: Callable[[], OpenStore | None]
) -> OpenStore | None:
    """Returns an opened store, or closes it because another process has none."""
    with contextlib.ExitStack() as undo:

        def made() -> OpenStore | None:
            if (opened := make()) is not None:
                undo.callback(opened.close)
            return opened

        opened = group.in_all(what, made)
        undo.pop_all()
    return opened


def _check_restorable(engine: "Engine") -> None:
    """Refuses to restore if there is no store with a committed step."""
    if engine.options.restore is not None:
        raise ValueError(
            f"{engine.options.path}: expected a store with a checkpoint "
            f"{engine.options.restore!r} to restore, found no committed step"
        )


def _open_locked(engine: "Engine", lock: StoreLock) -> OpenStore | None:
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
    return OpenStore(engine, directory, commit)


def begin_anew(engine: "Engine", opened: OpenStore) -> OpenStore:
    """Opens the store as a new one, which waits for initial states.

    The commit of step 0 replaces the committed step; a caller that needs that step
    makes a checkpoint first.
    """
    directory = opened.directory
    committed = directory.committed_slot()
    assert committed is not None
    opened.close()
    directory.unpublish(other_slot(committed))
    return OpenStore(engine, directory, None)


# --- a store to be made ---------------------------------------------------------------


def create(
    engine: "Engine", description: StoreDescription, *, uses_budget: bool
) -> OpenStore:
    """Makes a store, also in place of an unfinished one; one refused writes nothing.

    Args:
      uses_budget: whether its own memory budget will be used.
    """
    options, group = engine.options, engine.group
    if not group.is_alone:
        plan = partial(planned, options, group, description)
        found = group.gather("init", lambda: _in_common(plan().manifest))
        same = "the same params, mesh, shardings and optimizer in all processes"
        _check_equal(options.path, found, contents=same)
    make = partial(_create, engine, description, uses_budget=uses_budget)
    opened = _in_all(group, "init", make)
    assert opened is not None
    return opened


def _create(
    engine: "Engine", description: StoreDescription, *, uses_budget: bool
) -> OpenStore:
    options, path = engine.options, engine.options.path
    roots, leftover = (), None
    if engine.lock is not None and is_there(path):
        leftover = read_owned(path, unmade=True)
        roots = leftover.manifest.csds
    directory = planned(options, engine.group, description, roots)
    if leftover is not None:
        discard_store(leftover)
    check_space(directory, num_more=options.num_kept)
    shape = StoreShape(options, directory)
    if uses_budget:
        shape.check_memory()
    with contextlib.ExitStack() as undo:
        fleet = undo.enter_context(contextlib.closing(shape.open_fleet(engine.meters)))
        fleet.check(kernel_needs(description, directory.manifest))
        if engine.lock is None:
            _check_place(path, engine.group)
            with translated("creation", path):
                path.mkdir(parents=True, exist_ok=True)
                engine.lock = StoreLock(path)
            if is_there(path):
                engine.release()
                raise StoreFormatError(
                    f"{path}: expected no store, as when it was opened, found one that "
                    "another process has made since; close this one (jaxinf.close("
                    f"{str(path)!r})) and open it again"
                )
        directory.lock = engine.lock
        create_store(directory)
        undo.pop_all()
    return OpenStore(engine, directory, None, fleet)


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
    common = _in_common(directory.manifest)
    return {**common, "run": member.run, "steps": steps, "restore": kept}


def _common_step(path: Path, found: Sequence[Any]) -> StepId | None:
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
    _check_equal(
        path,
        found,
        run="members of one run",
        contents="members with the same leaves, optimizer and division",
        restore="the checkpoint to restore to be of one commit in all members",
    )
    try:
        return agreed_step(steps, path.parent)  # the run's, which commands take
    except ProcessError:
        if found[0]["restore"] is not None:
            return None
        raise


def _check_equal(path: Path, found: Sequence[Any], **what: str) -> None:
    """Refuses summaries of which these values differ, or the versions of packages."""
    versions = "the same jaxinf, jax and optax in all processes"
    for key, wanted in {"versions": versions, **what}.items():
        values = [json.dumps(one[key]) for one in found]
        if len(set(values)) > 1:
            listed = "; ".join(f"process {n}: {text}" for n, text in enumerate(values))
            raise StoreMismatchError(f"{path}: expected {wanted}, found {listed}")


def _in_common(manifest: Manifest) -> dict[str, JsonValue]:
    text = json.dumps(manifest.common, sort_keys=True)
    contents = hashlib.sha256(text.encode()).hexdigest()
    return {"contents": contents, "versions": {**package_versions()}}
