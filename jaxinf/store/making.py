"""The places of a new store's chunks: CSDs, members, and what lies beside its steps.

Invariant: every new manifest is made here.
"""

import contextlib
import os
import re
import uuid
from collections.abc import Sequence
from pathlib import Path

from msgspec.structs import replace

from jaxinf.documents import MOST_BYTES
from jaxinf.errors import StoreSpaceError
from jaxinf.layout import assign_csds, assign_owners, reassign_csds
from jaxinf.store.leaves import LeafRecord
from jaxinf.store.manifest import (
    FORMAT_VERSION,
    MEMBER_VERSION,
    Manifest,
    Member,
    held_by,
)
from jaxinf.terminal import format_bytes
from jaxinf.transfer import open_beneath, read_beneath

BESIDE = re.compile(r"(?:stream|tokenizer)/[A-Za-z0-9_]+(?:\.[a-z]+)+")
"""Names of files beside a store's steps, which a run goes on with."""

_MOST_FILES = 2 << 20
"""Limit of a slot's chunk files, as its record names each (`documents.MOST_BYTES`)."""


def lay_out(
    contents: Manifest,
    chunk_shapes: Sequence[tuple[int, ...]],
    csd_roots: Sequence[str],
    *,
    held: Manifest | None = None,
) -> Manifest:
    """Assigns places to the chunks of a store; every new manifest is made here.

    Args:
      contents: the store's leaves; their places are ignored.
      chunk_shapes: chunk shape of each leaf.
      csd_roots: CSD roots for the chunks; empty for the store itself.
      held: as for `deal`.

    Raises:
      StoreSpaceError: there are too many chunks for a store's record.
    """
    leaves = [
        replace(leaf, chunk_shape=shape, csds=(), owners=())
        for leaf, shape in zip(contents.leaves, chunk_shapes, strict=True)
    ]
    _check_count(leaves)  # before so many are listed
    manifest = replace(
        contents,
        leaves=tuple(replace(n, csds=(0,) * n.grid.num_chunks) for n in leaves),
        store_id=uuid.uuid4().hex,
        csds=tuple(csd_roots),
        format_version=FORMAT_VERSION,
        member=None,
    )
    return deal(manifest, held=held)


def _check_count(leaves: Sequence[LeafRecord]) -> None:
    num_files = sum(leaf.grid.num_chunks * len(leaf.states) for leaf in leaves)
    if num_files > _MOST_FILES:
        num_bytes = sum(
            state.num_elements(leaf.grid.num_elements) * state.itemsize
            for leaf in leaves
            for state in leaf.states
        )
        raise StoreSpaceError(
            f"a store's two slots: expected at most {_MOST_FILES:,} chunk files in "
            f"each, found {num_files:,} with {num_bytes:,} bytes "
            f"({format_bytes(num_bytes)}); take a smaller model"
        )


def deal(manifest: Manifest, *, held: Manifest | None = None) -> Manifest:
    """Returns a new store's manifest with its chunks dealt to its CSDs.

    Args:
      manifest: a result of `lay_out` or `deal_to_members`.
      held: an existing store with these contents: chunks keep their CSDs as far as the
        loads allow.
    """
    sizes = [num_bytes for _, num_bytes in _held_bytes(manifest)]
    num_csds, roots = max(1, len(manifest.csds)), manifest.csds
    if held is None:
        found = assign_csds(sizes, num_csds)
    else:
        kept = [roots.index(n) if n in roots else None for n in held.csds] or [None]
        before = [kept[csd] for csd, _ in _held_bytes(held)]
        found = reassign_csds(sizes, before, num_csds)
    csds, leaves = iter(found), []
    for leaf in manifest.leaves:
        places = tuple(-1 if csd < 0 else next(csds) for csd in leaf.csds)
        leaves.append(replace(leaf, csds=places))
    return replace(manifest, leaves=tuple(leaves))


