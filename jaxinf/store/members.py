"""A store's members: one, or those of a run in several processes; checkpoints of all.

Invariant: a checkpoint of a run is of one commit in all members, which are listed by
number. A store of one process is its only member. `agreed_step` is pure, and the same
in every process; the explorer of tests/support runs it and `CommitAction`. The steps
that a copy begins with do not change meanwhile: they are pinned, or the store is held.
"""

import contextlib
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from jaxinf.errors import (
    ProcessError,
    StoreFormatError,
    StoreLockedError,
    StoreMismatchError,
)
from jaxinf.store.commit import CommitRecord
from jaxinf.store.creation import files_beside
from jaxinf.store.directory import StoreDirectory, check_there, next_slot
from jaxinf.store.lock import StoreLock, lock_exclusively
from jaxinf.store.manifest import Manifest, without_csds
from jaxinf.store.owners import check_is_store, claim_csds, look_at_store, read_owned
from jaxinf.store.steps import (
    CheckpointInfo,
    CommittedStep,
    check_arrays,
    checkpoint_names,
    find_checkpoint,
    joined_step,
    list_checkpoints,
    pinned_step,
    prune_snapshots,
    readable_step,
    remove_checkpoint,
    restore_checkpoint,
    save_checkpoint,
    step_of,
)

_MEMBER = re.compile(r"process-\d{5,}")
_NUM_ATTEMPTS = 20
_PAUSE_S = 0.2


class CommitAction(Enum):
    """The actions of a commit in their order; see docs/format.md for the argument.

    Each is over, and durable, before the next begins.
    """

    SYNC = "sync"  # the step's chunks become durable
    RECORD = "record"  # the slot gets its record
    MEET = "meet"  # every member has done the actions before
    FLIP = "flip"  # `current` names the slot


@dataclass(frozen=True, order=True)
class StepId:
    """A committed step as members tell each other: its number, its commit's id."""

    step: int
    commit: str


@dataclass(frozen=True)
class HeldSteps:
    """The steps of a member's slots: the committed one, that of the other's record."""

    current: StepId | None
    spare: StepId | None

    def has(self, step: StepId | None) -> bool:
        """Whether a slot has a step, or no step is wanted and none is committed."""
        if step is None:
            return self.current is None
        return step in (self.current, self.spare)


def agreed_step(members: Sequence[HeldSteps]) -> StepId | None:
    """Returns the step that all members go on from; None if none was ever committed.

    It is the committed step of at least one member, and all others have it, too. If
    they have several such steps, it is the latest: a record of it in a spare slot was
    written when its chunks were durable, and that slot is not rewritten before all have
    committed a later one.

    Raises:
      LookupError: the members have no such step.
    """
    found = {member.current for member in members}
    common = [step for step in found if all(member.has(step) for member in members)]
    if not common:
        raise LookupError("no common step")
    return max((step for step in common if step is not None), default=None)


def find_members(path: Path) -> list[Path]:
    """Returns the members of a run that can be seen at a path, by number."""
    found = (file.parent for file in path.glob("process-[0-9]*/jaxinf.json"))
    return sorted(place for place in found if _MEMBER.fullmatch(place.name))


def is_run(path: Path) -> bool:
    """Whether a path has the members of a run, and is not a store itself."""
    return not (path / "jaxinf.json").exists() and bool(find_members(path))


def member_name(number: int) -> str:
    """Returns the name of a member's directory below the path of a run."""
    return f"process-{number:05d}"


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


def all_members(path: Path) -> list[StoreDirectory]:
    """Opens all members of a run, or a store of one process, for reading."""
    if not is_run(path):
        return [look_at_store(path)]
    members = [look_at_store(place) for place in find_members(path)]
    if missing := missing_members(members):
        raise ProcessError(
            f"{path}: expected all members of the run, found none of process "
            f"{', '.join(map(str, missing))}; run this where all can be seen, or make "
            "the run again from an export: jaxinf store copy EXPORT NEW --processes N",
            missing,
        )
    by_number = {m.number: one for one in members if (m := one.manifest.member)}
    return [by_number[number] for number in sorted(by_number)]


# --- one writer -----------------------------------------------------------------------


