"""The whole of a run in several processes: its members, and checkpoints of all.

    PATH/process-00000/checkpoints/NAME/…/c/0 ◄─┐
    PATH/process-00001/checkpoints/NAME/…/c/1 ◄─┴─ symlinks: PATH/checkpoints/NAME

Invariant: a whole has a step of one commit, every chunk of it, and no data of its own.
"""

import contextlib
import shutil
import time
import uuid
from collections.abc import Sequence
from pathlib import Path

from jaxinf.errors import ProcessError, StoreFormatError, StoreMismatchError
from jaxinf.io import fsync_directory
from jaxinf.io.failures import translated
from jaxinf.store.agreement import HeldSteps, StepId, agreed_step
from jaxinf.store.checkpoint import find_checkpoint, remove_checkpoint, save_checkpoint
from jaxinf.store.commit import CommitRecord
from jaxinf.store.directory import StoreDirectory, next_slot
from jaxinf.store.owned import look_at_store
from jaxinf.store.zarr_metadata import ORBAX_ITEM, ORBAX_STATE

__all__ = ["agreed_of", "find_members", "missing_members", "save_whole"]

_NUM_ATTEMPTS = 20
_PAUSE_S = 0.2
_DOCUMENTS = ("zarr.json", "_METADATA", "_CHECKPOINT_METADATA", "commit_success.txt")


def find_members(path: Path) -> list[Path]:
    """Returns the members of a run that can be seen at a path, by number."""
    return sorted(file.parent for file in path.glob("process-[0-9]*/jaxinf.json"))


def missing_members(members: Sequence[StoreDirectory]) -> list[int]:
    """Returns the numbers of the members that are not among these.

    Raises:
      StoreMismatchError: they are not of one run, or one is there twice.
    """
    held = [one.manifest.member for one in members]
    found = [member.number for member in held if member is not None]
    runs = {(member.run, member.count) for member in held if member is not None}
    if None in held or len(runs) != 1 or len(set(found)) != len(found):
        listed = "; ".join(f"{one.path}: {one.manifest.member}" for one in members)
        raise StoreMismatchError(
            f"expected members of one run, each once, found {listed}; move what does "
            "not belong there aside"
        )
    [(_, count)] = runs
    return sorted(set(range(count)) - set(found))


def agreed_of(members: Sequence[StoreDirectory]) -> StepId | None:
    """Returns the step that a run of these members would go on from.

    Raises:
      ProcessError: they have none in common.
    """
    try:
        return agreed_step([_held(one) for one in members])
    except LookupError:
        listed = ", ".join(f"{one.path.name}: {_held(one)}" for one in members)
        raise ProcessError(f"expected a step that all have, found {listed}") from None


def save_whole(path: Path, name: str | None = None) -> Path:
    """Keeps the committed step of all members, and makes one directory of it; blocks.

    Any process may do so beside a running run. The directory is a zarr group and an
    Orbax checkpoint; its chunks are symlinks to those of the members' checkpoints of
    the same name, so that it holds where all members are visible.

    Args:
      path: the run's path.
      name: name of the checkpoint; by default the step's number.

    Returns:
      The directory.

    Raises:
      ProcessError: a member cannot be seen, or they are at different steps.
      StoreMismatchError: there is a checkpoint of that name.
    """
    members = [look_at_store(place) for place in find_members(path)]
    if not members:
        raise StoreFormatError(f"{path}: expected the members of a run, found none")
    missing = missing_members(members)
    if missing:
        raise ProcessError(
            f"{path}: expected all members of the run, found none of process "
            f"{', '.join(map(str, missing))}; run this where all can be seen",
            missing,
        )
    if name is not None and (path / "checkpoints" / name).exists():
        raise StoreMismatchError(
            f"{path}: there is a checkpoint {name!r} already; give another name"
        )
    name = _kept_in_all(path, members, name)
    place = path / "checkpoints" / name
    temporary = place.with_name(f".new-{uuid.uuid4().hex}")
    with translated("checkpoint", place):
        temporary.mkdir(parents=True)
        try:
            _link(members, name, temporary)
            temporary.rename(place)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
    fsync_directory(place.parent)
    return place


def _kept_in_all(
    path: Path, members: Sequence[StoreDirectory], name: str | None
) -> str:
    """Makes checkpoints of one commit in all members, also while the run goes on."""
    steps = ""
    for _ in range(_NUM_ATTEMPTS):
        made: list[tuple[StoreDirectory, str]] = []
        with contextlib.ExitStack() as undo:
            for one in members:
                kept = save_checkpoint(one, name)
                undo.callback(remove_checkpoint, one, kept)
                made.append((one, kept))
            records = [find_checkpoint(one, kept) for one, kept in made]
            if len({record.commit for record in records}) == 1:
                undo.pop_all()
                return made[0][1]
        pairs = zip(members, records, strict=True)
        steps = ", ".join(f"{one.path.name}: {record.step}" for one, record in pairs)
        time.sleep(_PAUSE_S)
    raise ProcessError(
        f"{path}: expected all members at one step, found {steps}; a run that was "
        "killed gets there when it is started again"
    )


def _link(members: Sequence[StoreDirectory], name: str, root: Path) -> None:
    first = members[0].path / "checkpoints" / name
    for document in _DOCUMENTS:
        shutil.copyfile(first / document, root / document)
    (root / "orbax.checkpoint").touch()
    (root / ORBAX_ITEM).mkdir()
    (root / ORBAX_ITEM / "_METADATA").symlink_to("../_METADATA")
    (root / ORBAX_STATE).symlink_to(ORBAX_ITEM)
    by_number = {}
    for one in members:
        assert one.manifest.member is not None
        by_number[one.manifest.member.number] = one
    for number, leaf in enumerate(members[0].manifest.leaves):
        for state in leaf.states:
            array = leaf.array_name(state.name)
            (root / array).mkdir()
            shutil.copyfile(first / array / "zarr.json", root / array / "zarr.json")
            (root / ORBAX_ITEM / array).symlink_to(f"../{array}")
            for chunk, owner in enumerate(leaf.owners):
                held = by_number[owner]
                key = held.state_chunk(number, chunk, state).key
                link = root / array / key
                link.parent.mkdir(parents=True, exist_ok=True)
                # The CSDs of a chunk are known to its owner alone.
                place = f"checkpoints/{name}"
                link.symlink_to(held.chunk_file(place, number, chunk, state.name))


def _held(directory: StoreDirectory) -> HeldSteps:
    slot = directory.committed_slot()
    spare = next_slot(slot)
    found: list[StepId | None] = []
    for place in (slot, spare):
        record = None if place is None else directory.step_path(place) / "commit.json"
        if record is None or not record.exists():
            found.append(None)
            continue
        with contextlib.suppress(StoreFormatError):
            read = CommitRecord.read(record)
            found.append(StepId(read.step, read.commit))
            continue
        found.append(None)
    return HeldSteps(*found)
