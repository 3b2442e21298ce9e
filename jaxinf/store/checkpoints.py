"""The checkpoints of one store: steps that are kept by hard links.

      save      current slot ──links──► checkpoints/NAME
      restore   checkpoints/NAME ──links──► spare slot ──first step──► current

Invariant: a listed checkpoint is complete and durable: it is made under another name,
which is then renamed. The writer replaces every file that has a second link.
"""

import contextlib
import logging
import os
import shutil
import uuid
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from jaxinf.errors import StoreError, StoreFormatError, StoreMismatchError
from jaxinf.store.carried_arrays import write_carry
from jaxinf.store.claims import claim_csds, open_for_writing
from jaxinf.store.commit_record import CommitRecord
from jaxinf.store.creation import check_free_space
from jaxinf.store.directory import SLOTS, Slot, StoreDirectory, is_folder, other_slot
from jaxinf.store.lock import lock_exclusively
from jaxinf.store.step_files import make_carry, make_step_files
from jaxinf.store.steps import (
    check_checkpoint_exists,
    checkpoint_names,
    find_step,
    prune_snapshots,
    remove_step,
)
from jaxinf.transfer import fsync_directory, translated

_MAX_NAME_BYTES = 200
_ASIDE = ".old-"  # before the name of a checkpoint that another one replaces
_LEFTOVERS = (".new-", ".gone-", _ASIDE)
_LOG = logging.getLogger("jaxinf")


@dataclass(frozen=True)
class CheckpointInfo:
    """A checkpoint of a store."""

    name: str
    step: int
    committed_at: str  # UTC


def list_checkpoints(*members: StoreDirectory) -> list[CheckpointInfo]:
    """Returns the checkpoints that all members have of one commit, by step and name.

    Only records are read. A checkpoint whose record cannot be read is left out, with a
    warning.
    """
    listed = []
    for name in checkpoint_names(*members):
        records = []
        for path in [member.path / "checkpoints" / name for member in members]:
            try:
                records.append(CommitRecord.read(path / "commit.json"))
            except StoreError as error:
                if path.exists():  # otherwise another process has just removed it
                    _LOG.warning("%s: no checkpoint that can be read: %s", path, error)
        commits = {record.commit for record in records}
        if len(records) == len(members) and len(commits) == 1:
            record = records[0]
            listed.append(CheckpointInfo(name, record.step, record.committed_at))
    return sorted(listed, key=lambda info: (info.step, info.name))


def save_checkpoint(
    directory: StoreDirectory, name: str | None = None, *, overwrite: bool = False
) -> str:
    """Keeps the committed step; any process may do so beside a running writer.

    Blocks until the checkpoint is durable, and returns its name: by default the step's
    number, by which Orbax's CheckpointManager lists it. Only its links take time and
    space, until the next steps put new data beside the kept data: the room for that is
    checked first. With `overwrite` it replaces a checkpoint of that name, when it is
    complete and durable.

    Raises:
      ValueError: The name is not valid, or is another step's number.
      StoreMismatchError: There is a checkpoint of that name.
      StoreSpaceError: The drives have too little room; nothing was made.
    """
    new = f"checkpoints/.new-{uuid.uuid4().hex}"
    with _locked(directory) as directory, contextlib.ExitStack() as undo:
        with lock_exclusively(directory.flip_lock):
            slot = directory.require_committed_slot()
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
                make_step_files(
                    directory, new, record.carry, source=slot, final_place=place
                )
        directory.manifest.write(directory.step_path(new) / "jaxinf.json")
        record.write(directory.step_path(new) / "commit.json")
        directory.sync()
        old = f"checkpoints/{_ASIDE}{name}"
        with translated("checkpoint", directory.step_path(place)):
            _rename(directory, place, old)
            _rename(directory, new, place, appears=True)
        undo.pop_all()
        remove_step(directory, old)
    return name


def remove_checkpoint(directory: StoreDirectory, name: str) -> None:
    """Removes a checkpoint, damaged or not; blocks until its removal is durable."""
    gone = f"checkpoints/.gone-{uuid.uuid4().hex}"
    with _locked(directory) as directory:
        check_checkpoint_exists(directory, name)
        with translated("removal", directory.path / "checkpoints" / name):
            _rename(directory, f"checkpoints/{name}", gone)
        remove_step(directory, gone)


