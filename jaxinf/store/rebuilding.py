"""Members of a run that are lost, made again from a step that was exported.

    PATH/process-N       made, durable ─────────────────► published ─┐
    the other members    the step in a slot, durable ────────────────┴─► flipped

Invariant: the others keep their committed step until every member has the exported one
  durable; from then on all go on from it, whoever has flipped. Nothing that is there is
  removed.
"""

import contextlib
import logging
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from jaxinf.errors import ProcessError, StoreFormatError, StoreMismatchError
from jaxinf.store.agreement import StepId
from jaxinf.store.checkpoint import (
    checkpoint_names,
    restore_checkpoint,
    save_held,
)
from jaxinf.store.commit import CommitRecord
from jaxinf.store.directory import SLOTS, Slot, StoreDirectory, next_slot
from jaxinf.store.lock import lock_exclusively
from jaxinf.store.making import (
    check_unused,
    copy_beside,
    is_unfinished,
    lay_out,
    making_store,
    member_of,
    process_roots,
)
from jaxinf.store.manifest import LeafRecord, Manifest, Member
from jaxinf.store.owned import DIVISION_LOCK, check_undivided, hold_store
from jaxinf.store.stock_documents import stock_documents
from jaxinf.store.whole import (
    agreed_of,
    find_members,
    held_steps,
    member_name,
    missing_members,
    relink_whole,
    to_step,
)

_LOG = logging.getLogger("jaxinf")
_CHECKPOINTS = "checkpoints/"


@dataclass(frozen=True)
class GivenStep:
    """A whole step from elsewhere, which is brought into members.

    Attributes:
      where: what it is, for messages.
      manifest: the manifest of a store of one process.
      commit: its record, with the checksums of all chunks.
      fill: writes the chunks that a store holds into a slot that is not committed, and
        compares them with their checksums; blocks.
    """

    where: str
    manifest: Manifest
    commit: CommitRecord
    fill: Callable[[StoreDirectory, Slot], None]


@dataclass(frozen=True)
class Rebuilt:
    """What came of it.

    Attributes:
      step: the step that all members are at.
      others: how the other members came to it: ``"current"``, they were there;
        ``"checkpoint"``, from one of that step; ``"export"``, from the export as well.
      partial: checkpoints of other steps that some members lack.
    """

    step: int
    others: str
    partial: tuple[str, ...]


def rebuild_members(
    path: Path,
    step: GivenStep,
    lost: Sequence[int] = (),
    *,
    csd_roots: Sequence[str] = (),
    may_discard: bool = False,
) -> Rebuilt:
    """Makes lost members of a run again, and brings all members to one step; blocks.

    The others stay as they are if the step is the one that they go on from. Else they
    go to it: by their checkpoint of it, without copies, or from the export as well.
    After an interruption they have their step or the exported one, and a lost member is
    still lost or complete; call it again.

    Args:
      path: the run's path, where all other members can be seen.
      step: the step.
      lost: numbers of the lost members; nothing may be left of them at their places.
      csd_roots: existing CSD roots of each, in which ``{process}`` is its number.
      may_discard: whether the others may leave their committed step.

    Raises:
      ValueError: a number or a root is wrong.
      ProcessError: a member cannot be seen, and is not said to be lost; or the others
        have no step in common.
      StoreMismatchError: the step is of another run, or the others' would be given up.
      StoreFormatError: something is left of a lost member.
      StoreLockedError: the run is open.
      StoreError: a member is damaged, a drive is full or failed.
    """
    with lock_exclusively(path / DIVISION_LOCK), _held(path, lost) as rest:
        check_undivided(path)
        _check_run(rest[0].manifest, step)
        wanted = [_lost_member(path, rest, number, csd_roots) for number in lost]
        agreed = agreed_of(rest)
        way, commit = _way(rest, step, agreed)
        if way != "current" and agreed is not None and not may_discard:
            raise StoreMismatchError(
                f"{path}: expected the members that are there at step "
                f"{step.commit.step}, as {step.where} has it, found them at step "
                f"{agreed.step}, another one; give that up with --discard-current, or "
                "take an export of it"
            )
        for one in wanted:
            _give_up_record(one, step)
        to_step(rest, agreed)
        with contextlib.ExitStack() as made:
            new = [made.enter_context(making_store(d.path, d.manifest)) for d in wanted]
            for one in new:
                step.fill(one, SLOTS[0])
                copy_beside(rest[0].path, one.path)
                one.sync()
            if way == "export":
                for one in rest:
                    _bring(one, step, commit)
            elif way != "current":
                for one in rest:
                    restore_checkpoint(one, way.removeprefix(_CHECKPOINTS))
            for one in new:
                one.publish(SLOTS[0], _record(one, SLOTS[0], step, commit))
            if way == "export":
                for one in rest:
                    one.flip(next_slot(one.committed_slot()))
            partial = _keep(path, [*rest, *new], commit)
    others = way if way in ("current", "export") else "checkpoint"
    return Rebuilt(step.commit.step, others, partial)