def deal_to_members(
    manifest: Manifest, member: Member, holders: Sequence[Sequence[Sequence[int]]]
) -> Manifest:
    """Returns a new store's manifest as a member's, which holds a part of the chunks.

    Args:
      manifest: a result of `lay_out`, the same in all members except for its roots.
      member: the member.
      holders: by leaf, and then by shard in C order, the numbers of the processes whose
        JAX devices have the shard. Chunks of shards that several have are divided.
    """
    chunk_bytes, places = [], []
    for leaf, own in zip(manifest.leaves, holders, strict=True):
        places += chunk_holders(leaf, leaf.shard_counts, own)
        chunk_bytes += leaf.chunk_bytes
    owners = iter(assign_owners(chunk_bytes, places, member.count))
    by_leaf = [[next(owners) for _ in leaf.csds] for leaf in manifest.leaves]
    return member_of(manifest, member, by_leaf)


def member_of(
    manifest: Manifest, member: Member, owners: Sequence[Sequence[int]]
) -> Manifest:
    """Returns a new store's manifest as a member's, by the owner of each chunk."""
    leaves = tuple(
        held_by(leaf, own, member)
        for leaf, own in zip(manifest.leaves, owners, strict=True)
    )
    version = MEMBER_VERSION
    return deal(replace(manifest, leaves=leaves, member=member, format_version=version))


def chunk_holders(
    leaf: LeafRecord, shard_counts: Sequence[int], holders: Sequence[Sequence[int]]
) -> list[Sequence[int]]:
    """Returns the processes that have each chunk of a leaf.

    Args:
      leaf: the leaf.
      shard_counts: number of shards along each dimension.
      holders: the processes that have each shard, in C order.
    """
    found = []
    for chunk in leaf.grid.chunks():
        shard = 0
        for start, length, count in zip(
            chunk.start, leaf.shape, shard_counts, strict=True
        ):
            shard = shard * count + start // max(1, length // count)
        found.append(holders[shard])
    return found


# --- bytes of CSDs -------------------------------------------------------------------


def csd_bytes(manifest: Manifest) -> list[int]:
    """Returns the bytes of each CSD's chunks, in one slot."""
    found = [0] * max(1, len(manifest.csds))
    for csd, num_bytes in _held_bytes(manifest):
        found[csd] += num_bytes
    return found


def _held_bytes(manifest: Manifest) -> list[tuple[int, int]]:
    """Returns CSD and bytes of each chunk that the store holds, in order."""
    found = []
    for leaf in manifest.leaves:
        sizes = leaf.chunk_bytes
        found += [(leaf.csds[number], sizes[number]) for number in leaf.held]
    return found


# --- paths of a new store ------------------------------------------------------------


def process_roots(
    number: int, given: Sequence[str], *, is_needed: bool = False
) -> list[str]:
    """Returns a process's CSD roots, in which ``{process}`` stands for its number.

    Raises:
      ValueError: a root is missing, or none is given where it must be.
    """
    roots = [root.replace("{process}", str(number)) for root in given]
    for root in roots:
        if not os.path.isdir(root):
            raise ValueError(
                f"CSD root {root}: expected a directory on a mounted drive, found "
                "none; create or mount it"
            )
    if is_needed and not roots:
        raise ValueError(
            f"expected CSD roots for process {number}, found none, and the others have "
            'some; name them with a template: --csd-root "/mnt/nvme{process}"'
        )
    return roots


def files_beside(store: Path) -> dict[str, bytes]:
    """Returns what a run needs beside its steps: cuts of programs, a tokenizer.

    Raises:
      StoreIOError: a file cannot be read, is too large, or is a link.
    """
    found = {}
    for name in ("stream", "tokenizer"):
        with contextlib.suppress(FileNotFoundError):
            folder = open_beneath(store, name, os.O_DIRECTORY)
            try:
                files = [f"{name}/{file}" for file in sorted(os.listdir(folder))]
            finally:
                os.close(folder)
            for file in filter(BESIDE.fullmatch, files):
                found[file] = read_beneath(store, file, MOST_BYTES)
    return found


def is_unfinished(path: Path) -> bool:
    """Whether a path has a store whose creation was interrupted; opens no file."""
    is_made = os.path.lexists(path / "current")
    return not is_made and os.path.lexists(path / "jaxinf.json")
