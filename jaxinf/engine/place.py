"""Finds, opens and makes the files of a store at its path.

Invariant: everything on disk is checked before anything is written, and nothing is
written without the store's lock. Nothing here is thread-safe.
"""

import logging
from pathlib import Path
from typing import TypeAlias

from msgspec.structs import replace

from jaxinf.csd import CsdFleet, open_csds
from jaxinf.engine.admission import (
    check_alone,
    check_form,
    check_members,
    check_place,
    check_plans,
    held_summary,
    is_there,
    planned_summary,
)
from jaxinf.engine.description import StoreDescription, kernel_needs
from jaxinf.engine.division import (
    check_memory,
    cut_subgroups,
    longest,
    subgroup_elements,
)
from jaxinf.engine.opened import OpenStore, StoreRun
from jaxinf.engine.options import StoreOptions
from jaxinf.engine.shape import StoreShape
from jaxinf.engine.subgroup_layout import SubgroupLayout
from jaxinf.store import (
    CODECS,
    SLOTS,
    CommitRecord,
    Manifest,
    Member,
    StoreDirectory,
    StoreLock,
    check_never_committed,
    check_space,
    check_unclaimed,
    claim_csds,
    complete_spare,
    create_store,
    discard_store,
    is_unfinished,
    lock_exclusively,
    other_slot,
    prune_leftovers,
    prune_snapshots,
    read_owned,
    restore_checkpoint,
    to_step,
)
from jaxinf.transfer.failures import translated
from jaxinf.typing import JsonValue

_LOG = logging.getLogger("jaxinf")

_Csds: TypeAlias = tuple[CsdFleet, list[list[list[SubgroupLayout]]]]
"""Open CSDs, and the store's subgroups by leaf and chunk, of a length they can hold."""


# --- a store that is there ------------------------------------------------------------


def open_place(run: StoreRun) -> OpenStore | None:
    """Locks and opens the store of a run, if there is one.

    Returns:
      The open store; None if there is none, or if its creation was interrupted. It is
      then locked, and must be made again.

    Raises:
      NotADirectoryError, PermissionError: the path cannot be a store.
      StoreError: as `jaxinf.open_store` documents; the lock is given back.
    """
    path, group = run.options.path, run.group
    check_place(path)
    if not is_there(path):
        check_unclaimed(path, run.options.csd_roots)
        if group.is_alone:
            _check_restorable(run.options)
            return None
    opened: OpenStore | None = None

    def own() -> JsonValue:
        if not is_there(path):
            return None
        run.lock = StoreLock(path)
        if group.is_alone:
            return None
        return held_summary(path, group, run.options.restore)

    def recover() -> None:
        nonlocal opened
        if run.lock is not None:
            if not group.is_alone:
                directory = StoreDirectory.open(path)
                directory.lock = run.lock
                to_step([directory], step)
            opened = _open_locked(run, run.lock)

    try:
        step = check_members(path, group.gather("open_store", own))
        group.gather("open_store", recover)
    except BaseException:
        if opened is not None:
            opened.close()
        run.release()
        raise
    return opened


def _check_restorable(options: StoreOptions) -> None:
    """Refuses to restore if there is no store with a committed step."""
    if options.restore is not None:
        raise ValueError(
            f"{options.path}: expected a store with a checkpoint {options.restore!r} "
            "to restore, found no committed step"
        )


def _open_locked(run: StoreRun, lock: StoreLock) -> OpenStore | None:
    """Opens the store at the step to continue from; removes leftovers."""
    options, path = run.options, run.options.path
    with lock_exclusively(path / "checkpoints.lock"):
        if is_unfinished(path):
            _check_restorable(options)
            check_never_committed(read_owned(path, options.csd_roots, unmade=True))
            _LOG.info(
                "%s: its creation was interrupted before a first step was committed; "
                "it will be made anew",
                path,
            )
            return None
        directory = read_owned(path, options.csd_roots)
        directory.lock = lock
        check_alone(directory, run.group)
        check_form(options, directory.manifest)
        # A damaged record is refused before anything is written.
        commit = None if options.restore else directory.read_commit()
        claim_csds(directory, options.csd_roots)
        prune_snapshots(directory)
        prune_leftovers(directory)
        directory.prune_replacements()
        if options.restore is not None:
            complete_spare(directory)
            commit = restore_checkpoint(directory, options.restore)
    directory.check_files(directory.committed_slot() or SLOTS[0])
    return _attach(run, directory, commit)


def roll_back(run: StoreRun, opened: OpenStore, place: str) -> OpenStore:
    """Makes another step the committed one; under the lock, between two steps.

    Args:
      place: the other slot, just verified, or ``checkpoints/NAME``.

    Returns:
      The store, opened at that step.
    """
    directory = opened.directory
    if place in SLOTS:
        commit = directory.read_record(place)
        directory.sync()  # chunks that were read may not be durable yet
        directory.publish(place, commit)
    else:
        with lock_exclusively(directory.path / "checkpoints.lock"):
            complete_spare(directory)
            name = place.removeprefix("checkpoints/")
            commit = restore_checkpoint(directory, name)
    opened.close()
    return _attach(run, directory, commit)


