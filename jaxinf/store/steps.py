"""A store's steps: the committed one, pinned ones, and those that are kept.

      pin       current slot ──links──► snapshots/ID, while it is read
      save      current slot ──links──► checkpoints/NAME
      restore   checkpoints/NAME ──links──► spare slot ──publish──► current

Invariant: a step is of one commit in all members, and its files are only read. One that
is pinned by hard links is the same, bit for bit, until it is released; a listed
checkpoint is complete and durable: the writer replaces every file that has a second
link. See docs/format.md, "Hard links".
"""

import contextlib
import logging
import os
import shutil
import uuid
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from msgspec import structs

from jaxinf.errors import (
    StoreError,
    StoreFormatError,
    StoreIOError,
    StoreMismatchError,
    StoreSpaceError,
)
from jaxinf.store.commit import CommitRecord
from jaxinf.store.directory import SLOTS, Slot, StoreDirectory, link_file, other_slot
from jaxinf.store.files import check_free_space, make_carry, make_place, write_carry
from jaxinf.store.lock import LockFile, lock_exclusively
from jaxinf.store.manifest import Manifest
from jaxinf.store.owners import claim_csds, read_owned
from jaxinf.store.reader import CommittedStep
from jaxinf.transfer import fsync_directory, translated

_OWNER_LOCK = "owner.lock"
_MAX_NAME_BYTES = 200
_ASIDE = ".old-"  # before the name of a checkpoint that another one replaces
_LEFTOVERS = (".new-", ".gone-", _ASIDE)
_LOG = logging.getLogger("jaxinf")


def step_of(directory: StoreDirectory, path: Path) -> CommittedStep:
    """Returns a step of a store: a slot, a checkpoint or a snapshot."""
    record = CommitRecord.read(path / "commit.json")
    places = tuple(directory.data_paths(directory.place_of(path)))
    return CommittedStep(path, directory.manifest, record, places)


def find_step(directory: StoreDirectory, name: str | None = None) -> CommittedStep:
    """Returns a checkpoint, or the committed step as it is; another may be committed.

    Raises:
      ValueError: there is no such checkpoint; lists the others.
      StoreMismatchError: it has other arrays than the store; says what to do.
    """
    if name is not None:
        check_exists(directory, name)
        root = directory.step_path(f"checkpoints/{name}")
        if Manifest.read(root / "jaxinf.json").leaves != directory.manifest.leaves:
            raise StoreMismatchError(
                f"{root}: the checkpoint holds other arrays than the store does now; "
                f'make a store of it: cp -rL "{root}" COPY, then jaxinf store copy '
                "COPY NEW"
            )
        step = step_of(directory, root)
        step.check()
        return step
    while True:
        slot = directory.need_slot()
        try:
            return step_of(directory, directory.step_path(slot))
        except StoreFormatError:
            if directory.need_slot() == slot:
                raise


def are_of_one(steps: Sequence[CommittedStep]) -> bool:
    """Whether steps, one of each member, are of one commit."""
    return len({one.commit.commit for one in steps}) == 1


def joined_step(steps: Sequence[CommittedStep]) -> CommittedStep:
    """Returns one step of those of all members by number, or of a store alone."""
    first = steps[0]
    for one in steps:
        if one.manifest.common != first.manifest.common:
            raise StoreMismatchError(
                f"{one.path}: expected the leaves and owners of {first.path}, found "
                "others; restore the member's jaxinf.json"
            )
        one.check()
    member = first.manifest.member
    if not are_of_one(steps):
        raise StoreMismatchError(
            f"{first.path}: expected a step of all members together, found one of each "
            "of that name, of different commits; give another"
        )
    if member is None:
        return first
    if len(steps) != member.count:
        raise StoreFormatError(
            f"{first.path}: expected a whole step, found a member's part; give the "
            "path of the run, or an export of it (jaxinf checkpoint export RUN DEST)"
        )
    starts = np.cumsum([0, *(len(one.places) for one in steps)]).tolist()
    leaves, sums, bounds = [], first.manifest.no_checksums(), dict[str, np.float32]()
    for held in zip(*(one.manifest.leaves for one in steps), strict=True):
        owners = enumerate(held[0].owners)
        csds = tuple(starts[own] + held[own].csds[n] for n, own in owners)
        leaves.append(structs.replace(held[0], csds=csds, owners=()))
    for one in steps:
        for name, leaf, _ in one.manifest.arrays():
            sums[name][list(leaf.held)] = one.commit.checksums[name]
        for name, bound in one.commit.inexact.items():
            bounds[name] = max(bound, bounds.get(name, bound))
    changes = {"leaves": tuple(leaves), "csds": (), "member": None}
    return CommittedStep(
        first.path,
        structs.replace(first.manifest, **changes),
        first.commit.replace(checksums=sums, commit="", inexact=bounds),
        tuple(place for one in steps for place in one.places),
        next((one.warning for one in steps if one.warning), ""),
    )


