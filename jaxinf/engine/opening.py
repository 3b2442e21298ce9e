"""Finds, opens and makes the files of a store at its path.

      options ─► lock ─► form compared ─► leftovers removed ─► step to go on from
                   └─► nothing there: made by `create`, once a description is known

Invariant: everything on disk is checked before anything is written, and nothing is
written without the store's lock. Nothing here is thread-safe.
"""

import contextlib
import fnmatch
import logging
from pathlib import Path
from typing import TYPE_CHECKING

from jaxinf.engine.description import (
    StoreDescription,
    check_form,
    kernel_needs,
    planned,
)
from jaxinf.engine.members import (
    check_alone,
    check_members,
    check_plans,
    division_advice,
    held_summary,
    planned_summary,
)
from jaxinf.engine.opened import OpenStore, open_fleet
from jaxinf.engine.options import check_writable
from jaxinf.engine.shape import StoreShape
from jaxinf.errors import StoreFormatError
from jaxinf.processes import Group, join_group
from jaxinf.store import (
    SLOTS,
    StoreDirectory,
    StoreLock,
    check_never_committed,
    check_space,
    claim_csds,
    create_store,
    discard_store,
    is_unfinished,
    lock_exclusively,
    member_name,
    other_slot,
    prune_leftovers,
    prune_snapshots,
    read_owned,
    restore_checkpoint,
    to_step,
)
from jaxinf.transfer import translated
from jaxinf.typing import JsonValue

if TYPE_CHECKING:  # which opens its files by these functions
    from jaxinf.engine.engine import Engine

_LOG = logging.getLogger("jaxinf")

# Files that may be in the directory of a new store.
_HARMLESS = ("lost+found", "lock", "publish.lock", "checkpoints.lock")
_HARMLESS += ("current.tmp", ".jaxinf*")


# --- a place --------------------------------------------------------------------------


def is_there(path: Path) -> bool:
    """Whether there is a store, or the remains of an interrupted creation."""
    return (path / "jaxinf.json").exists()


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
            f"{division_advice(path, group.count)}"
        )
    return group


def _check_place(path: Path) -> None:
    """Refuses a path that is neither a store nor a place for one."""
    check_writable(path)
    if not path.exists() or is_there(path):
        return
    if any(path.glob("process-[0-9]*/jaxinf.json")):
        num = len(list(path.glob("process-[0-9]*")))
        raise StoreFormatError(
            f"store {path}: expected the store of one process, found the members of a "
            f"run of several ({num} of them); start as many processes, and call "
            "jax.distributed.initialize before open_store, or "
            + division_advice(path, 1)
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


# --- a store that is there ------------------------------------------------------------


def open_place(engine: "Engine") -> OpenStore | None:
    """Locks and opens the store of a run, if there is one.

    Returns:
      The open store; None if there is none, or if its creation was interrupted. It is
      then locked, and must be made again.

    Raises:
      NotADirectoryError, PermissionError: the path cannot be a store.
      StoreError: as `jaxinf.open_store` documents; the lock is given back.
    """
    options, group, path = engine.options, engine.group, engine.options.path
    _check_place(path)
    if not is_there(path) and group.is_alone:
        _check_restorable(engine)
        return None

    def hold() -> JsonValue:
        if not is_there(path):
            return None
        engine.lock = StoreLock(path)
        return None if group.is_alone else held_summary(path, group, options.restore)

    with contextlib.ExitStack() as undo:
        undo.callback(engine.release)
        step = check_members(path, group.gather("open_store", hold))

        def recover() -> OpenStore | None:
            if engine.lock is None:
                return None
            if not group.is_alone:
                directory = StoreDirectory.open(path)
                directory.lock = engine.lock
                to_step([directory], step)
            opened = _open_locked(engine, engine.lock)
            if opened is not None:
                undo.callback(opened.close)
            return opened

        opened = group.in_all("open_store", recover)
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
            _LOG.info(
                "%s: its creation was interrupted before a first step was committed; "
                "it will be made anew",
                path,
            )
            return None
        directory = read_owned(path)
        directory.lock = lock
        check_alone(directory, engine.group)
        check_form(options, directory.manifest)
        # A damaged record is refused before anything is written.
        commit = None if options.restore else directory.read_commit()
        claim_csds(directory)
        prune_snapshots(directory)
        prune_leftovers(directory)
        if options.restore is not None:
            commit = restore_checkpoint(directory, options.restore)
    directory.check_files(directory.committed_slot() or SLOTS[0])
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
    """Makes a store, also in place of an unfinished one.

    Args:
      uses_budget: whether its own memory budget will be used.

    Raises:
      StoreError: nothing was written; as `jaxinf.smart_update` documents.
      CsdError: a CSD cannot run the optimizer.
    """
    group = engine.group

    def summary() -> JsonValue:
        return planned_summary(
            planned(engine.options, group, description).manifest, engine.options
        )

    with contextlib.ExitStack() as undo:

        def make() -> OpenStore:
            opened = _create(engine, description, uses_budget=uses_budget)
            undo.callback(opened.close)
            return opened

        check_plans(engine.options.path, group.gather("init", summary))
        opened = group.in_all("init", make)
        undo.pop_all()
    return opened


def _create(
    engine: "Engine", description: StoreDescription, *, uses_budget: bool
) -> OpenStore:
    options, path = engine.options, engine.options.path
    directory = planned(options, engine.group, description)
    if engine.lock is not None and is_there(path):
        leftover = read_owned(path, unmade=True)
        own = options, engine.group, description, leftover.manifest.csds
        directory = planned(*own)
        discard_store(leftover)
    check_space(directory, num_more=options.num_kept)
    shape = StoreShape(options, directory)
    if uses_budget:
        shape.check_memory()
    with contextlib.ExitStack() as undo:
        fleet = undo.enter_context(contextlib.closing(open_fleet(shape, engine.meters)))
        fleet.check(kernel_needs(description, directory.manifest))
        if engine.lock is None:
            _check_place(path)
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
