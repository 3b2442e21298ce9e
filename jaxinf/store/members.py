"""The members of a run, one store for each process, and their common steps.

Invariant: a step or checkpoint of a run is of one commit in all members, which are
listed by number. A store of one process is its only member. `agree_on_step` is pure:
the explorer of tests/distributed runs it and `CommitAction`.
"""

import contextlib
import re
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from msgspec import structs

from jaxinf.errors import (
    ProcessError,
    StoreFormatError,
    StoreLockedError,
    StoreMismatchError,
)
from jaxinf.store.checkpoints import (
    list_checkpoints,
    remove_checkpoint,
    restore_checkpoint,
    save_checkpoint,
    take_over,
)
from jaxinf.store.claims import open_for_reading, open_for_writing
from jaxinf.store.commit_record import CommitRecord
from jaxinf.store.directory import SLOTS, StoreDirectory, other_slot
from jaxinf.store.lock import StoreLock, lock_exclusively
from jaxinf.store.steps import (
    CommittedStep,
    check_checkpoint_exists,
    checkpoint_names,
    find_step,
    read_step,
)
from jaxinf.typing import PathLikeStr

_MEMBER = re.compile(r"process-\d{5,}")
_NUM_ATTEMPTS = 20
_PAUSE_S = 0.2


class StepId(NamedTuple):
    """A committed step's number and its commit's id, as members tell each other."""

    step: int
    commit: str


class HeldSteps(NamedTuple):
    """The steps of a member's two slots."""

    current: StepId | None  # the committed one
    spare: StepId | None  # that of the other slot's record


def agree_on_step(
    members: Sequence[HeldSteps], path: PathLikeStr = "RUN"
) -> StepId | None:
    """Returns the step that all members go on from; None if none was ever committed.

    It is the latest step that at least one member has committed, and all others have in
    a slot: its record in a spare slot was written when its chunks were durable, and
    that slot is not rewritten before all members have committed a later step. Members
    without such a step are refused by a ProcessError that names their run's `path`.
    """
    held = [{steps.current, steps.spare or steps.current} for steps in members]
    common = {steps.current for steps in members}.intersection(*held)
    if not common:
        listed = "; ".join(f"process {n}: {steps}" for n, steps in enumerate(members))
        raise ProcessError(
            f"{path}: expected a step that all members have, found none: {listed}. Was "
            "one of them restored from a backup, or restored alone? Go back to a "
            "checkpoint of all: open_store(path, restore=NAME) in all processes, or "
            f"jaxinf checkpoint restore {path} NAME --discard-current"
        )
    return max((step for step in common if step is not None), default=None)


def read_held_steps(directory: StoreDirectory) -> HeldSteps:
    """Returns the steps of a member's two slots, None where no record can be read.

    A record in the spare slot proves nothing of its chunks: the removal of a record
    need not be durable when its slot is rewritten.
    """
    committed, steps = directory.committed_slot(), dict[str | None, StepId]()
    for slot in SLOTS:
        with contextlib.suppress(StoreFormatError):
            record = CommitRecord.read(directory.step_path(slot) / "commit.json")
            steps[slot] = StepId(record.step, record.commit)
    return HeldSteps(steps.get(committed), steps.get(other_slot(committed)))


def go_to_step(members: Sequence[StoreDirectory], step: StepId | None) -> None:
    """Makes the result of `agree_on_step` the committed step; the caller holds members.

    The step's chunks are whole: its record was written when they were durable, and they
    have not been overwritten since. See docs/format.md.
    """
    for member in members:
        if step is not None and read_held_steps(member).current != step:
            member.flip(other_slot(member.committed_slot()))


# --- members at a path ----------------------------------------------------------------


def find_members(path: Path) -> list[Path]:
    """Returns the members of a run that can be seen at a path, by number."""
    folders = (file.parent for file in path.glob("process-[0-9]*/jaxinf.json"))
    return sorted(folder for folder in folders if _MEMBER.fullmatch(folder.name))


def is_run(path: Path) -> bool:
    """Whether a path has the members of a run, and is not a store itself."""
    return not (path / "jaxinf.json").exists() and bool(find_members(path))


def member_name(number: int) -> str:
    """Returns the name of a member's directory in the directory of a run."""
    return f"process-{number:05d}"


def missing_members(members: Sequence[StoreDirectory]) -> list[int]:
    """Returns the numbers of the run's members that are not among these.

    It refuses members that are not of one run, or of which one is there twice.
    """
    records = [member.manifest.member for member in members]
    numbers = [record.number for record in records if record is not None]
    runs = {(record.run, record.count) for record in records if record is not None}
    if None in records or len(runs) != 1 or len(set(numbers)) != len(numbers):
        listed = "; ".join(f"{one.path}: {one.manifest.member}" for one in members)
        raise StoreMismatchError(
            f"expected members of one run, each once, found {listed}; move what does "
            "not belong there aside"
        )
    [(_, count)] = runs
    return sorted(set(range(count)) - set(numbers))