def restore_checkpoint(directory: StoreDirectory, name: str) -> CommitRecord:
    """Makes a checkpoint the step to go on from; returns its record.

    The caller is the store's writer, and holds the lock of the checkpoints as well. The
    checkpoint is linked into the spare slot. `current` names the other slot until that
    is to be rewritten, if its record can be read. A refusal changes nothing.
    """
    step, place = find_step(directory, name), f"checkpoints/{name}"
    record, contents = step.commit, step.read_carry()
    spare = other_slot(directory.require_committed_slot())
    _check_space(directory, None)
    directory.remove_record(spare)
    for chunk in directory.manifest.held_chunks():
        directory.link_chunk(place, spare, chunk)
    make_carry(directory.step_path(spare), directory.manifest, record.carry)
    write_carry(directory.step_path(spare), record.carry, contents)
    directory.sync()
    directory.write_record(spare, record)
    try:
        directory.read_commit()
        directory.restored = spare
    except StoreFormatError:
        directory.flip(spare)
    return record


def prune_leftovers(directory: StoreDirectory) -> None:
    """Removes checkpoints whose creation or removal was interrupted by a crash.

    A checkpoint that was to be replaced is put back, unless another has its name. The
    caller holds the lock of the checkpoints.
    """
    root = directory.path / "checkpoints"
    if not root.is_dir():
        return
    for old in sorted(root.glob(f"{_ASIDE}[!.]*")):
        path = root / old.name.removeprefix(_ASIDE)
        if os.path.lexists(path) or not is_folder(old):
            continue
        places = [f"checkpoints/{folder.name}" for folder in (old, path)]
        with translated("renaming", path):
            for kept, other in zip(*map(directory.chunk_roots, places), strict=True):
                if kept.exists():  # chunks under the name are the new checkpoint's
                    shutil.rmtree(other, ignore_errors=True)
            _rename(directory, *places, appears=True)
    names = {name for name in os.listdir(root) if not name.startswith(_LEFTOVERS)}
    for folder in directory.step_roots("checkpoints"):
        for name in os.listdir(folder) if folder.is_dir() else ():
            if name not in names:
                with translated("removal", folder / name):
                    shutil.rmtree(folder / name)


def take_over(directory: StoreDirectory) -> None:
    """Claims a store's CSDs, and removes what crashes and ended processes left.

    The caller is the store's writer, and holds the lock of the checkpoints.
    """
    claim_csds(directory)
    prune_snapshots(directory)
    prune_leftovers(directory)
    directory.prune_temporaries()


@contextlib.contextmanager
def _locked(directory: StoreDirectory) -> Iterator[StoreDirectory]:
    """Locks the checkpoints; yields the store as read under the lock, pruned."""
    root = directory.path / "checkpoints"
    with (
        translated("checkpoint", root),
        lock_exclusively(directory.path / "checkpoints.lock"),
    ):
        if directory.lock is None:
            directory = open_for_writing(directory.path)
        root.mkdir(exist_ok=True)
        prune_leftovers(directory)
        yield directory


def _check_name(name: str, step: int) -> None:
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
    """Renames a checkpoint if it exists, on CSDs too.

    The store's own directory, which lists it, is renamed last if it `appears`, and
    first otherwise.
    """
    pairs = list(zip(*map(directory.step_roots, (old, new)), strict=True))
    for source, target in reversed(pairs) if appears else pairs:
        if source.exists():
            source.rename(target)
            fsync_directory(source.parent)


def _check_space(directory: StoreDirectory, pinned: Slot | None) -> None:
    """Refuses if later steps would have no room to replace the linked files.

    The files of the slot `pinned` are about to be linked to. No step writes a chunk
    that both slots share, except after a restore.
    """
    needs, shared = Counter[Path](), Counter[Path]()
    for chunk in directory.manifest.held_chunks():
        files = {slot: directory.chunk_path(slot, chunk) for slot in SLOTS}
        status = {slot: os.lstat(file) for slot, file in files.items() if file.exists()}
        inodes = {(s.st_dev, s.st_ino) for s in status.values()}
        totals = shared if len(inodes) < len(status) else needs
        totals[directory.csd_directories[chunk.csd]] += chunk.drive_bytes * sum(
            slot not in status or slot == pinned or status[slot].st_nlink > 1
            for slot in SLOTS
        )
    check_free_space(
        needs or shared,
        "with this checkpoint the steps to come need",
        "free some, or remove another checkpoint (jaxinf checkpoint "
        f'list "{directory.path}")',
    )