# --- pins ----------------------------------------------------------------------------


@contextlib.contextmanager
def pinned_step(directory: StoreDirectory) -> Iterator[CommittedStep]:
    """Pins the committed step until the context ends.

    Any process may do this, beside a running writer; no data moves. It raises as
    `read_owned`, and a StoreIOError if the store cannot be written to.
    """
    place = f"snapshots/{uuid.uuid4().hex}"
    root = directory.step_path(place)
    with contextlib.ExitStack() as undo:
        with (
            translated("snapshot of the committed step", root),
            lock_exclusively(directory.publish_lock),
        ):
            if directory.lock is None:  # it may have been copied in place
                directory = read_owned(directory.path)
            slot = directory.need_slot()
            undo.callback(remove_step, directory, place)
            root.mkdir(parents=True)
            undo.enter_context(lock_exclusively(root / _OWNER_LOCK))
            record = directory.step_path(slot) / "commit.json"
            make_place(directory, place, CommitRecord.read(record).carry, source=slot)
            link_file(record, root / "commit.json")
        yield step_of(directory, root)


@contextlib.contextmanager
def readable_step(directory: StoreDirectory) -> Iterator[CommittedStep]:
    """Pins the committed step, or yields it as it is, with a warning.

    It is as it is if it lacks a chunk, or if this user cannot write to the store.
    """
    with contextlib.ExitStack() as stack:
        try:
            step = stack.enter_context(pinned_step(directory))
        except (StoreIOError, StoreSpaceError) as error:
            if not isinstance(error.__cause__, OSError):  # what is there is not ours
                raise
            warning = (
                f"the committed step cannot be pinned ({error.__cause__.strerror}); if "
                "a run is writing to the store, chunks may be of different steps"
            )
            step = replace(find_step(directory), warning=warning)
        yield step


def prune_snapshots(directory: StoreDirectory) -> None:
    """Removes snapshots of ended processes; the caller is the store's writer."""
    root = directory.path / "snapshots"
    if not root.is_dir():
        return
    with lock_exclusively(directory.publish_lock):
        for entry in root.iterdir():
            if not entry.is_dir() or entry.is_symlink():
                continue
            try:
                with contextlib.closing(LockFile(entry / _OWNER_LOCK, waits=False)):
                    remove_step(directory, f"snapshots/{entry.name}")
            except BlockingIOError:
                pass  # its owner lives
            except StoreIOError:
                if entry.exists():  # else its owner has just removed it
                    raise


def remove_step(directory: StoreDirectory, place: str) -> None:
    """Removes a step at a place, on every CSD and in the store."""
    for root in reversed(directory.folders(place)):
        shutil.rmtree(root, ignore_errors=True)


# --- checkpoints ---------------------------------------------------------------------


@dataclass(frozen=True)
class CheckpointInfo:
    """A checkpoint of a store."""

    name: str
    step: int
    committed_at: str  # UTC


def checkpoint_names(*members: StoreDirectory) -> list[str]:
    """Returns the names of the checkpoints that a store, or each member, has."""
    places = [[*(one.path / "checkpoints").glob("[!.]*")] for one in members]
    names = [{x.name for x in p if x.is_dir() and not x.is_symlink()} for p in places]
    return sorted(set.intersection(*names))