@contextlib.contextmanager
def hold_members(path: Path, *, moves: bool = True) -> Iterator[list[StoreDirectory]]:
    """Makes this process the only writer of all members while the context lasts.

    Args:
      moves: whether members at different steps go to the common one, as at the start
        of their run.

    Yields:
      The stores, read under their locks; notes on their CSDs name them as the owners.

    Raises:
      StoreLockedError: a run has them open.
      ProcessError: a member cannot be seen, or they have no step in common.
      StoreError: a member is damaged.
    """
    is_alone, members = not is_run(path), list[StoreDirectory]()
    with contextlib.ExitStack() as stack:
        for place in [path] if is_alone else [one.path for one in all_members(path)]:
            check_is_store(place)
            lock = StoreLock(place)
            stack.callback(lock.release)
            stack.enter_context(lock_exclusively(place / "checkpoints.lock"))
            directory = read_owned(place)
            directory.lock, member = lock, directory.manifest.member
            if is_alone and member is not None:
                raise StoreFormatError(
                    f"{place}: expected the store of one process, found member "
                    f"{member.number} of a run of {member.count}, and its step and "
                    "its places change with the others' alone; open the run's path in "
                    "all its processes"
                )
            claim_csds(directory)
            members.append(directory)
        if moves:
            to_step(members, _common_step(path, members))
        yield members


def _common_step(path: Path, members: Sequence[StoreDirectory]) -> StepId | None:
    """Returns the step that members go on from; None for a store of one process."""
    if members[0].manifest.member is None:
        return None
    held = [held_steps(one) for one in members]
    try:
        return agreed_step(held)
    except LookupError:
        pairs = zip(members, held, strict=True)
        listed = ", ".join(f"{one.path.name}: {steps}" for one, steps in pairs)
        raise ProcessError(
            f"{path}: expected a step that all have, found {listed}; go back to a "
            f"checkpoint of all: jaxinf checkpoint restore {path} NAME "
            "--discard-current"
        ) from None


# --- their common step ---------------------------------------------------------------


def held_steps(directory: StoreDirectory) -> HeldSteps:
    """Returns the steps of a member's two slots, as the start of its run finds them."""
    slot = directory.committed_slot()
    current = None if slot is None else directory.found_record(slot)
    records = current, directory.found_record(next_slot(slot))
    return HeldSteps(*(one and StepId(one.step, one.commit) for one in records))


def to_step(members: Sequence[StoreDirectory], step: StepId | None) -> None:
    """Makes the result of `agreed_step` the committed step; the caller holds members.

    Its record was written when its chunks were durable, and they have not been
    overwritten since; see docs/format.md.
    """
    for one in members:
        if step is not None and held_steps(one).current != step:
            one.flip(next_slot(one.committed_slot()))


def of_one_commit(
    path: Path,
    members: Sequence[StoreDirectory],
    take: Callable[[StoreDirectory, contextlib.ExitStack], CommittedStep],
) -> tuple[list[CommittedStep], contextlib.ExitStack]:
    """Takes a step of one commit from all members, also while the run goes on; blocks.

    Members that were killed at different steps go to the common one.

    Args:
      take: takes a member's step. What it gives the stack is undone if the steps are
        not of one commit.

    Returns:
      The steps, and the stack of all, which the caller closes.
    """
    steps = ""
    for _ in range(_NUM_ATTEMPTS):
        with contextlib.ExitStack() as undo:
            found = [take(one, undo) for one in members]
            if len({one.commit.commit for one in found}) == 1:
                return found, undo.pop_all()
        pairs = zip(members, found, strict=True)
        steps = ", ".join(f"{one.path.name}: {n.commit.step}" for one, n in pairs)
        with contextlib.suppress(StoreLockedError), hold_members(path):
            pass  # after a kill: they go to the common one
        time.sleep(_PAUSE_S)
    raise ProcessError(
        f"{path}: expected all members at one step, found {steps}, and a run has them "
        "open; try again when it goes on"
    )


# --- checkpoints ---------------------------------------------------------------------


def save_whole(path: Path, name: str | None = None) -> list[Path]:
    """Keeps the committed step of all members; blocks, and returns its directories.

    Any process may do so beside a running run.

    Args:
      path: the path of the store or the run.
      name: name of the checkpoint; by default the step's number.

    Raises:
      ProcessError: a member cannot be seen, or they are at different steps.
      StoreMismatchError: there is a checkpoint of that name.
    """

    def keep(one: StoreDirectory, undo: contextlib.ExitStack) -> CommittedStep:
        kept = save_checkpoint(one, name)
        undo.callback(remove_checkpoint, one, kept)
        return step_of(one, one.step_path(f"checkpoints/{kept}"))

    made, undo = of_one_commit(path, all_members(path), keep)
    undo.pop_all()
    return [one.path for one in made]


def list_whole(path: Path) -> list[CheckpointInfo]:
    """Returns the checkpoints that all members have of one commit, by step and name.

    Raises:
      ProcessError, StoreError: as `save_whole`.
    """
    members = all_members(path)
    lists = [list_checkpoints(one) for one in members]  # those that can be read
    kept = [{info.name for info in infos} for infos in lists]
    return [
        info
        for info in lists[0]
        if all(info.name in names for names in kept) and is_of_all(members, info.name)
    ]