def open_members(path: Path) -> list[StoreDirectory]:
    """Opens all members of a run by number, or a store of one process, for reading."""
    if not is_run(path):
        return [open_for_reading(path)]
    members = [open_for_reading(folder) for folder in find_members(path)]
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
    yielded stores are read under their locks, and have claimed their CSDs. A run that
    has them open, a member that cannot be seen, and with `needs_common` members without
    a common step are refused.
    """
    members = list[StoreDirectory]()
    with contextlib.ExitStack() as stack:
        for folder in [member.path for member in open_members(path)]:
            lock = StoreLock(folder)
            stack.callback(lock.release)
            stack.enter_context(lock_exclusively(folder / "checkpoints.lock"))
            directory = open_for_writing(folder)
            directory.lock = lock
            take_over(directory)
            members.append(directory)
        try:
            go_to_step(members, agree_on_step([*map(read_held_steps, members)], path))
        except ProcessError:
            if needs_common:
                raise
        yield members


# --- steps of all members -------------------------------------------------------------


def are_of_one_commit(steps: Sequence[CommittedStep]) -> bool:
    return len({step.commit.commit for step in steps}) == 1


def join_steps(steps: Sequence[CommittedStep]) -> CommittedStep:
    """Joins the steps of all members, by number, to one step of all chunks.

    It raises a StoreError unless they are all members' of one run, and of one commit.
    """
    first = steps[0]
    for step in steps:
        if step.manifest.common != first.manifest.common:
            raise StoreMismatchError(
                f"{step.path}: expected the leaves and owners of {first.path}, found "
                "others; restore the member's jaxinf.json"
            )
        step.check()
    member = first.manifest.member
    if not are_of_one_commit(steps):
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
    starts = np.cumsum([0, *(len(step.chunk_roots) for step in steps)]).tolist()
    leaves = []
    for parts in zip(*(step.manifest.leaves for step in steps), strict=True):
        owners = enumerate(parts[0].owners)
        csds = tuple(starts[owner] + parts[owner].csds[n] for n, owner in owners)
        leaves.append(structs.replace(parts[0], csds=csds, owners=()))
    checksums, inexact = first.manifest.no_checksums(), dict[str, np.float32]()
    for step in steps:
        for name, leaf, _ in step.manifest.arrays():
            checksums[name][list(leaf.held_numbers)] = step.commit.checksums[name]
        for name, bound in step.commit.inexact.items():
            inexact[name] = max(bound, inexact.get(name, bound))
    changes = {"leaves": tuple(leaves), "csds": (), "member": None}
    return CommittedStep(
        first.path,
        structs.replace(first.manifest, **changes),
        first.commit.replace(checksums=checksums, commit="", inexact=inexact),
        tuple(root for step in steps for root in step.chunk_roots),
        next((step.warning for step in steps if step.warning), ""),
    )


def take_steps_of_one_commit(
    path: Path,
    members: Sequence[StoreDirectory],
    take: Callable[[StoreDirectory, contextlib.ExitStack], CommittedStep],
) -> tuple[list[CommittedStep], contextlib.ExitStack]:
    """Takes a step of each member, all of one commit, even while their run goes on.

    Blocks. Members that were killed at different steps go to the common one. `take`
    gives the stack, which is returned with the steps, what undoes it: for the case that
    the steps are not of one commit.
    """
    listed = ""
    for _ in range(_NUM_ATTEMPTS):
        with contextlib.ExitStack() as undo:
            steps = [take(member, undo) for member in members]
            if are_of_one_commit(steps):
                return steps, undo.pop_all()
        pairs = zip(members, steps, strict=True)
        listed = ", ".join(f"{one.path.name}: {s.commit.step}" for one, s in pairs)
        with contextlib.suppress(StoreLockedError), hold_members(path):
            pass  # after a kill: they go to the common one
        time.sleep(_PAUSE_S)
    raise ProcessError(
        f"{path}: expected all members at one step, found {listed}, and a run has them "
        "open; try again when it goes on"
    )


def save_members_checkpoint(path: Path, name: str | None = None) -> list[Path]:
    """Keeps the committed step of all members; blocks, and returns its directories.

    Any process may do so beside a running run; raises as `save_checkpoint`, and a
    ProcessError if a member cannot be seen, or members are at different steps.
    """

    def save(member: StoreDirectory, undo: contextlib.ExitStack) -> CommittedStep:
        saved = save_checkpoint(member, name)
        undo.callback(remove_checkpoint, member, saved)
        return read_step(member, member.step_path(f"checkpoints/{saved}"))

    steps, _ = take_steps_of_one_commit(path, open_members(path), save)
    return [step.path for step in steps]


def restore_members_checkpoint(
    path: Path, name: str, *, discard_current: bool = False
) -> CommitRecord:
    """Makes a checkpoint the committed step of all members; returns its record.

    Nobody has the store or the run open. After a crash in between some members are at
    the checkpoint, and have the step before in their other slot: all go on from that
    step, also if this is called again. With `discard_current` no checkpoint need keep
    the committed step.
    """
    with hold_members(path, needs_common=not discard_current) as members:
        join_steps([find_step(member, name) for member in members])  # refuses others
        for member in members if not discard_current else ():
            _check_kept(path, name, member)
        records = [restore_checkpoint(member, name) for member in members]
        for member in members:
            member.flip(member.require_committed_slot())
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


def remove_members_checkpoints(path: Path, names: Sequence[str]) -> None:
    """Removes checkpoints of all members, or none if one exists nowhere; blocks.

    A checkpoint that an interrupted removal has left to some members goes as well.
    """
    members = open_members(path)
    pairs = [(n, one) for n in names for one in members if n in checkpoint_names(one)]
    for name in {*names} - {name for name, _ in pairs}:
        check_checkpoint_exists(members[0], name)  # raises
    for name, member in pairs:
        remove_checkpoint(member, name)