@contextlib.contextmanager
def _held(path: Path, lost: Sequence[int]) -> Iterator[list[StoreDirectory]]:
    """Holds all members but the lost ones, by number."""
    names = {member_name(number) for number in lost}
    places = [place for place in find_members(path) if place.name not in names]
    if not places:
        raise ProcessError(
            f"{path}: expected some members of the run, as only they know what the "
            "others had, found none; make a store of the export, and divide it: jaxinf "
            "checkpoint import NEW EXPORT, jaxinf store rebalance NEW --processes N",
            lost,
        )
    with contextlib.ExitStack() as stack:
        rest = [stack.enter_context(hold_store(p, is_member=True)) for p in places]
        missing = missing_members(rest)
        unknown, unseen = set(lost) - set(missing), set(missing) - set(lost)
        if unknown:
            raise ValueError(
                f"{path}: expected the numbers of lost members, of which there are "
                f"{missing or 'none'}, found {sorted(unknown)}"
            )
        if unseen:
            listed = ", ".join(map(str, sorted(unseen)))
            raise ProcessError(
                f"{path}: expected all other members of the run, found none of process "
                f"{listed}; run this where they can be seen, or, if they are lost, say "
                f"so: --process {min(unseen)}",
                sorted(unseen),
            )
        yield rest


def _check_run(held: Manifest, step: GivenStep) -> None:
    """Refuses a step of another run, or in other formats."""

    def plain(leaf: LeafRecord) -> LeafRecord:
        return replace(leaf, csds=(), owners=(), member=0)

    pairs = zip(held.leaves, step.manifest.leaves, strict=False)
    differing = [mine.name for mine, own in pairs if plain(mine) != plain(own)]
    numbers = len(held.leaves), len(step.manifest.leaves)
    if differing or numbers[0] != numbers[1] or held.kernels != step.manifest.kernels:
        found = f"another leaf {differing[0]}" if differing else "others"
        raise StoreMismatchError(
            f"{step.where}: expected the leaves, state and optimizer of the run, found "
            f"{found}; give an export of this run"
        )


def _lost_member(
    path: Path, rest: Sequence[StoreDirectory], number: int, csd_roots: Sequence[str]
) -> StoreDirectory:
    place, held = path / member_name(number), rest[0].manifest
    check_unused(
        place,
        "if the member is lost, move aside what is left of it; if an interrupted call "
        f"has made it, leave out --process {number}",
    )
    is_needed = any(one.manifest.csds for one in rest)
    roots = process_roots(number, csd_roots, is_needed=is_needed)
    assert held.member is not None
    made = lay_out(held, [leaf.chunk_shape for leaf in held.leaves], roots)
    member = Member(held.member.run, number, held.member.count)
    owners = [leaf.owners for leaf in held.leaves]
    return StoreDirectory(place, member_of(made, member, owners))