def is_of_all(members: Sequence[StoreDirectory], name: str) -> bool:
    """Whether a checkpoint that all members have is of one commit."""
    if len(members) == 1:
        return True
    return len({find_checkpoint(one, name).commit for one in members}) == 1


def find_whole(members: Sequence[StoreDirectory], name: str) -> None:
    """Refuses a checkpoint that is not in all members, and of one commit there.

    Raises:
      ValueError: a member has no checkpoint of that name; lists its others.
      StoreMismatchError: they are not of one commit.
    """
    if len({find_checkpoint(one, name).commit for one in members}) > 1:
        raise StoreMismatchError(
            f"{members[0].path.parent}: checkpoint {name!r}: expected one of all "
            "members together, found one of each, of different commits; give another"
        )


def restore_whole(
    path: Path, name: str, *, discard_current: bool = False
) -> CommitRecord:
    """Makes a checkpoint the committed step of all members; returns its record.

    A crash in between leaves some of them at it, with the step before in their other
    slot: that is the one that all go on from, also if this is called again.

    Args:
      path: the path of the store or the run, which nobody has open.
      name: a checkpoint of all.
      discard_current: whether the committed step may be in no checkpoint.

    Raises:
      ValueError: a member has no checkpoint of that name.
      StoreMismatchError: its arrays differ from a store's, or they are not of one
        commit; or no checkpoint keeps the committed step.
      StoreSpaceError: the drives have too little room.
      StoreLockedError, ProcessError: as `hold_members`.
    """
    with hold_members(path, moves=False) as members:
        find_whole(members, name)
        step = None
        try:
            step = _common_step(path, members)
        except ProcessError:
            if not discard_current:
                raise
        if not discard_current:
            _check_kept(path, name, members, step)
        to_step(members, step)
        records = [restore_checkpoint(one, name) for one in members]
        return records[0]


def _check_kept(
    path: Path, name: str, members: Sequence[StoreDirectory], step: StepId | None
) -> None:
    """Refuses to give up a committed step that no checkpoint of a member keeps.

    Args:
      step: the one that the members of a run go on from; a member that was killed
        before its own flip has it in its other slot.
    """
    give_up = f"jaxinf checkpoint restore {path} {name} --discard-current"
    for one in members:
        try:
            current = one.read_commit()
        except StoreFormatError as error:
            raise StoreMismatchError(
                f"{error}. So it is not known whether a checkpoint keeps the committed "
                f"step; give it up with: {give_up}"
            ) from error
        if current and step not in (None, StepId(current.step, current.commit)):
            current = one.found_record(next_slot(one.committed_slot()))
        infos = list_checkpoints(one) if current else []
        kept = [find_checkpoint(one, info.name).committed_at for info in infos]
        if current and current.committed_at not in kept:
            raise StoreMismatchError(
                f"{one.path}: step {current.step} is committed and in no checkpoint; "
                f"keep it first (jaxinf checkpoint save {path} NAME), or give it up "
                f"({give_up})"
            )


def remove_whole(path: Path, names: Sequence[str]) -> None:
    """Removes checkpoints of all members, or none if one exists nowhere; blocks.

    What an interrupted removal has left goes, too.

    Raises:
      ValueError: no member has a checkpoint of a name.
      ProcessError, StoreError: as `save_whole`.
    """
    members = all_members(path)
    by_name = {n: [m for m in members if n in checkpoint_names(m)] for n in names}
    for name, holders in by_name.items():
        if not holders:
            find_checkpoint(members[0], name)  # raises
    for name, holders in by_name.items():
        for one in holders:
            remove_checkpoint(one, name)


# --- what a copy begins with ----------------------------------------------------------

_PART = (
    "expected a whole step, found a member's part; export the checkpoint of the run: "
    "jaxinf checkpoint export RUN DEST --checkpoint NAME"
)


@dataclass(frozen=True)
class CopySource:
    """Steps that are copied together.

    Attributes:
      where: what it is, for messages.
      parts: the manifests of the members by number, or of the store alone.
      steps: the committed step as slot ``a``, and checkpoints as ``checkpoints/NAME``.
      beside: what belongs to a store beside its steps, by the names of files.
      has_links: whether chunks may be linked to: they are a store's.
      num_threads: number of chunks that may be in memory at once.
      spares: directories of the other slot's chunks by CSD, of a store that is held.
      dropped: checkpoints that are not of all members.
      held: the members or the store, if this process holds them.
    """

    where: str
    parts: Sequence[Manifest]
    steps: Mapping[str, CommittedStep]
    beside: Mapping[str, bytes]
    has_links: bool = True
    num_threads: int = 4
    spares: Sequence[Path] = ()
    dropped: tuple[str, ...] = ()
    held: Sequence[StoreDirectory] = ()

    @property
    def step(self) -> CommittedStep:
        """The step that all copies have."""
        return self.steps["a"]

    @property
    def whole(self) -> Manifest:
        """The manifest of a store of one process; CSDs are places of the step."""
        return self.step.manifest