def begin_anew(run: StoreRun, opened: OpenStore) -> OpenStore:
    """Opens the store as a new one, which waits for initial states.

    The commit of step 0 replaces the committed step; a caller that needs that step
    makes a checkpoint first.
    """
    directory = opened.directory
    committed = directory.committed_slot()
    assert committed is not None
    opened.close()
    complete_spare(directory)
    directory.unpublish(other_slot(committed))
    return _attach(run, directory, None)


def _open_csds(run: StoreRun, manifest: Manifest) -> _Csds:
    """Opens the CSDs of an existing or future store; writes nothing."""
    options, path = run.options, run.options.path
    here = next(p for p in (path, *path.parents) if p.exists())
    layouts = cut_subgroups(manifest, subgroup_elements(options, manifest))
    memory_bytes = options.memory_bytes - options.export_bytes(manifest)
    fleet = open_csds(
        options.csd,
        [Path(root) for root in manifest.csds] or [here],
        memory_bytes=max(memory_bytes, longest(layouts)[0]),
        meters=run.meters,
    )
    try:
        fleet.check_buffer(*longest(layouts))
    except BaseException:
        fleet.close()
        raise
    return fleet, layouts


def _attach(
    run: StoreRun,
    directory: StoreDirectory,
    commit: CommitRecord | None,
    csds: _Csds | None = None,
) -> OpenStore:
    fleet, layouts = csds or _open_csds(run, directory.manifest)
    try:
        return OpenStore(run, directory, fleet, layouts, commit)
    except BaseException:
        fleet.close()
        raise


# --- a store to be made ---------------------------------------------------------------


def create(
    run: StoreRun, description: StoreDescription, *, uses_budget: bool
) -> OpenStore:
    """Makes a store, also in place of an unfinished one.

    If another process has made and closed a store in the meantime, that is opened.

    Args:
      uses_budget: whether its own memory budget will be used.

    Raises:
      StoreError: nothing was written; as `jaxinf.smart_update` documents.
      CsdError: a CSD cannot run the optimizer.
    """
    group, path, made = run.group, run.options.path, list[OpenStore]()
    if group.is_alone and run.lock is None and is_there(path):
        found = open_place(run)
        if found is not None:
            return found

    def own() -> JsonValue:
        return planned_summary(_manifest(run, description), run.options)

    def make() -> None:
        made.append(_create(run, description, uses_budget=uses_budget))

    check_plans(path, group.gather("init", own))
    try:
        group.gather("init", make)
    except BaseException:
        for opened in made:
            opened.close()
        raise
    return made[0]


def _create(
    run: StoreRun, description: StoreDescription, *, uses_budget: bool
) -> OpenStore:
    options, path = run.options, run.options.path
    manifest = _manifest(run, description)
    if run.lock is not None and is_there(path):
        leftover = read_owned(path, options.csd_roots, unmade=True)
        manifest = _manifest(run, description, leftover.manifest.csds)
        discard_store(leftover, options.csd_roots)
    if uses_budget:
        check_memory(options, manifest)
    directory = StoreDirectory(path, manifest)
    check_space(directory, num_more=options.retention.most)
    csds = _open_csds(run, manifest)
    try:
        csds[0].check(kernel_needs(description, manifest))
        if run.lock is None:
            check_place(path)
            with translated("creation", path):
                path.mkdir(parents=True, exist_ok=True)
                run.lock = StoreLock(path)
            if is_there(path):  # another process has made the store
                csds[0].close()
                run.release()
                return create(run, description, uses_budget=uses_budget)
        directory.lock = run.lock
        create_store(directory)
    except BaseException:
        csds[0].close()
        raise
    return _attach(run, directory, None, csds)


def planned_shape(run: StoreRun, description: StoreDescription) -> StoreShape:
    """Returns the shape of a store to be made; writes nothing."""
    options, manifest = run.options, _manifest(run, description)
    layouts = cut_subgroups(manifest, subgroup_elements(options, manifest))
    return StoreShape(options, StoreDirectory(options.path, manifest), layouts)


def _manifest(
    run: StoreRun,
    description: StoreDescription,
    held_roots: tuple[str, ...] = (),
) -> Manifest:
    """Makes a new store's manifest; without options on the roots of another."""
    options, group = run.options, run.group
    roots = [str(root) for root in options.csd_roots] or held_roots
    codec = options.state if options.state in CODECS else ""
    number, count = group.number, group.count
    member = None if group.is_alone else Member(group.session, number, count)
    master = _master_codec(options, description)
    manifest = description.manifest(roots, codec, master, member)
    return replace(manifest, store_id=run.new_id)


def _master_codec(options: StoreOptions, description: StoreDescription) -> str:
    """Returns the codec of the master of bfloat16 params in a new store."""
    if options.master != "none":
        return "split" if options.csd.codes_params else ""
    dtypes = {leaf.dtype for leaf in description.leaves}
    if "bfloat16" not in dtypes or "float16" in dtypes:
        raise ValueError(
            f"{options.path}: master='none': expected params in bfloat16 (float32 "
            "ones, if any, are their own master), found "
            f"{', '.join(sorted(dtypes)) or 'no params'}; leave it out"
        )
    return "bf16"