def list_checkpoints(*members: StoreDirectory) -> list[CheckpointInfo]:
    """Returns the checkpoints that all members have of one commit, by step and name.

    One whose record cannot be read is left out, with a warning; nothing else is read.
    """
    found = []
    for name in checkpoint_names(*members):
        records = []
        for path in [one.path / "checkpoints" / name for one in members]:
            try:
                records.append(CommitRecord.read(path / "commit.json"))
            except StoreError as error:
                if path.exists():  # otherwise another process has just removed it
                    _LOG.warning("%s: no checkpoint that can be read: %s", path, error)
        commits = {record.commit for record in records}
        if len(records) == len(members) and len(commits) == 1:
            own = records[0]
            found.append(CheckpointInfo(name, own.step, own.committed_at))
    return sorted(found, key=lambda info: (info.step, info.name))


def check_exists(directory: StoreDirectory, name: str) -> None:
    """Raises ValueError without a checkpoint of that name; lists the others."""
    if name not in (names := checkpoint_names(directory)):
        raise ValueError(
            f"{directory.path}: expected a checkpoint {name!r}; there are: "
            f"{', '.join(names) or 'none'}"
        )


def save_checkpoint(
    directory: StoreDirectory, name: str | None = None, *, overwrite: bool = False
) -> str:
    """Keeps the committed step; any process may do so beside a running writer.

    Blocks until the checkpoint is durable. It takes time and space only for the links.
    From the next steps on, the step's data is on the drives twice; the room for that is
    checked first.

    Args:
      name: name of the checkpoint, which is returned. By default it is the step's
        number, and Orbax's CheckpointManager lists it.
      overwrite: whether a checkpoint of that name is replaced. It stays until the new
        one is complete and durable.

    Raises:
      ValueError: the name is not valid, or is another step's number.
      StoreMismatchError: there is a checkpoint of that name.
      StoreSpaceError: the drives have too little room; nothing was made.
    """
    new = f"checkpoints/.new-{uuid.uuid4().hex}"
    with _managed(directory) as directory, contextlib.ExitStack() as undo:
        with lock_exclusively(directory.publish_lock):
            slot = directory.need_slot()
            record = directory.read_record(slot)
            name = str(record.step) if name is None else name
            _check_name(name, record.step)
            place = f"checkpoints/{name}"
            if not os.path.lexists(directory.step_path(place)):
                _check_space(directory, slot)  # one that replaces another has its room
            elif not overwrite or name not in checkpoint_names(directory):
                raise StoreMismatchError(
                    f"{directory.path}: there is a checkpoint {name!r} already; give "
                    "another name, or replace it (store.checkpoint(name, overwrite="
                    "True)), or remove it (jaxinf checkpoint remove "
                    f'"{directory.path}" {name})'
                )
            undo.callback(remove_step, directory, new)
            with translated("checkpoint", directory.step_path(place)):
                make_place(directory, new, record.carry, source=slot, named=place)
        directory.manifest.write(directory.step_path(new) / "jaxinf.json")
        record.write(directory.step_path(new) / "commit.json")
        directory.sync()
        old = f"checkpoints/{_ASIDE}{name}"
        with translated("checkpoint", directory.step_path(place)):
            _rename(directory, place, old)  # if there is one
            _rename(directory, new, place, appears=True)
        undo.pop_all()
        remove_step(directory, old)
    return name


def remove_checkpoint(directory: StoreDirectory, name: str) -> None:
    """Removes a checkpoint, damaged or not; blocks until its removal is durable."""
    gone = f"checkpoints/.gone-{uuid.uuid4().hex}"
    with _managed(directory) as directory:
        check_exists(directory, name)
        with translated("removal", directory.path / "checkpoints" / name):
            _rename(directory, f"checkpoints/{name}", gone)
        remove_step(directory, gone)


def restore_checkpoint(directory: StoreDirectory, name: str) -> CommitRecord:
    """Makes a checkpoint the committed step; returns its record.

    The caller is the store's writer and holds the lock of the checkpoints, too. The
    links replace the content of the spare slot. The step committed before then becomes
    the spare one, until the next step is written. A refusal changes nothing.
    """
    step, place = find_step(directory, name), f"checkpoints/{name}"
    record, carried = step.commit, step.read_carry()
    spare = other_slot(directory.need_slot())
    _check_space(directory, None)
    directory.unpublish(spare)
    for one in directory.manifest.held():
        directory.link_chunk(place, spare, one)
    make_carry(directory.step_path(spare), directory.manifest, record.carry)
    write_carry(directory.step_path(spare), record.carry, carried)
    directory.sync()
    directory.write_record(spare, record)
    directory.flip(spare)
    return record