@contextlib.contextmanager
def store_source(
    path: Path,
    checkpoint: str | None = None,
    *,
    holds: bool = False,
    checkpoints: bool = False,
) -> Iterator[CopySource]:
    """Yields a store, a run of several processes, or a checkpoint's directory.

    Args:
      path: where it is; of a run, all members can be seen there.
      checkpoint: a checkpoint that it has, in place of its committed step.
      holds: whether this process becomes its only writer. Otherwise it may be in use.
      checkpoints: whether those that all members have come along.

    Raises:
      StoreLockedError: a run, or a reader of a step, has it open, with `holds`.
      ProcessError: a member cannot be seen, or they have no step in common.
      StoreFormatError: there is no store, or none with a committed step.
      StoreMismatchError: a checkpoint has other arrays than the store, or is not of
        one commit in all members.
      ValueError: there is no such checkpoint; lists the others.
    """
    if (path / "commit.json").is_file():
        store, folder = path.parent.parent, path.parent.name
        if folder != "checkpoints" or not (store / "jaxinf.json").exists():
            yield _of_directory(path)
            return
        path, checkpoint = store, path.name
    with contextlib.ExitStack() as stack:
        if holds:
            parts = stack.enter_context(hold_members(path))
            for one in parts:
                prune_snapshots(one)
                check_unread(one)
            step = _joined(parts)
        elif checkpoint is not None:
            parts = all_members(path)
            step = _kept_step(parts, checkpoint)
        elif is_run(path):
            parts = all_members(path)
            pinned, undo = of_one_commit(
                path, parts, lambda one, held: held.enter_context(pinned_step(one))
            )
            stack.enter_context(undo)
            step = joined_step(pinned)
        else:
            step = stack.enter_context(readable_step(look_at_store(path)))
            step.check()
            parts = [StoreDirectory(path, step.manifest)]
        steps, dropped = {"a": step}, set[str]()
        if checkpoints:
            names = [{*checkpoint_names(one)} for one in parts]
            for name in sorted(set.intersection(*names)):
                if is_of_all(parts, name):
                    steps[f"checkpoints/{name}"] = _kept_step(parts, name)
            kept = {place.rpartition("/")[2] for place in steps}
            dropped = set.union(*names) - kept
        yield CopySource(
            str(path),
            [one.manifest for one in parts],
            steps,
            files_beside(parts[0].path),
            has_links=not step.warning and checkpoint is None,
            spares=[n for one in parts for n in _spares(one)] if holds else (),
            dropped=tuple(sorted(dropped)),
            held=parts if holds else (),
        )


def check_unread(directory: StoreDirectory) -> None:
    """Refuses a store of which another process reads a step."""
    root = directory.path / "snapshots"
    if root.is_dir() and any(root.iterdir()):
        raise StoreLockedError(
            f"{directory.path}: expected nobody who reads its step, found a pinned one "
            f"in {root}: an export, a look or another copy is under way; wait for it, "
            "or copy to another path"
        )


def _kept_step(parts: Sequence[StoreDirectory], name: str) -> CommittedStep:
    """Returns a checkpoint of all members."""
    find_whole(parts, name)
    if len(parts) == 1 and parts[0].manifest.member is not None:
        raise StoreFormatError(f"{parts[0].path}: {_PART}")
    for one in parts:
        check_arrays(one, name)
    return _joined(parts, f"checkpoints/{name}")


def _of_directory(path: Path) -> CopySource:
    """Returns a checkpoint that was copied out of its store."""
    check_there(path)
    commit, manifest = path / "commit.json", Manifest.read(path / "jaxinf.json")
    if manifest.member is not None:
        raise StoreFormatError(f"{path}: {_PART}")
    manifest = without_csds(manifest)
    step = CommittedStep(path, manifest, CommitRecord.read(commit), (path,))
    step.check()
    beside = files_beside(path)
    return CopySource(str(path), [manifest], {"a": step}, beside, has_links=False)


def _joined(parts: Sequence[StoreDirectory], place: str | None = None) -> CommittedStep:
    """Returns a step of all members, by default the committed one."""
    return joined_step(
        [step_of(one, one.step_path(place or one.need_slot())) for one in parts]
    )


def _spares(directory: StoreDirectory) -> list[Path]:
    slot = next_slot(directory.committed_slot())
    return directory.data_paths(directory.step_path(slot))