def _give_up_record(lost: StoreDirectory, step: GivenStep) -> None:
    """Removes the record of a member that an interrupted call has filled.

    `current` never named it, so it is an unfinished store then, which is made again.
    """
    places = [lost.step_path(slot) / "commit.json" for slot in SLOTS]
    if not is_unfinished(lost.path) or [p.exists() for p in places] != [True, False]:
        return
    held = StoreDirectory.open(lost.path)
    if held.manifest.member == lost.manifest.member and _has(held, SLOTS[0], step):
        held.unpublish(SLOTS[0])


def _way(
    rest: Sequence[StoreDirectory], step: GivenStep, agreed: StepId | None
) -> tuple[str, str]:
    """Returns how the others come to the step, and the id of its commit there.

    Returns:
      ``"current"``, the place of a checkpoint, or ``"export"``.
    """
    if agreed is not None:
        places = [_slot_of(one, agreed) for one in rest]
        if all(map(lambda d, at: _has(d, at, step), rest, places)):
            return "current", agreed.commit
    names = set(checkpoint_names(rest[0])).intersection(*map(checkpoint_names, rest))
    for name in sorted(names):
        commits = {_kept_commit(one, name) for one in rest}
        commit = commits.pop()
        place = f"{_CHECKPOINTS}{name}"
        if not commits and commit and all(_has(one, place, step) for one in rest):
            return place, commit
    return "export", f"{uuid.uuid4().hex}-0"


def _kept_commit(directory: StoreDirectory, name: str) -> str | None:
    """Returns the commit of a checkpoint; None if none can be restored."""
    place = directory.step_path(f"{_CHECKPOINTS}{name}")
    try:
        if Manifest.read(place / "jaxinf.json").leaves == directory.manifest.leaves:
            return directory.read_record(f"{_CHECKPOINTS}{name}").commit
    except StoreFormatError as error:
        _LOG.warning("%s: no checkpoint that can be restored: %s", place, error)
    return None


def _slot_of(directory: StoreDirectory, step: StepId) -> Slot:
    slot = directory.committed_slot()
    is_there = slot is not None and held_steps(directory).current == step
    return slot if slot is not None and is_there else next_slot(slot)


def _has(directory: StoreDirectory, place: str, step: GivenStep) -> bool:
    """Whether a member's step is its part of the given one, by the checksums."""
    found = directory.read_record(place)
    wanted = step.commit.part(directory.manifest)
    scalars = [[s.document for s in one.scalar_state] for one in (found, wanted)]
    return (
        found.step == wanted.step
        and scalars[0] == scalars[1]
        and found.checksums.keys() == wanted.checksums.keys()
        and all(
            np.array_equal(found.checksums[name], sums)
            for name, sums in wanted.checksums.items()
        )
    )


def _bring(directory: StoreDirectory, step: GivenStep, commit: str) -> None:
    """Writes the step into the slot that is not committed, durably, with its record."""
    spare = next_slot(directory.committed_slot())
    directory.unpublish(spare)
    step.fill(directory, spare)
    directory.sync()
    directory.write_record(spare, _record(directory, spare, step, commit))


def _record(
    directory: StoreDirectory, slot: Slot, step: GivenStep, commit: str
) -> CommitRecord:
    documents = stock_documents(directory.step_path(slot), directory.manifest)
    return replace(step.commit.part(directory.manifest, commit), documents=documents)


def _keep(
    path: Path, members: Sequence[StoreDirectory], commit: str
) -> tuple[str, ...]:
    """Keeps the step in all members where some of them do.

    Returns:
      Checkpoints of other steps that some members lack.
    """
    partial = []
    held = [set(checkpoint_names(one)) for one in members]
    for name in sorted(set().union(*held)):
        pairs = list(zip(members, held, strict=True))
        lacking = [one for one, names in pairs if name not in names]
        commits = {_kept_commit(one, name) for one, names in pairs if name in names}
        if lacking and commits == {commit}:
            for one in lacking:
                save_held(one, name)
            relink_whole(path, members, name)
        elif lacking:
            partial.append(name)
    return tuple(partial)
