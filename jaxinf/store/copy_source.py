"""What a copy begins with: steps of a store, of a run, or of a checkpoint's directory.

Invariant: the steps do not change meanwhile: they are pinned, or the store is held.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from jaxinf.errors import StoreLockedError
from jaxinf.store.commit import CommitRecord
from jaxinf.store.creation import files_beside
from jaxinf.store.directory import StoreDirectory, check_there
from jaxinf.store.manifest import Manifest, without_csds
from jaxinf.store.members import (
    all_members,
    check_of_one,
    hold_members,
    is_of_one,
    of_one_commit,
)
from jaxinf.store.reader import CommittedStep
from jaxinf.store.steps import (
    check_arrays,
    checkpoint_names,
    joined_step,
    prune_snapshots,
    readable_step,
    step_of,
)


@dataclass(frozen=True)
class CopySource:
    """Steps that are copied together.

    The committed step is slot ``a`` among `steps`, others are ``checkpoints/NAME``.
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
        if holds:
            parts = stack.enter_context(hold_members(path))
            for one in parts:
                prune_snapshots(one)
                check_unread(one)
            step = _joined(parts)
        elif checkpoint is not None:
            parts = all_members(path)
            step = _kept_step(parts, checkpoint)
        else:
            parts = all_members(path)
            pinned, _ = stack.enter_context(
                of_one_commit(
                    path,
                    parts,
                    lambda one, undo: undo.enter_context(readable_step(one)),
                )
            )
            step = joined_step(pinned)
            pairs = zip(parts, pinned, strict=True)
            parts = [StoreDirectory(one.path, held.manifest) for one, held in pairs]
        steps, dropped = {"a": step}, set[str]()
        if checkpoints:
            names = [{*checkpoint_names(one)} for one in parts]
            dropped = set.union(*names)
            for name in sorted(set.intersection(*names)):
                if is_of_one(parts, name):
                    steps[f"checkpoints/{name}"] = _kept_step(parts, name)
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


def _kept_step(parts: Sequence[StoreDirectory], name: str) -> CommittedStep:
    check_of_one(parts, name)
    for one in parts:
        check_arrays(one, name)
    return _joined(parts, f"checkpoints/{name}")


def _joined(parts: Sequence[StoreDirectory], place: str | None = None) -> CommittedStep:
    """Returns a step of all members, by default the committed one."""
    return joined_step(
        [step_of(one, one.step_path(place or one.need_slot())) for one in parts]
    )


def _copied_out(path: Path) -> CopySource:
    """Returns a checkpoint that was copied out of its store."""
    check_there(path)
    manifest = Manifest.read(path / "jaxinf.json")
    record = CommitRecord.read(path / "commit.json")
    step = joined_step([CommittedStep(path, without_csds(manifest), record, (path,))])
    beside = files_beside(path)
    return CopySource(str(path), [step.manifest], {"a": step}, beside, has_links=False)
