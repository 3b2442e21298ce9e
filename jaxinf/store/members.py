"""A store's members: one, or those of a run in several processes; checkpoints of all.

Invariant: a checkpoint of a run is of one commit in all members, which are listed by
number. A store of one process is its only member. `agreed_step` is pure, and the same
in every process; the explorer of tests/support runs it and `CommitAction`.
"""

import contextlib
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path

from jaxinf.errors import ProcessError, StoreFormatError, StoreMismatchError
from jaxinf.store.checkpoint import (
    CheckpointInfo,
    checkpoint_names,
    find_checkpoint,
    list_checkpoints,
    remove_checkpoint,
    restore_checkpoint,
    save_checkpoint,
)
from jaxinf.store.commit import CommitRecord
from jaxinf.store.creation import complete_spare
from jaxinf.store.directory import StoreDirectory, next_slot
from jaxinf.store.lock import StoreLock, lock_exclusively
from jaxinf.store.owners import (
    check_is_store,
    claim_csds,
    look_at_store,
    read_owned,
)
from jaxinf.store.steps import WholeStep, step_of

_MEMBER = re.compile(r"process-\d{5,}")
_NUM_ATTEMPTS = 20
_PAUSE_S = 0.2


class CommitAction(Enum):
    """The actions of a commit in their order; see docs/format.md for the argument.

    Each is over, and durable, before the next begins.

    Attributes:
      SYNC: the step's chunks become durable.
      RECORD: the slot gets its record.
      MEET: wait until every member has done the actions before.
      FLIP: `current` names the slot.
    """

    SYNC = "sync"
    RECORD = "record"
    MEET = "meet"
    FLIP = "flip"


@dataclass(frozen=True, order=True)
class StepId:
    """A committed step as members tell each other.

    Attributes:
      step: its number.
      commit: the id of its commit, the same in all members.
    """

    step: int
    commit: str


@dataclass(frozen=True)
class HeldSteps:
    """The steps of one member at its opening.

    Attributes:
      current: the committed step; None before the first.
      spare: the step that the record in the other slot names; None without a record.
    """

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
    """Opens all members of a run, or a store of one process, for reading.

    Raises:
      ProcessError: a member cannot be seen.
      StoreError: as `look_at_store`; or they are not of one run.
    """
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
def hold_store(path: Path, *, is_member: bool = False) -> Iterator[StoreDirectory]:
    """Makes this process the store's only writer while the context lasts.

    Args:
      path: the store.
      is_member: whether it is one of a run's members, all of which the caller holds.

    Yields:
      The store, read under its locks; notes on its CSDs name it as the owner.

    Raises:
      StoreLockedError: another process has it open.
      StoreError: as `read_owned`.
    """
    check_is_store(path)
    lock = StoreLock(path)
    try:
        with lock_exclusively(path / "checkpoints.lock"):
            directory = read_owned(path)
            directory.lock = lock
            member = directory.manifest.member
            if member is not None and not is_member:
                raise StoreFormatError(
                    f"{directory.path}: expected the store of one process, found "
                    f"member {member.number} of a run of {member.count}, and its step "
                    "and its places change with the others' alone; open the run's path "
                    "in all its processes"
                )
            claim_csds(directory)
            # A member's other slot may hold the step that all of a run have.
            if not is_member:
                complete_spare(directory)
            yield directory
    finally:
        lock.release()


@contextlib.contextmanager
def hold_members(
    path: Path,
    *,
    check: Callable[[Sequence[StoreDirectory], StepId | None], None] | None = None,
    goes_back: bool = False,
) -> Iterator[list[StoreDirectory]]:
    """Makes this process the only writer of all members while the context lasts.

    Members that were at different steps go to the common one, as a run of them does.

    Args:
      check: called with the members and the step that they go to, before any of them
        goes there; what it raises leaves them as they are.
      goes_back: whether the caller makes a checkpoint of all their step, so that they
        need none in common.

    Raises:
      StoreLockedError: a run has them open.
      ProcessError: a member cannot be seen, or they have no step in common.
      StoreError: a member is damaged.
    """
    with contextlib.ExitStack() as stack:
        if not is_run(path):
            alone = stack.enter_context(hold_store(path))
            if check is not None:
                check([alone], None)
            yield [alone]
            return
        members = [
            stack.enter_context(hold_store(one.path, is_member=True))
            for one in all_members(path)
        ]
        held = [held_steps(one) for one in members]
        try:
            step = agreed_step(held)
        except LookupError:
            step = None
            if not goes_back:
                pairs = zip(members, held, strict=True)
                listed = ", ".join(f"{one.path.name}: {steps}" for one, steps in pairs)
                raise ProcessError(
                    f"{path}: expected a step that all have, found {listed}; go back "
                    "to a checkpoint of all: jaxinf checkpoint restore "
                    f"{path} NAME --discard-current"
                ) from None
        if check is not None:
            check(members, step)
        to_step(members, step)
        yield members


