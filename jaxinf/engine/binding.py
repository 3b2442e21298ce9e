"""Binds a store to an optimizer and a tree: makes it, compares it, or restarts it.

      no store ─► planned ─► its needs checked ─► made ─► waits for initial states
      a store  ─► compared with the description ──────► goes on

Invariant: what is refused is refused before anything is written, in all processes.
"""

import contextlib
import logging
from functools import partial

from jaxinf.engine.description import (
    StoreDescription,
    check_description,
    kernel_needs,
    plan_store,
)
from jaxinf.engine.dispatched import wait_for_dispatched
from jaxinf.engine.engine import Engine
from jaxinf.engine.opening import (
    attach_steps,
    check_place,
    check_summaries,
    contents_summary,
    has_store,
    open_steps,
)
from jaxinf.engine.step_runner import StepRunner
from jaxinf.engine.store_files import open_fleet
from jaxinf.engine.subgroup_table import SubgroupTable
from jaxinf.errors import StaleStateError, StoreFormatError
from jaxinf.store import (
    StoreLock,
    check_space,
    checkpoint_names,
    create_store,
    discard_store,
    open_for_writing,
    other_slot,
    save_checkpoint,
)
from jaxinf.transfer import translated

_LOG = logging.getLogger("jaxinf")

_TWO_MODELS = (
    ". If these are two models that train in one process, give each its own: one store "
    "per init, smart_update(tx, other_path)"
)


def bind_optimizer(
    engine: Engine,
    description: StoreDescription,
    *,
    may_create: bool = False,
    uses_budget: bool = True,
) -> bool:
    """Binds a store to an optimizer and a tree; may make the store.

    Args:
      uses_budget: Whether the memory budget of `open_store` must hold its state.

    Returns:
      Whether the store is new, so that every leaf must be initialised.

    Raises:
      StoreMismatchError: The store has another content; shows the difference.
      StoreSpaceError: There is no room; nothing was written.
      StaleStateError: There is no store, and none may be made here.
    """
    with engine.binding_lock:
        engine.health.check()
        if engine.is_new and not may_create:
            raise StaleStateError(
                f"{engine.path}: update found no step in the store; call "
                "tx.init(params) on it first"
            )
        engine.exports.check_url(0 if engine.is_new else engine.files.commit.step)
        if any(bound is description for bound in engine.descriptions):
            return engine.is_new
        if engine.is_new:
            _make_store(engine, description, uses_budget=uses_budget)
        else:
            files = engine.files
            if uses_budget:
                files.subgroups.check_memory()
            remedy = _TWO_MODELS if engine.descriptions else ""
            check_description(files.directory, description, remedy)
            files.fleet.check(kernel_needs(description, files.directory.manifest))
        engine.descriptions.append(description)
        return engine.is_new


def subgroups_of(engine: Engine, description: StoreDescription) -> SubgroupTable:
    """Returns the subgroups of the existing or future store; writes nothing."""
    with engine.binding_lock:  # another thread may make it meanwhile
        if engine.has_files:
            return engine.files.subgroups
    directory = plan_store(engine.options, engine.group, description)
    return SubgroupTable(engine.options, directory)


def _make_store(
    engine: Engine, description: StoreDescription, *, uses_budget: bool
) -> None:
    options, group = engine.options, engine.group
    engine.descriptions.clear()  # an earlier init on this store did not finish
    if engine.has_files:
        unfinished = engine.files
        if unfinished.directory.committed_slot():
            check_description(unfinished.directory, description)
            _reopen_as_new(engine)
            return
        engine.steps = None
        unfinished.close()
    if not group.is_alone:
        plan = partial(plan_store, options, group, description)
        summaries = group.gather("init", lambda: contents_summary(plan().manifest))
        contents = "params, mesh, shardings and optimizer"
        check_summaries(group, summaries, contents=contents)
    create = partial(_create_files, engine, description, uses_budget=uses_budget)
    attach_steps(engine, "init", create)


def _create_files(
    engine: Engine, description: StoreDescription, *, uses_budget: bool
) -> StepRunner:
    options, leftover = engine.options, None
    if engine.store_lock is not None and has_store(options.path):
        leftover = open_for_writing(options.path, unmade=True)
    roots = () if leftover is None else leftover.manifest.csds
    directory = plan_store(options, engine.group, description, roots)
    if leftover is not None:
        discard_store(leftover)
    check_space(directory, num_more=options.num_kept)
    subgroups = SubgroupTable(options, directory)
    if uses_budget:
        subgroups.check_memory()
    fleet = open_fleet(subgroups, engine.meters)
    with contextlib.ExitStack() as undo:
        undo.callback(fleet.close)
        fleet.check(kernel_needs(description, directory.manifest))
        if engine.store_lock is None:
            _lock_new_place(engine)
        directory.lock = engine.store_lock
        create_store(directory)
        undo.pop_all()
    return engine.make_steps(subgroups, None, fleet)


def _lock_new_place(engine: Engine) -> None:
    path = engine.path
    check_place(path, engine.group)
    with translated("creation", path):
        path.mkdir(parents=True, exist_ok=True)
        engine.store_lock = StoreLock(path)
    if has_store(path):
        engine.release_lock()
        raise StoreFormatError(
            f"{path}: expected no store, as when it was opened, found one that another "
            "process has made since; close this one (jaxinf.close("
            f"{str(path)!r})) and open it again"
        )


def restart_store(engine: Engine, description: StoreDescription) -> None:
    """Keeps the existing run as a checkpoint, and waits for a new one.

    The committed step does not change until the first states are committed.
    """
    wait_for_dispatched()
    with engine.binding_lock:
        engine.steps.wait()
        files, path = engine.files, engine.path
        remedy = (
            '. on_existing="restart" begins anew with the same leaves and the same '
            f"optimizer; for others move the store aside (mv {path} {path}-old)"
        )
        check_description(files.directory, description, remedy)
        if step := files.commit.step:
            names, number = checkpoint_names(files.directory), 1
            name = first_choice = f"step-{step}-before-restart"
            while name in names:
                number += 1
                name = f"{first_choice}-{number}"
            save_checkpoint(files.directory, name)
            message = "%s: restarted; the run of before is kept at step %d, as %r"
            _LOG.warning(message, path, step, name)
        _reopen_as_new(engine)
        engine.descriptions.clear()
        engine.descriptions.append(description)


def _reopen_as_new(engine: Engine) -> None:
    """Opens the store as a new one, which waits for initial states.

    The commit of step 0 replaces the committed step; a caller that needs that step
    makes a checkpoint first.
    """
    files = engine.files
    committed = files.directory.committed_slot()
    assert committed is not None
    files.close()
    files.directory.remove_record(other_slot(committed))
    engine.steps = open_steps(engine, files.directory, None)