def prune_leftovers(directory: StoreDirectory) -> None:
    """Removes checkpoints whose creation or removal was interrupted by a crash.

    One that was to be replaced is put back, unless another has its name. The caller
    holds the lock of the checkpoints.
    """
    root = directory.path / "checkpoints"
    if not root.is_dir():
        return
    for old in sorted(root.glob(f"{_ASIDE}[!.]*")):
        path = root / old.name.removeprefix(_ASIDE)
        if os.path.lexists(path) or old.is_symlink() or not old.is_dir():
            continue
        places = [f"checkpoints/{one.name}" for one in (old, path)]
        with translated("renaming", path):
            for held, half in zip(*map(directory.data_paths, places), strict=True):
                if held.exists():  # what is under the name is of the other one
                    shutil.rmtree(half, ignore_errors=True)
            _rename(directory, *places, appears=True)
    names = {name for name in os.listdir(root) if not name.startswith(_LEFTOVERS)}
    for folder in directory.folders("checkpoints"):
        for name in os.listdir(folder) if folder.is_dir() else ():
            if name not in names:
                with translated("removal", folder / name):
                    shutil.rmtree(folder / name)


def take_over(directory: StoreDirectory) -> None:
    """Notes a store on its CSDs, and removes what crashes and ended processes left.

    The caller is its writer, and holds the lock of the checkpoints.
    """
    claim_csds(directory)
    prune_snapshots(directory)
    prune_leftovers(directory)
    directory.prune_temporaries()


@contextlib.contextmanager
def _managed(directory: StoreDirectory) -> Iterator[StoreDirectory]:
    """Locks the checkpoints; yields the store as read then, without leftovers."""
    root = directory.path / "checkpoints"
    with (
        translated("checkpoint", root),
        lock_exclusively(directory.path / "checkpoints.lock"),
    ):
        if directory.lock is None:
            directory = read_owned(directory.path)
        root.mkdir(exist_ok=True)
        prune_leftovers(directory)
        yield directory


def _check_name(name: str, step: int) -> None:
    """Refuses a checkpoint's name for a step."""
    is_plain = name.isprintable() and "/" not in name and not name.startswith(".")
    is_other = name.isdecimal() and name != str(step)
    if not name or not is_plain or is_other or len(name.encode()) > _MAX_NAME_BYTES:
        raise ValueError(
            f"checkpoint name {name!r}: expected a file name that does not start with "
            f"a dot, without slashes, of at most {_MAX_NAME_BYTES} bytes, and as a "
            f"number that of the step, {step}"
        )


def _rename(
    directory: StoreDirectory, old: str, new: str, *, appears: bool = False
) -> None:
    """Renames a checkpoint, on CSDs too; one that appears is complete before."""
    pairs = list(zip(*map(directory.folders, (old, new)), strict=True))
    for source, target in reversed(pairs) if appears else pairs:
        if source.exists():
            source.rename(target)
            fsync_directory(source.parent)


def _check_space(directory: StoreDirectory, pinned: Slot | None) -> None:
    """Refuses if later steps would have no room to replace the linked files.

    Those of the slot `pinned` are about to be linked to. No step writes a chunk that
    both slots share, except after a restore.
    """
    needs, shared = Counter[Path](), Counter[Path]()
    for one in directory.manifest.held():
        files = {slot: directory.chunk_file(slot, one) for slot in SLOTS}
        found = {slot: os.lstat(file) for slot, file in files.items() if file.exists()}
        inodes = {(status.st_dev, status.st_ino) for status in found.values()}
        own = shared if len(inodes) < len(found) else needs
        own[directory.csd_directories[one.csd]] += one.drive_bytes * sum(
            slot not in found or slot == pinned or found[slot].st_nlink > 1
            for slot in SLOTS
        )
    check_free_space(
        needs or shared,
        "with this checkpoint the steps to come need",
        "free some, or remove another checkpoint (jaxinf checkpoint "
        f'list "{directory.path}")',
    )
