"""What a copy begins with: steps of a store, of a run, or of an export.

Invariant: the steps do not change while they are copied: they are pinned, or the store
  is held. Nothing is written, but for members that were at different steps: they go to
  the common one, as at the start of their run.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from msgspec.structs import replace

from jaxinf.errors import StoreFormatError, StoreLockedError, StoreMismatchError
from jaxinf.store.carry import read_carry
from jaxinf.store.checkpoint import checkpoint_names, find_checkpoint
from jaxinf.store.commit import CommitRecord
from jaxinf.store.directory import StoreDirectory, next_slot
from jaxinf.store.making import files_beside
from jaxinf.store.manifest import Manifest
from jaxinf.store.owned import look_at_store
from jaxinf.store.reader import StepReader
from jaxinf.store.steps import (
    WholeStep,
    joined_step,
    pinned_step,
    prune_snapshots,
    readable_step,
    step_of,
)
from jaxinf.store.whole import (
    all_members,
    find_whole,
    held_steps,
    hold_members,
    is_of_all,
    is_run,
    of_one_commit,
)


def _read_carry(step: WholeStep) -> list[bytes]:
    """Returns what a step of a store carries."""
    return read_carry(step.path, step.commit.carry)


@dataclass(frozen=True)
class CopySource:
    """Steps that are copied together.

    Attributes:
      where: what it is, for messages.
      parts: the manifests of the members by number, or of the store alone.
      steps: the committed step as slot ``a``, and checkpoints as ``checkpoints/NAME``.
      beside: returns what belongs to a store beside its steps, by the names of files.
      open_reader: returns the reader of one.
      has_links: whether chunks may be linked to: they are a store's.
      read_carry: returns the arrays that one carries.
      num_threads: number of chunks that may be in memory at once.
      spares: directories of the other slot's chunks by CSD, of a store that is held.
      dropped: checkpoints that are not of all members.
      held: the members or the store, if this process holds them.
    """

    where: str
    parts: Sequence[Manifest]
    steps: Mapping[str, WholeStep]
    beside: Callable[[], Mapping[str, bytes]]
    open_reader: Callable[[WholeStep], StepReader] = WholeStep.reader
    has_links: bool = True
    read_carry: Callable[[WholeStep], list[bytes]] = _read_carry
    num_threads: int = 4
    spares: Sequence[Path] = ()
    dropped: tuple[str, ...] = ()
    held: Sequence[StoreDirectory] = ()

    @property
    def step(self) -> WholeStep:
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
    named: Sequence[Path] = (),
    checkpoints: bool = False,
) -> Iterator[CopySource]:
    """Yields a store, a run of several processes, or a checkpoint's directory.

    Args:
      path: where it is; of a run, all members can be seen there.
      checkpoint: a checkpoint that it has, in place of its committed step.
      holds: whether this process becomes its only writer. Otherwise it may be in use.
      named: CSD roots that the user has named, with `holds`.
      checkpoints: whether those that all members have come along.

    Raises:
      StoreLockedError: a run, or a reader of a step, has it open, with `holds`.
      ProcessError: a member cannot be seen, or they have no step in common.
      StoreFormatError: there is no store, or none with a committed step.
      StoreMismatchError: a checkpoint has other arrays than the store, or is not of
        one commit in all members.
      ValueError: there is no such checkpoint; lists the others.
    """
    has_members = is_run(path)
    if checkpoint is not None and not has_members:
        find_checkpoint(look_at_store(path), checkpoint)
        path = path / "checkpoints" / checkpoint
    if (path / "commit.json").is_file():
        yield _of_directory(path)
        return
    with contextlib.ExitStack() as stack:
        if holds:
            parts = stack.enter_context(hold_members(path, named))
            for one in parts:
                prune_snapshots(one)
                check_unread(one)
            step = _joined(parts)
        elif has_members:
            parts, step = _of_run(path, checkpoint, stack)
        else:
            step = stack.enter_context(readable_step(look_at_store(path)))
            step.check()
            parts = [StoreDirectory(path, step.manifest)]
        steps, dropped = {"a": step}, set[str]()
        if checkpoints:
            dropped = {name for one in parts for name in checkpoint_names(one)}
            for name in _common_checkpoints(parts):
                place = f"checkpoints/{name}"
                steps[place] = _joined(parts, place)
                dropped.discard(name)
        yield CopySource(
            str(path),
            [one.manifest for one in parts],
            steps,
            partial(files_beside, parts[0].path),
            has_links=not step.warning,
            spares=[folder for one in parts for folder in _spares(one)]
            if holds
            else (),
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


def _of_run(
    path: Path, checkpoint: str | None, stack: contextlib.ExitStack
) -> tuple[list[StoreDirectory], WholeStep]:
    """Returns all members, and their common step, which is pinned, or a checkpoint."""
    parts = all_members(path)
    if checkpoint is not None:
        find_whole(parts, checkpoint)
        return parts, _joined(parts, f"checkpoints/{checkpoint}")
    if len({held_steps(one).current for one in parts}) > 1:  # a kill, or a run goes on
        with contextlib.suppress(StoreLockedError), hold_members(path):
            pass  # they go to the common one
        parts = all_members(path)
    pinned, undo = of_one_commit(
        path, parts, lambda one, held: held.enter_context(pinned_step(one))
    )
    stack.enter_context(undo)
    return parts, joined_step(pinned)


def _of_directory(path: Path) -> CopySource:
    """Returns a checkpoint, in its store or copied from there."""
    commit, manifest = path / "commit.json", Manifest.read(path / "jaxinf.json")
    record, places = CommitRecord.read(commit), [path]
    record.check_fits(commit, manifest)
    is_kept = (path.parents[1] / "jaxinf.json").exists()
    owner = path.parents[1] if is_kept else path
    if manifest.csds and is_kept:
        # A checkpoint's own manifest may list earlier CSDs; its chunks are on today's.
        store = look_at_store(owner)
        manifest = replace(manifest, csds=store.manifest.csds)
        places = StoreDirectory(store.path, manifest).data_paths(path)
    else:
        leaves = [replace(n, csds=(0,) * len(n.csds)) for n in manifest.leaves]
        manifest = replace(manifest, csds=(), leaves=tuple(leaves))
    if manifest.member is not None:
        raise StoreFormatError(
            f"{path}: expected a whole step, found a member's part; export the "
            "checkpoint of the run: jaxinf checkpoint export RUN DEST --checkpoint NAME"
        )
    step = WholeStep(path, manifest, record, tuple(places))
    beside = partial(files_beside, owner)
    return CopySource(str(path), [manifest], {"a": step}, beside, has_links=False)


def _joined(parts: Sequence[StoreDirectory], place: str | None = None) -> WholeStep:
    """Returns a step of all members, by default the committed one."""
    return joined_step(
        [step_of(one, one.step_path(place or one.need_slot())) for one in parts]
    )


def _spares(directory: StoreDirectory) -> list[Path]:
    slot = next_slot(directory.committed_slot())
    return directory.data_paths(directory.step_path(slot))


def _common_checkpoints(parts: Sequence[StoreDirectory]) -> list[str]:
    """Returns the checkpoints that all parts have of one commit, in today's arrays."""
    names = set(checkpoint_names(parts[0])).intersection(*map(checkpoint_names, parts))
    found = [name for name in sorted(names) if is_of_all(parts, name)]
    for name in found:
        for one in parts:
            held = Manifest.read(one.step_path(f"checkpoints/{name}/jaxinf.json"))
            if held.leaves != one.manifest.leaves:
                raise StoreMismatchError(
                    f"{one.path}: the checkpoint {name} holds other arrays than the "
                    "store does now; export it, and remove it from the store"
                )
    return found