# --- their common step ---------------------------------------------------------------


def held_steps(directory: StoreDirectory) -> HeldSteps:
    """Returns the steps of a member's two slots, as the start of its run finds them."""
    slot = directory.committed_slot()
    current = None if slot is None else directory.found_record(slot)
    records = current, directory.found_record(next_slot(slot))
    return HeldSteps(*(one and StepId(one.step, one.commit) for one in records))


def to_step(members: Sequence[StoreDirectory], step: StepId | None) -> None:
    """Makes a step the committed one in these members; the caller holds them.

    Its record was written when its chunks were durable, and they have not been
    overwritten since; see docs/format.md.

    Args:
      step: the result of `agreed_step`; each has it in a slot.
    """
    for one in members:
        if step is not None and held_steps(one).current != step:
            one.flip(next_slot(one.committed_slot()))


def of_one_commit(
    path: Path,
    members: Sequence[StoreDirectory],
    take: Callable[[StoreDirectory, contextlib.ExitStack], WholeStep],
) -> tuple[list[WholeStep], contextlib.ExitStack]:
    """Takes a step of one commit from all members, also while the run goes on; blocks.

    Args:
      take: takes a member's step. What it gives the stack is undone if the steps are
        not of one commit.

    Returns:
      The steps, and the stack of all, which the caller closes.

    Raises:
      ProcessError: the members stay at different steps.
    """
    steps = ""
    for _ in range(_NUM_ATTEMPTS):
        with contextlib.ExitStack() as undo:
            found = [take(one, undo) for one in members]
            if len({one.commit.commit for one in found}) == 1:
                return found, undo.pop_all()
        pairs = zip(members, found, strict=True)
        steps = ", ".join(f"{one.path.name}: {n.commit.step}" for one, n in pairs)
        time.sleep(_PAUSE_S)
    raise ProcessError(
        f"{path}: expected all members at one step, found {steps}; a run that was "
        "killed gets there when it is started again"
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

    def keep(one: StoreDirectory, undo: contextlib.ExitStack) -> WholeStep:
        kept = save_checkpoint(one, name)
        undo.callback(remove_checkpoint, one, kept)
        return step_of(one, one.step_path(f"checkpoints/{kept}"))

    made, undo = of_one_commit(path, all_members(path), keep)
    undo.pop_all()
    return [one.path for one in made]


def list_whole(path: Path) -> list[CheckpointInfo]:
    """Returns the checkpoints that all members have of one commit, by step and name.

    Their own bytes are those of all members.

    Raises:
      ProcessError, StoreError: as `save_whole`.
    """
    members = all_members(path)
    lists = [{info.name: info for info in list_checkpoints(one)} for one in members]
    found = []
    for name, info in lists[0].items():
        infos = [by_name[name] for by_name in lists if name in by_name]
        if len(infos) == len(lists) and is_of_all(members, name):
            own_bytes = sum(one.own_bytes for one in infos)
            found.append(replace(info, own_bytes=own_bytes))
    return found


def is_of_all(members: Sequence[StoreDirectory], name: str) -> bool:
    """Whether a checkpoint that all members have is of one commit."""
    is_alone = len(members) == 1
    return is_alone or len({find_checkpoint(one, name).commit for one in members}) == 1


def find_whole(members: Sequence[StoreDirectory], name: str) -> None:
    """Refuses a checkpoint that is not in all members, and of one commit there.

    Raises:
      ValueError: a member has no checkpoint of that name; lists its others.
      StoreMismatchError: they are not of one commit.
    """
    records = [find_checkpoint(one, name) for one in members]
    if len({record.commit for record in records}) > 1:
        steps = ", ".join(f"{record.step}" for record in records)
        raise StoreMismatchError(
            f"{members[0].path.parent}: checkpoint {name!r}: expected one of all "
            f"members together, found one of each, of steps {steps}; give another"
        )


def restore_whole(members: Sequence[StoreDirectory], name: str) -> CommitRecord:
    """Makes a checkpoint the committed step of all members; returns its record.

    A crash in between leaves some of them at it, with the step before in their other
    slot: that is the one that all go on from, also if this is called again.

    Args:
      members: held by this process.
      name: a checkpoint of all.

    Raises:
      ValueError: a member has no checkpoint of that name.
      StoreMismatchError: its arrays differ from a store's, or they are not of one
        commit.
      StoreSpaceError: the drives have too little room.
    """
    find_whole(members, name)
    records = [restore_checkpoint(one, name) for one in members]
    return records[0]


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
