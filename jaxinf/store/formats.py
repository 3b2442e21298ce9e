"""The forms of a store: codecs, grids, and the owners and places of its chunks.

Invariant: every new manifest is made here. A leaf with other codecs has the same slots,
and a grid that shards do not cut stays.
"""

import math
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from msgspec import structs

from jaxinf.errors import StoreMismatchError
from jaxinf.layout import choose_grid, deal
from jaxinf.store.documents import ERROR_FEEDBACK, MASTER_PARAMS
from jaxinf.store.files import is_unfinished
from jaxinf.store.manifest import LeafRecord, Manifest, Member, StateRecord, held_by
from jaxinf.store.members import find_members
from jaxinf.typing import AVERAGE

StateFormat: TypeAlias = Literal["fp32", "bf16", "int8"]
MasterFormat: TypeAlias = Literal["fp32", "split", "none"]

_CODEC_OF = {"fp32": "", "none": "bf16"}  # others are codecs themselves
_MIN_CODED_ELEMENTS = 4096
_NEVER_CODED = (ERROR_FEEDBACK, "acc_grads")  # sums, in which every bit counts


@dataclass(frozen=True)
class Formats:
    """The formats of a store's state, or of a copy's; those that are None stay.

    Small leaves have float32 state and averages. The master of params that are bfloat16
    on the JAX device may be ``"split"``, the params with 16-bit remainders, or
    ``"none"``, the params alone.
    """

    state: str | None = None  # of the optimizer's float32 state
    master: str | None = None
    average: str | None = None  # of the params' average


def coded_leaf(leaf: LeafRecord, formats: Formats) -> LeafRecord:
    """Returns a leaf in these formats."""
    is_small = math.prod(leaf.shape) < _MIN_CODED_ELEMENTS
    own = {MASTER_PARAMS: formats.master, AVERAGE: formats.average}
    stored: list[StateRecord] = []
    for held in leaf.states:
        if held.is_beside:
            continue
        wanted, state = own.get(held.name, formats.state), held.decoded()
        may_change = leaf.dtype == "bfloat16"
        if held.name != MASTER_PARAMS:
            is_plain = state.dtype != "float32" or state.name in _NEVER_CODED
            may_change = not (is_small or is_plain)
        codec = held.codec
        if wanted is not None:
            codec = _CODEC_OF.get(wanted, wanted) if may_change else ""
        stored += state.coded(codec)
    return structs.replace(leaf, states=tuple(stored))


def store_formats(held: Manifest) -> Formats:
    """Returns the formats that a store's leaves have; None for an average it lacks."""
    codecs = dict[str, str]()  # others' as ""
    for state in [one for leaf in held.leaves for one in leaf.states]:
        name = state.name if state.name in (MASTER_PARAMS, AVERAGE) else ""
        if not state.is_beside:
            codecs[name] = codecs.get(name) or state.codec
    master = {"": "fp32", "bf16": "none"}.get(codecs.get(MASTER_PARAMS, ""), "split")
    average = (codecs[AVERAGE] or "fp32") if AVERAGE in codecs else None
    return Formats(codecs.get("") or "fp32", master, average)


