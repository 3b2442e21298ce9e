"""A store's members: one, or those of a run in several processes; steps of all.

Invariant: a step or checkpoint of a run is of one commit in all members, which are
listed by number. A store of one process is its only member. `agreed_step` is pure, and
the same in every process; the explorer of tests/distributed runs it and `CommitAction`.
A copy's steps do not change meanwhile: they are pinned, or the store is held.
"""

import contextlib
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import NamedTuple

from jaxinf.errors import (
    ProcessError,
    StoreFormatError,
    StoreLockedError,
    StoreMismatchError,
)
from jaxinf.store.commit import CommitRecord
from jaxinf.store.directory import SLOTS, StoreDirectory, check_there, other_slot
from jaxinf.store.files import files_beside
from jaxinf.store.lock import StoreLock, lock_exclusively
from jaxinf.store.manifest import Manifest, without_csds
from jaxinf.store.owners import look_at_store, read_owned
from jaxinf.store.reader import CommittedStep
from jaxinf.store.steps import (
    are_of_one,
    check_exists,
    checkpoint_names,
    find_step,
    joined_step,
    list_checkpoints,
    readable_step,
    remove_checkpoint,
    restore_checkpoint,
    save_checkpoint,
    step_of,
    take_over,
)
from jaxinf.typing import PathLikeStr

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


class StepId(NamedTuple):
    """A committed step as members tell each other: its number, its commit's id."""

    step: int
    commit: str


class HeldSteps(NamedTuple):
    """The steps of a member's slots: the committed one, that of the other's record."""

    current: StepId | None
    spare: StepId | None


def agreed_step(
    members: Sequence[HeldSteps], path: PathLikeStr = "RUN"
) -> StepId | None:
    """Returns the step that all members go on from; None if none was ever committed.

    It is the committed step of at least one member, and all others have it, too. If
    they have several such steps, it is the latest: a record of it in a spare slot was
    written when its chunks were durable, and that slot is not rewritten before all have
    committed a later one.

    Raises:
      ProcessError: the members of the run at this path have no such step.
    """
    held = [{one.current, one.spare or one.current} for one in members]
    common = {one.current for one in members}.intersection(*held)
    if not common:
        listed = "; ".join(f"process {n}: {steps}" for n, steps in enumerate(members))
        raise ProcessError(
            f"{path}: expected a step that all members have, found none: {listed}. Was "
            "one of them restored from a backup, or restored alone? Go back to a "
            "checkpoint of all: open_store(path, restore=NAME) in all processes, or "
            f"jaxinf checkpoint restore {path} NAME --discard-current"
        )
    return max((step for step in common if step is not None), default=None)


def held_steps(directory: StoreDirectory) -> HeldSteps:
    """Returns the steps of a member's two slots whose records can be read.

    That of the spare one proves nothing of its chunks: the removal of a record need not
    be durable when its slot is rewritten.
    """
    committed, found = directory.committed_slot(), dict[str | None, StepId]()
    for slot in SLOTS:
        with contextlib.suppress(StoreFormatError):
            record = CommitRecord.read(directory.step_path(slot) / "commit.json")
            found[slot] = StepId(record.step, record.commit)
    return HeldSteps(found.get(committed), found.get(other_slot(committed)))


def to_step(members: Sequence[StoreDirectory], step: StepId | None) -> None:
    """Makes the result of `agreed_step` the committed step; the caller holds members.

    Its record was written when its chunks were durable, and they have not been
    overwritten since; see docs/format.md.
    """
    for one in members:
        if step is not None and held_steps(one).current != step:
            one.flip(other_slot(one.committed_slot()))


# --- members at a path ----------------------------------------------------------------


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
    """Opens all members of a run by number, or a store of one process, for reading."""
    if not is_run(path):
        return [look_at_store(path)]
    members = [look_at_store(place) for place in find_members(path)]
    if missing := missing_members(members):
        raise ProcessError(
            f"{path}: expected all members of the run, found none of process "
            f"{', '.join(map(str, missing))}; run this where all can be seen, or make "
            "the run again from an export: jaxinf store copy EXPORT NEW --processes N",
        )
    by_number = {m.number: one for one in members if (m := one.manifest.member)}
    return [by_number[number] for number in sorted(by_number)]


@contextlib.contextmanager
def hold_members(
    path: Path, *, needs_common: bool = True
) -> Iterator[list[StoreDirectory]]:
    """Makes this process the only writer of all members while the context lasts.

    Members at different steps go to the common one, as at the start of their run. The
    yielded stores are read under their locks, and notes on their CSDs name them.

    Raises:
      StoreLockedError: a run has them open.
      ProcessError: a member cannot be seen, or with `needs_common` they have no step in
        common.
    """
    members = list[StoreDirectory]()
    with contextlib.ExitStack() as stack:
        for place in [one.path for one in all_members(path)]:
            lock = StoreLock(place)
            stack.callback(lock.release)
            stack.enter_context(lock_exclusively(place / "checkpoints.lock"))
            directory = read_owned(place)
            directory.lock = lock
            take_over(directory)
            members.append(directory)
        try:
            to_step(members, agreed_step([held_steps(one) for one in members], path))
        except ProcessError:
            if needs_common:
                raise
        yield members


