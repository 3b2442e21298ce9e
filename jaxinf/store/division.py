"""Divides a store's chunks: between the shards of leaves, processes and CSDs.

Invariant: every new manifest is made here. A grid that shards do not cut stays.
"""

import math
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from msgspec import structs

from jaxinf.errors import StoreMismatchError
from jaxinf.layout import choose_grid, deal_chunks
from jaxinf.store.creation import is_unfinished
from jaxinf.store.manifest import LeafRecord, Manifest, Member, leaf_of_member
from jaxinf.store.members import find_members


@dataclass(frozen=True)
class Shards:
    """A leaf's shards in a run.

    `holders` are the processes whose devices have each shard, in C order; empty if the
    devices are in a line, as many for each process.
    """

    counts: tuple[int, ...]  # along each dimension
    holders: Sequence[Sequence[int]] = ()

    def holders_of(self, leaf: LeafRecord, num_processes: int) -> list[Sequence[int]]:
        """Returns the processes that have each chunk of a leaf."""
        num = math.prod(self.counts)
        in_line = [(shard * num_processes // num,) for shard in range(num)]
        holders = self.holders or (in_line if num > 1 else [range(num_processes)])
        chunk_holders = []
        for chunk in leaf.grid.chunks():
            shard, dims = 0, zip(chunk.start, leaf.shape, self.counts, strict=True)
            for start, length, count in dims:
                shard = shard * count + start // max(1, length // count)
            chunk_holders.append(holders[shard])
        return chunk_holders

    def cut_chunks(self, leaf: LeafRecord) -> bool:
        """Whether a chunk of a leaf lies in two shards."""
        dims = zip(leaf.shape, self.counts, leaf.chunk_shape, strict=True)
        return any(count > 1 and n // count % chunk for n, count, chunk in dims)

    def suit(self, leaf: LeafRecord, num_processes: int) -> bool:
        """Whether each chunk lies in one shard, and its owner has that shard."""
        if self.cut_chunks(leaf):
            return False
        holders = self.holders_of(leaf, num_processes)
        owners = leaf.owners or (0,) * len(holders)
        pairs = zip(owners, holders, strict=True)
        return all(owner in processes for owner, processes in pairs)


ShardsOf: TypeAlias = Callable[[LeafRecord], Shards]
"""Returns the shards of a leaf in the run that a store is divided for."""


def divide_leaves(
    leaves: Sequence[LeafRecord],
    num_processes: int,
    shards_of: ShardsOf | None,
    where: str,
) -> tuple[list[LeafRecord], list[list[int]]]:
    """Divides leaves for a run, by default for devices in a line.

    Returns the leaves, with new grids where shards would cut a chunk, and by leaf the
    process that owns each chunk. A leaf with int8 codes keeps its grid, or is refused.
    """
    divided, all_shards = list[LeafRecord](), list[Shards]()
    largest = max((math.prod(leaf.chunk_shape) for leaf in leaves), default=1)
    for leaf in leaves:
        shards = shards_of(leaf) if shards_of else _in_line(leaf, num_processes)
        all_shards.append(shards)
        counts, chunk_shape = shards.counts, leaf.chunk_shape
        if shards.cut_chunks(leaf):
            if coded := [s.base_name for s in leaf.states if s.codec == "scale"]:
                raise StoreMismatchError(
                    f"{where}: leaf {leaf.name}: expected shards {counts} that its "
                    f"chunks of {chunk_shape} fit, as the codes of {', '.join(coded)} "
                    "stay in their chunk, found that they would cut some; nothing was "
                    "changed. Go on with as many devices as before, or copy it to "
                    "float32 state first: jaxinf store copy OLD NEW --state fp32"
                )
            options = {"shard_counts": counts, "max_chunk_elements": largest}
            chunk_shape = choose_grid(leaf.shape, **options).chunk_shape
        changes = {"chunk_shape": chunk_shape, "shard_counts": counts}
        divided.append(structs.replace(leaf, csds=(), owners=(), **changes))
    return divided, deal_to_members(divided, num_processes, all_shards)


def is_divided_for(path: Path, num_processes: int, shards_of: ShardsOf) -> bool:
    """Whether a store or a run suits so many processes and shards; writes nothing.

    A store without a step suits, as it is made anew.
    """
    places = [path, *find_members(path)]
    first = next((place for place in places if (place / "jaxinf.json").exists()), None)
    if first is None or is_unfinished(first):
        return True
    manifest = Manifest.read(first / "jaxinf.json")
    if num_processes != (1 if manifest.member is None else manifest.member.count):
        return False
    return all(shards_of(leaf).suit(leaf, num_processes) for leaf in manifest.leaves)


def _in_line(leaf: LeafRecord, num_processes: int) -> Shards:
    """Returns a leaf's shards in a run on a mesh of one axis.

    There are as many as before if each process gets as many, otherwise one for each. A
    leaf without shards, with shards along several dimensions, or whose dimension does
    not divide, keeps its shards.
    """
    num_shards = math.prod(leaf.shard_counts)
    dims = [dim for dim, count in enumerate(leaf.shard_counts) if count > 1]
    wanted = num_processes if num_shards % num_processes else num_shards
    if len(dims) != 1 or leaf.shape[dims[0]] % wanted:
        return Shards(leaf.shard_counts)
    return Shards(tuple(wanted if count > 1 else 1 for count in leaf.shard_counts))


def place_chunks(
    contents: Manifest,
    csd_roots: Sequence[str],
    *,
    member: Member | None = None,
    owners: Sequence[Sequence[int]] = (),
) -> Manifest:
    """Returns the manifest of a new store, whose chunks are dealt to CSDs.

    Args:
      contents: Leaves and kernels; its CSDs do not count.
      csd_roots: CSD roots for the chunks; empty for the store itself.
      member, owners: In a run the store's part, and by leaf the member of each chunk.
    """
    leaves, sizes = list[LeafRecord](), list[int]()
    for number, leaf in enumerate(contents.leaves):
        bare = structs.replace(leaf, csds=(0,) * leaf.grid.num_chunks, owners=())
        if member is not None:
            bare = leaf_of_member(bare, owners[number], member)
        leaves.append(bare)
        num_bytes = bare.chunk_bytes
        sizes += [num_bytes[chunk] for chunk in bare.held_numbers]
    csds = iter(deal_chunks(sizes, max(1, len(csd_roots))))

    def place(leaf: LeafRecord) -> LeafRecord:
        dealt = tuple(-1 if csd < 0 else next(csds) for csd in leaf.csds)
        return structs.replace(leaf, csds=dealt)

    changes = {"store_id": uuid.uuid4().hex, "csds": tuple(csd_roots), "member": member}
    return structs.replace(contents, leaves=tuple(map(place, leaves)), **changes)


def deal_to_members(
    leaves: Sequence[LeafRecord], num_processes: int, shards: Sequence[Shards]
) -> list[list[int]]:
    """Returns the owner of each chunk, by leaf, in a new run of so many processes.

    The chunks of a shard that several processes have are dealt to them by bytes.
    """
    chunk_bytes, holders = [], []
    for leaf, leaf_shards in zip(leaves, shards, strict=True):
        holders += leaf_shards.holders_of(leaf, num_processes)
        chunk_bytes += leaf.chunk_bytes
    owners = iter(deal_chunks(chunk_bytes, num_processes, holders))
    return [[next(owners) for _ in leaf.grid.chunks()] for leaf in leaves]