@dataclass(frozen=True)
class Shards:
    """A leaf's shards in a run.

    Holders are the processes whose devices have each shard, in C order; they are empty
    if the devices are in a line, as many for each process.
    """

    counts: tuple[int, ...]  # along each dimension
    holders: Sequence[Sequence[int]] = ()

    def holders_of(self, leaf: LeafRecord, count: int) -> list[Sequence[int]]:
        """Returns the processes that have each chunk of a leaf, of so many."""
        num = math.prod(self.counts)
        in_line = [(shard * count // num,) for shard in range(num)]
        holders = self.holders or (in_line if num > 1 else [range(count)])
        found = []
        for chunk in leaf.grid.chunks():
            shard, along = 0, zip(chunk.start, leaf.shape, self.counts, strict=True)
            for start, length, number in along:
                shard = shard * number + start // max(1, length // number)
            found.append(holders[shard])
        return found

    def cut(self, leaf: LeafRecord) -> bool:
        """Whether a chunk of a leaf would lie in two of them."""
        sizes = zip(leaf.shape, self.counts, leaf.chunk_shape, strict=True)
        return any(number > 1 and n // number % chunk for n, number, chunk in sizes)

    def suit(self, leaf: LeafRecord, count: int) -> bool:
        """Whether no chunk lies in two of them, and each owner has its chunk's."""
        if self.cut(leaf):
            return False
        holders = self.holders_of(leaf, count)
        owners = leaf.owners or (0,) * len(holders)
        return all(own in held for own, held in zip(owners, holders, strict=True))


ShardsOf: TypeAlias = Callable[[LeafRecord], Shards]
"""Returns the shards of a leaf in the run that a store is divided for."""


def divided(
    leaves: Sequence[LeafRecord], count: int, shards_of: ShardsOf | None, where: str
) -> tuple[list[LeafRecord], list[list[int]]]:
    """Returns leaves with the grids that shards need, and the owners of their chunks.

    A leaf with codes that would need a new grid is refused. Shards are by default those
    of devices in a line.
    """
    found, every = list[LeafRecord](), list[Shards]()
    most = max((math.prod(leaf.chunk_shape) for leaf in leaves), default=1)
    for leaf in leaves:
        shards = shards_of(leaf) if shards_of else _in_line(leaf, count)
        every.append(shards)
        counts, chunk_shape = shards.counts, leaf.chunk_shape
        if shards.cut(leaf):
            if coded := [one.base_name for one in leaf.states if one.codec == "scale"]:
                raise StoreMismatchError(
                    f"{where}: leaf {leaf.name}: expected shards {counts} that its "
                    f"chunks of {chunk_shape} fit, as the codes of {', '.join(coded)} "
                    "stay in their chunk, found that they would cut some; nothing was "
                    "changed. Go on with as many devices as before, or copy it to "
                    "float32 state first: jaxinf store copy OLD NEW --state fp32"
                )
            options = {"shard_counts": counts, "max_chunk_elements": most}
            chunk_shape = choose_grid(leaf.shape, **options).chunk_shape
        changes = {"chunk_shape": chunk_shape, "shard_counts": counts}
        found.append(structs.replace(leaf, csds=(), owners=(), **changes))
    return found, deal_to_members(found, count, every)


def is_divided_for(path: Path, count: int, shards_of: ShardsOf) -> bool:
    """Whether a store or a run suits so many processes and shards; writes nothing.

    One without a step does, as it is made anew.
    """
    places = [path, *find_members(path)]
    first = next((one for one in places if (one / "jaxinf.json").exists()), None)
    if first is None or is_unfinished(first):
        return True
    manifest = Manifest.read(first / "jaxinf.json")
    if count != (1 if manifest.member is None else manifest.member.count):
        return False
    return all(shards_of(leaf).suit(leaf, count) for leaf in manifest.leaves)


def _in_line(leaf: LeafRecord, count: int) -> Shards:
    """Returns a leaf's shards in a run on a mesh of one axis; replicated ones stay so.

    A leaf whose dimension does not divide, or that has shards along several, is taken
    to keep its shards. There are as many as before if each process gets as many, and
    else one a process.
    """
    held = math.prod(leaf.shard_counts)
    along = [dim for dim, number in enumerate(leaf.shard_counts) if number > 1]
    wanted = count if held % count else held
    if len(along) != 1 or leaf.shape[along[0]] % wanted:
        return Shards(leaf.shard_counts)
    return Shards(tuple(wanted if n > 1 else 1 for n in leaf.shard_counts))


def lay_out(
    contents: Manifest,
    csd_roots: Sequence[str],
    *,
    member: Member | None = None,
    owners: Sequence[Sequence[int]] = (),
) -> Manifest:
    """Assigns places to the chunks of a store, whatever places they have had.

    Args:
      csd_roots: CSD roots for the chunks; empty for the store itself.
      member: the store's part in a run of several processes.
      owners: by leaf, the member that holds each chunk; of a run alone.
    """
    leaves, sizes = list[LeafRecord](), list[int]()
    for number, leaf in enumerate(contents.leaves):
        bare = structs.replace(leaf, csds=(0,) * leaf.grid.num_chunks, owners=())
        leaves.append(bare if member is None else held_by(bare, owners[number], member))
        num_bytes = bare.chunk_bytes
        sizes += [num_bytes[chunk] for chunk in leaves[-1].held]
    csds = iter(deal(sizes, max(1, len(csd_roots))))

    def placed(leaf: LeafRecord) -> LeafRecord:
        found = tuple(-1 if csd < 0 else next(csds) for csd in leaf.csds)
        return structs.replace(leaf, csds=found)

    changes = {"store_id": uuid.uuid4().hex, "csds": tuple(csd_roots), "member": member}
    return structs.replace(contents, leaves=tuple(map(placed, leaves)), **changes)


def deal_to_members(
    leaves: Sequence[LeafRecord], count: int, shards: Sequence[Shards]
) -> list[list[int]]:
    """Returns the owner of each chunk by leaf, in a new run of so many processes.

    Chunks of shards that several have are divided.
    """
    chunk_bytes, places = [], []
    for leaf, own in zip(leaves, shards, strict=True):
        places += own.holders_of(leaf, count)
        chunk_bytes += leaf.chunk_bytes
    owners = iter(deal(chunk_bytes, count, places))
    return [[next(owners) for _ in leaf.grid.chunks()] for leaf in leaves]
