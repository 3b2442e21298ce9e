"""A step of a run in several processes as one step, whose chunks its members have.

     member 0:  a b . .  ─┐
     member 1:  . . c d  ─┴─► manifest of a b c d, checksums of all, their directories

Invariant: a step is of one commit in all members, and its files are only read.
"""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from jaxinf.errors import StoreMismatchError
from jaxinf.store.commit import CommitRecord
from jaxinf.store.manifest import FORMAT_VERSION, LeafRecord, Manifest
from jaxinf.store.snapshot import PinnedStep, pinned_step
from jaxinf.store.whole import all_members, find_whole, of_one_commit


@dataclass(frozen=True)
class WholeStep:
    """A step of all members, ready to be read.

    Attributes:
      path: the first member's step: a snapshot, or a checkpoint.
      manifest: that of a store of one process; the CSDs of its chunks are `places`.
      commit: the first member's record, with the checksums of all.
      places: directories that have chunks in a slot's layout.
    """

    path: Path
    manifest: Manifest
    commit: CommitRecord
    places: tuple[Path, ...]


@contextlib.contextmanager
def whole_step(path: Path, checkpoint: str | None = None) -> Iterator[WholeStep]:
    """Yields a step of a run; it stays as it is while the context lasts.

    Args:
      path: the run's path.
      checkpoint: a checkpoint of all members; by default their committed step, which is
        pinned, also beside the run.

    Raises:
      ProcessError: a member cannot be seen, or they stay at different steps.
      ValueError, StoreMismatchError: as `find_whole`.
      StoreError: as `pinned_step`.
    """
    members = all_members(path)
    if checkpoint is not None:
        find_whole(members, checkpoint)
        steps = [one.step_path(f"checkpoints/{checkpoint}") for one in members]
        yield joined_step([*map(PinnedStep, members, steps)])
        return
    parts, undo = of_one_commit(
        path, members, lambda one, held: held.enter_context(pinned_step(one))
    )
    with undo:
        yield joined_step(parts)


def joined_step(parts: Sequence[PinnedStep]) -> WholeStep:
    """Returns a step of all members, from their parts by number, or of a store alone.

    Raises:
      StoreMismatchError: they have other leaves or owners.
      StoreFormatError: a record is not of its part.
    """
    manifests = [part.directory.manifest for part in parts]
    records = [CommitRecord.read(part.path / "commit.json") for part in parts]
    first, places, starts = manifests[0], [], []
    for part, manifest, record in zip(parts, manifests, records, strict=True):
        if manifest.common != first.common:
            raise StoreMismatchError(
                f"{part.directory.path}: expected the leaves and owners of "
                f"{parts[0].directory.path}, found others; restore its jaxinf.json"
            )
        record.check_fits(part.path / "commit.json", manifest)
        starts.append(len(places))
        places += part.directory.data_paths(part.path)
    if first.member is None:
        return WholeStep(parts[0].path, first, records[0], tuple(places))
    leaves = []
    for leaf, *others in zip(*(one.leaves for one in manifests), strict=True):
        held = (leaf, *others)
        csds = [starts[own] + held[own].csds[n] for n, own in enumerate(leaf.owners)]
        leaves.append(replace(leaf, csds=tuple(csds), owners=(), member=0))
    manifest = replace(whole_manifest(first), leaves=tuple(leaves))
    commit = whole_record(first, records)
    return WholeStep(parts[0].path, manifest, commit, tuple(places))


def whole_manifest(manifest: Manifest) -> Manifest:
    """Returns a member's manifest as one of a store that has all chunks, anywhere."""
    leaves = [
        replace(n, csds=(0,) * len(n.csds), owners=(), member=0)
        for n in manifest.leaves
    ]
    return replace(
        manifest,
        leaves=tuple(leaves),
        csds=(),
        member=None,
        format_version=FORMAT_VERSION,
    )


def whole_record(manifest: Manifest, records: Sequence[CommitRecord]) -> CommitRecord:
    """Returns the record of a step with the checksums of all members.

    Args:
      manifest: that of any member.
      records: those of all members, by number.
    """
    sums = {}
    for leaf in manifest.leaves:
        held = [replace(leaf, member=number) for number in range(len(records))]
        for state in leaf.states:
            name = leaf.array_name(state.name)
            sums[name] = _sums(held, [record.checksums[name] for record in records])
    return replace(records[0], checksums=sums, commit="", inexact=_inexact(records))


def _sums(held: Sequence[LeafRecord], found: Sequence[np.ndarray]) -> np.ndarray:
    """The checksums of an array's chunks, in grid order."""
    whole = np.zeros(len(held[0].csds), np.uint32)
    for leaf, own in zip(held, found, strict=True):
        whole[list(leaf.held)] = own
    return whole


def _inexact(records: Sequence[CommitRecord]) -> dict[str, float]:
    bounds: dict[str, float] = {}
    for record in records:
        for name, bound in record.inexact.items():
            bounds[name] = max(bound, bounds.get(name, 0))
    return bounds