def of_one_commit(
    path: Path,
    members: Sequence[StoreDirectory],
    take: Callable[[StoreDirectory, contextlib.ExitStack], CommittedStep],
) -> tuple[list[CommittedStep], contextlib.ExitStack]:
    """Returns a step of one commit of all members, also while the run goes on; blocks.

    Members that were killed at different steps go to the common one.

    What `take` gives the stack, which is returned, too, is undone if the steps that it
    takes are not of one commit.
    """
    steps = ""
    for _ in range(_NUM_ATTEMPTS):
        with contextlib.ExitStack() as undo:
            found = [take(one, undo) for one in members]
            if are_of_one(found):
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

    Any process may do so beside a running run; raises as `save_checkpoint`, and a
    ProcessError if a member cannot be seen, or they are at different steps.
    """

    def keep(one: StoreDirectory, undo: contextlib.ExitStack) -> CommittedStep:
        kept = save_checkpoint(one, name)
        undo.callback(remove_checkpoint, one, kept)
        return step_of(one, one.step_path(f"checkpoints/{kept}"))

    made, _ = of_one_commit(path, all_members(path), keep)
    return [one.path for one in made]


def restore_whole(
    path: Path, name: str, *, discard_current: bool = False
) -> CommitRecord:
    """Makes a checkpoint the committed step of all members; returns its record.

    A crash in between leaves some of them at it, with the step before in their other
    slot: that is the one that all go on from, also if this is called again. Nobody has
    the store or the run open. With `discard_current` no checkpoint need keep the
    committed step.

    Raises:
      StoreMismatchError: its arrays differ from a store's, or they are not of one
        commit; or no checkpoint keeps the committed step.
    """
    with hold_members(path, needs_common=not discard_current) as members:
        joined_step([find_step(one, name) for one in members])  # refuses others
        for one in members if not discard_current else ():
            _check_kept(path, name, one)
        records = [restore_checkpoint(one, name) for one in members]
        return records[0]


def _check_kept(path: Path, name: str, member: StoreDirectory) -> None:
    """Refuses to give up a committed step that no checkpoint of a member keeps."""
    try:
        current = member.read_commit()
        kept = [info.committed_at for info in list_checkpoints(member)]
        if current is None or current.committed_at in kept:
            return
        why = f"step {current.step} is committed and in no checkpoint; keep it first "
        why += f"(jaxinf checkpoint save {path} NAME)"
    except StoreFormatError as error:
        why = f"it is not known whether a checkpoint keeps the committed step: {error}"
    raise StoreMismatchError(
        f"{member.path}: {why}, or give it up: jaxinf checkpoint restore {path} {name} "
        "--discard-current"
    )


def remove_whole(path: Path, names: Sequence[str]) -> None:
    """Removes checkpoints of all members, or none if one exists nowhere; blocks.

    What an interrupted removal has left goes, too.
    """
    members = all_members(path)
    pairs = [(n, one) for n in names for one in members if n in checkpoint_names(one)]
    for name in {*names} - {name for name, _ in pairs}:
        check_exists(members[0], name)  # raises
    for name, one in pairs:
        remove_checkpoint(one, name)


# --- what a copy begins with ---------------------------------------------------------


@dataclass(frozen=True)
class CopySource:
    """Steps that are copied together.

    The committed step is slot ``a`` among `steps`, others are ``checkpoints/NAME``;
    their manifests are of a store of one process, whose CSDs are places of the step.
    """

    where: str  # for messages
    parts: Sequence[Manifest]  # of the members by number, or of the store alone
    steps: Mapping[str, CommittedStep]
    beside: Mapping[str, bytes]  # a store's files beside its steps, by name
    has_links: bool = True  # whether chunks may be linked to: they are a store's
    num_threads: int = 4  # and chunks that may be in memory at once
    dropped: tuple[str, ...] = ()  # checkpoints that are not of all members
    held: Sequence[StoreDirectory] = ()  # the stores, if this process holds them

    @property
    def step(self) -> CommittedStep:
        """The step that all copies have."""
        return self.steps["a"]


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
      StoreMismatchError: a checkpoint has other arrays than the store, or is not of
        one commit in all members.
      ValueError: there is no such checkpoint; lists the others.
    """
    if (path / "commit.json").is_file():
        store, folder = path.parent.parent, path.parent.name
        if folder != "checkpoints" or not (store / "jaxinf.json").exists():
            yield _copied_out(path)
            return
        path, checkpoint = store, path.name
    with contextlib.ExitStack() as stack:
        parts = stack.enter_context(hold_members(path)) if holds else all_members(path)
        for one in parts if holds else ():
            check_unread(one)
        if holds or checkpoint is not None:
            step = joined_step([find_step(one, checkpoint) for one in parts])
        else:
            pinned, pins = of_one_commit(
                path, parts, lambda one, undo: undo.enter_context(readable_step(one))
            )
            stack.enter_context(pins)
            step = joined_step(pinned)
            pairs = zip(parts, pinned, strict=True)
            parts = [StoreDirectory(one.path, held.manifest) for one, held in pairs]
        steps, dropped = {"a": step}, set[str]()
        if checkpoints:
            dropped = {name for one in parts for name in checkpoint_names(one)}
            for name in checkpoint_names(*parts):
                if are_of_one(own := [find_step(one, name) for one in parts]):
                    steps[f"checkpoints/{name}"] = joined_step(own)
                    dropped.remove(name)
        yield CopySource(
            str(path),
            [one.manifest for one in parts],
            steps,
            files_beside(parts[0].path),
            has_links=not step.warning and checkpoint is None,
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


def _copied_out(path: Path) -> CopySource:
    """Returns a checkpoint that was copied out of its store."""
    check_there(path, is_step=True)
    manifest = without_csds(Manifest.read(path / "jaxinf.json"))
    record = CommitRecord.read(path / "commit.json")
    step = joined_step([CommittedStep(path, manifest, record, (path,))])
    beside = files_beside(path)
    return CopySource(str(path), [manifest], {"a": step}, beside, has_links=False)
