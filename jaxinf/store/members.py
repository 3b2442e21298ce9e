"""A store's members: one, or those of a run in several processes; checkpoints of all.

Invariant: a checkpoint of a run is of one commit in all members, which are listed by
number. A store of one process is its only member. `agreed_step` is pure, and the same
in every process; the explorer of tests/support runs it and `CommitAction`.
"""

import contextlib
import re
import time
from collections.abc import Callable, Iterator, Sequence
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
from jaxinf.store.directory import StoreDirectory, next_slot
from jaxinf.store.lock import StoreLock, lock_exclusively
from jaxinf.store.owners import check_is_store, claim_csds, look_at_store, read_owned
from jaxinf.store.reader import CommittedStep
from jaxinf.store.steps import (
    CheckpointInfo,
    check_exists,
    checkpoint_names,
    find_checkpoint,
    list_checkpoints,
    prune_leftovers,
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


class StepId(NamedTuple):
    """A committed step as members tell each other: its number, its commit's id."""

    step: int
    commit: str


class HeldSteps(NamedTuple):
    """The steps of a member's slots: the committed one, that of the other's record."""

    current: StepId | None
    spare: StepId | None

    def has(self, step: StepId | None) -> bool:
        """Whether a slot has a step, or no step is wanted and none is committed."""
        return step in self if step else self.current is None


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

    Members at different steps go to the common one, as at the start of their run.

    Args:
      needs_common: whether members without a common step are refused.

    Yields:
      The stores, read under their locks; notes on their CSDs name them as the owners.

    Raises:
      StoreLockedError: a run has them open.
      ProcessError: a member cannot be seen, or they have no step in common.
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
            prune_leftovers(directory)
            members.append(directory)
        held = [held_steps(one) for one in members]
        try:
            to_step(members, None if is_alone else agreed_step(held))
        except LookupError:
            if needs_common:
                pairs = zip(members, held, strict=True)
                listed = ", ".join(f"{one.path.name}: {steps}" for one, steps in pairs)
                raise ProcessError(
                    f"{path}: expected a step that all have, found {listed}; go back "
                    f"to a checkpoint of all: jaxinf checkpoint restore {path} NAME "
                    "--discard-current"
                ) from None
        yield members


@contextlib.contextmanager
def of_one_commit(
    path: Path,
    members: Sequence[StoreDirectory],
    take: Callable[[StoreDirectory, contextlib.ExitStack], CommittedStep],
) -> Iterator[tuple[list[CommittedStep], contextlib.ExitStack]]:
    """Yields a step of one commit of all members, also while the run goes on; blocks.

    Members that were killed at different steps go to the common one.

    Args:
      take: takes a member's step. What it gives the stack, which is yielded, too, is
        undone at the end, or if the steps are not of one commit.
    """
    steps = ""
    for _ in range(_NUM_ATTEMPTS):
        with contextlib.ExitStack() as undo:
            found = [take(one, undo) for one in members]
            if len({one.commit.commit for one in found}) == 1:
                yield found, undo
                return
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

    with of_one_commit(path, all_members(path), keep) as (made, undo):
        undo.pop_all()
    return [one.path for one in made]


def list_whole(path: Path) -> list[CheckpointInfo]:
    """Returns the checkpoints that all members have of one commit, by step and name."""
    members = all_members(path)
    lists = [list_checkpoints(one) for one in members]  # those that can be read
    if len(members) == 1:
        return lists[0]
    names = set.intersection(*({info.name for info in infos} for infos in lists))
    return [n for n in lists[0] if n.name in names and is_of_one(members, n.name)]


def is_of_one(members: Sequence[StoreDirectory], name: str) -> bool:
    """Whether a checkpoint, which each member has, is of one commit in all."""
    return len({find_checkpoint(one, name).commit for one in members}) == 1


def check_of_one(members: Sequence[StoreDirectory], name: str) -> None:
    """Refuses a checkpoint that is not of one commit in all members."""
    if not is_of_one(members, name):
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
      StoreMismatchError: its arrays differ from a store's, or they are not of one
        commit; or no checkpoint keeps the committed step.
    """
    with hold_members(path, needs_common=not discard_current) as members:
        check_of_one(members, name)
        for one in members if not discard_current else ():
            _check_kept(path, name, one)
        records = [restore_checkpoint(one, name) for one in members]
        return records[0]


def _check_kept(path: Path, name: str, member: StoreDirectory) -> None:
    """Refuses to give up a committed step that no checkpoint of a member keeps."""
    give_up = f"jaxinf checkpoint restore {path} {name} --discard-current"
    try:
        current = member.read_commit()
    except StoreFormatError as error:
        raise StoreMismatchError(
            f"{error}. So it is not known whether a checkpoint keeps the committed "
            f"step; give it up with: {give_up}"
        ) from error
    infos = list_checkpoints(member) if current else []
    if current and current.committed_at not in [info.committed_at for info in infos]:
        raise StoreMismatchError(
            f"{member.path}: step {current.step} is committed and in no checkpoint; "
            f"keep it first (jaxinf checkpoint save {path} NAME), or give it up "
            f"({give_up})"
        )


def remove_whole(path: Path, names: Sequence[str]) -> None:
    """Removes checkpoints of all members, or none if one exists nowhere; blocks.

    What an interrupted removal has left goes, too.
    """
    members = all_members(path)
    by_name = {n: [m for m in members if n in checkpoint_names(m)] for n in names}
    for name, holders in by_name.items():
        if not holders:
            check_exists(members[0], name)  # raises
    for name, holders in by_name.items():
        for one in holders:
            remove_checkpoint(one, name)
