"""What a copy reads: the steps of a store, of a run, or of a checkpoint copied out.

Invariant: the steps do not change meanwhile: they are pinned, or the store is held.
"""

import contextlib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from jaxinf.documents import MOST_BYTES
from jaxinf.store.commit_record import CommitRecord
from jaxinf.store.directory import StoreDirectory, check_store_exists
from jaxinf.store.manifest import Manifest, without_csds
from jaxinf.store.members import (
    are_of_one_commit,
    hold_members,
    join_steps,
    open_members,
    take_steps_of_one_commit,
)
from jaxinf.store.steps import (
    CommittedStep,
    check_unread,
    checkpoint_names,
    find_step,
    readable_step,
)
from jaxinf.transfer import open_beneath, read_beneath

FILES_BESIDE = re.compile(r"(?:stream|tokenizer)/[A-Za-z0-9_]+(?:\.[a-z]+)+")
"""Names of files beside a store's steps, which a run goes on with."""


@dataclass(frozen=True)
class CopySource:
    """Steps that are copied together, by their places in the copy.

    The committed step, or the one in its stead, is at ``a``, others are at
    ``checkpoints/NAME``. A run's steps are joined.
    """

    where: str  # for messages
    parts: Sequence[Manifest]  # of the members by number, or of the store alone
    steps: Mapping[str, CommittedStep]
    files_beside: Mapping[str, bytes]  # those of a store beside its steps, by name
    has_links: bool = True  # whether chunks may be linked to: they are a store's
    num_threads: int = 4  # and chunks that may be in memory at once
    dropped: tuple[str, ...] = ()  # checkpoints that are not of all members
    held_stores: Sequence[StoreDirectory] = ()  # if this process holds them

    @property
    def step(self) -> CommittedStep:
        return self.steps["a"]


@contextlib.contextmanager
def store_source(
    path: Path,
    checkpoint: str | None = None,
    *,
    holds: bool = False,
    checkpoints: bool = False,
) -> Iterator[CopySource]:
    """Yields the committed step of a store or a run, or a checkpoint, to copy it.

    Args:
      path: A store, a run whose members can all be seen, or a checkpoint's directory.
      checkpoint: Name of a checkpoint to copy in place of the committed step.
      holds: Whether this process becomes the only writer; otherwise a run may go on.
      checkpoints: Whether the checkpoints that all members have are copied as well.

    Raises:
      StoreLockedError: With `holds`, a run or another reader has the store open.
      StoreError, ProcessError, ValueError: There is no such step of all members.
    """
    if (path / "commit.json").is_file():
        store, folder = path.parent.parent, path.parent.name
        if folder != "checkpoints" or not (store / "jaxinf.json").exists():
            yield _source_of_copied_out(path)
            return
        path, checkpoint = store, path.name
    with contextlib.ExitStack() as stack:
        if holds:
            members = stack.enter_context(hold_members(path))
            for member in members:
                check_unread(member)
        else:
            members = open_members(path)
        manifests = [member.manifest for member in members]
        if holds or checkpoint is not None:
            step = join_steps([find_step(member, checkpoint) for member in members])
        else:
            pinned, pins = take_steps_of_one_commit(
                path,
                members,
                lambda member, undo: undo.enter_context(readable_step(member)),
            )
            stack.enter_context(pins)
            step, manifests = join_steps(pinned), [step.manifest for step in pinned]
            pairs = zip(members, manifests, strict=True)
            members = [StoreDirectory(m.path, manifest) for m, manifest in pairs]
        kept, dropped = _common_checkpoints(members) if checkpoints else ({}, ())
        yield CopySource(
            str(path),
            manifests,
            {"a": step, **kept},
            read_files_beside(members[0].path),
            has_links=not step.warning and checkpoint is None,
            dropped=tuple(dropped),
            held_stores=members if holds else (),
        )


def _common_checkpoints(
    members: Sequence[StoreDirectory],
) -> tuple[dict[str, CommittedStep], list[str]]:
    """Returns the checkpoints of all members by place, and the names of others."""
    common = dict[str, CommittedStep]()
    dropped = {name for member in members for name in checkpoint_names(member)}
    for name in checkpoint_names(*members):
        steps = [find_step(member, name) for member in members]
        if are_of_one_commit(steps):
            common[f"checkpoints/{name}"] = join_steps(steps)
            dropped.remove(name)
    return common, sorted(dropped)


def _source_of_copied_out(path: Path) -> CopySource:
    check_store_exists(path, is_step=True)
    manifest = without_csds(Manifest.read(path / "jaxinf.json"))
    record = CommitRecord.read(path / "commit.json")
    step = join_steps([CommittedStep(path, manifest, record, (path,))])
    files = read_files_beside(path)
    return CopySource(str(path), [manifest], {"a": step}, files, has_links=False)


def read_files_beside(store: Path) -> dict[str, bytes]:
    """Reads what a run needs beside its steps: cuts of programs, a tokenizer."""
    contents = {}
    for name in ("stream", "tokenizer"):
        with contextlib.suppress(FileNotFoundError):
            os.close(open_beneath(store, name, os.O_DIRECTORY))  # it is no link
            files = [f"{name}/{file}" for file in sorted(os.listdir(store / name))]
            for file in filter(FILES_BESIDE.fullmatch, files):
                contents[file] = read_beneath(store, file, MOST_BYTES)
    return contents
