"""New chunk grids for leaves whose shards in a run would cut the chunks that there are.

     old chunks, verified ──► portions ──► chunks of the new grid
                                           one writer for each new member

Invariant: old files are only read. Elements move as they are stored, and codes with the
  scales of their blocks or not at all, so that no bit changes.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TypeAlias

import numpy as np

from jaxinf.errors import StoreMismatchError
from jaxinf.layout import CODE_BLOCK, Chunk, LeafGrid, choose_grid, portions
from jaxinf.store.chunk_writer import ChunkWriter
from jaxinf.store.contents import StateRecord, dtype_of
from jaxinf.store.manifest import LeafRecord
from jaxinf.store.reader import PIECE_BYTES, PieceRuns, StepReader
from jaxinf.typing import Array

_PORTION_ELEMENTS = PIECE_BYTES // 4


@dataclass(frozen=True)
class Shards:
    """A leaf's shards in a run.

    Attributes:
      counts: their number along each dimension.
      holders: the processes whose devices have each, in C order; empty if the devices
        are in a line, as many for each process.
    """

    counts: tuple[int, ...]
    holders: Sequence[Sequence[int]] = ()

    def holders_in(self, count: int) -> Sequence[Sequence[int]]:
        """Returns the processes that have each shard, of so many."""
        num_shards = math.prod(self.counts)
        line = [(shard * count // num_shards,) for shard in range(num_shards)]
        return self.holders or line


ShardsOf: TypeAlias = Callable[[LeafRecord], Shards]
"""Returns the shards of a leaf in the run that a store is divided for."""


def in_line(leaf: LeafRecord, count: int) -> Shards:
    """Returns a leaf's shards in a run on a mesh of one axis; replicated ones stay so.

    A leaf whose dimension does not divide, or that has shards along several, is taken
    to keep its shards. There are as many as before if each process gets as many, and
    else one a process.

    Args:
      leaf: the leaf, with the shards that its grid was made for.
      count: number of processes.
    """
    held = math.prod(leaf.shard_counts)
    along = [dim for dim, number in enumerate(leaf.shard_counts) if number > 1]
    wanted = count if held % count else held
    if len(along) != 1 or leaf.shape[along[0]] % wanted:
        return Shards(leaf.shard_counts)
    return Shards(tuple(wanted if n > 1 else 1 for n in leaf.shard_counts))


def fits(leaf: LeafRecord, counts: Sequence[int]) -> bool:
    """Whether no chunk of a leaf has a part in two of its shards."""
    return all(
        number == 1 or length // number % chunk == 0
        for length, number, chunk in zip(
            leaf.shape, counts, leaf.chunk_shape, strict=True
        )
    )


def with_grid(
    leaf: LeafRecord, counts: Sequence[int], most_elements: int
) -> LeafRecord:
    """Returns a leaf with a grid for these shards: its own, if that divides at them."""
    if fits(leaf, counts):
        return leaf
    counts = tuple(counts)
    grid = choose_grid(
        leaf.shape, shard_counts=counts, max_chunk_elements=most_elements
    )
    return replace(
        leaf,
        chunk_shape=grid.chunk_shape,
        shard_counts=counts,
        csds=(0,) * grid.num_chunks,
        owners=(),
    )


def check_blocks(where: str, old: LeafRecord, new: LeafRecord) -> None:
    """Refuses a new grid in which blocks of codes would have other elements.

    Raises:
      StoreMismatchError: says what to do.
    """
    coded = [state.slot for state in old.states if state.codec == "scale"]
    grids = (old.grid, new.grid)
    if not coded or all(
        _blocks(grid, chunk) is not None for grid in grids for chunk in grid.chunks()
    ):
        return
    raise StoreMismatchError(
        f"{where}: leaf {old.name}: expected shards {new.shard_counts} that chunks of "
        f"whole blocks of {CODE_BLOCK} codes fit, as {', '.join(coded)} is stored so, "
        f"found that chunks of {new.chunk_shape}, in place of {old.chunk_shape}, would "
        f"cut them; nothing was changed. Go on with as many devices as before, or "
        "copy it to float32 state first: jaxinf store copy OLD NEW --state fp32"
    )


def regrid(
    reader: StepReader, number: int, old: LeafRecord, writers: Sequence[ChunkWriter]
) -> dict[str, Array]:
    """Writes a leaf's chunks anew; blocks.

    Args:
      writers: write the step in the stores that have it in the new grid, together all
        chunks.

    Returns:
      The CRC-32C of each new chunk, uint32 by array name.

    Raises:
      StoreCorruptError, StoreIOError: an old chunk is damaged, or a drive failed.
    """
    leaves = [writer.directory.manifest.leaves[number] for writer in writers]
    sums = {}
    for state in old.states:
        move = _move_scales if state.codec == "scale" else _move
        move(reader, number, old, state, writers)
        found = np.zeros(len(leaves[0].csds), np.uint32)
        for writer, leaf in zip(writers, leaves, strict=True):
            for chunk in leaf.held:
                found[chunk] = writer.checksum(number, chunk, state)
        sums[old.array_name(state.name)] = found
    return sums


def _move(
    reader: StepReader,
    number: int,
    old: LeafRecord,
    state: StateRecord,
    writers: Sequence[ChunkWriter],
) -> None:
    dtype = dtype_of(state.dtype)
    every = portions(old.grid, _PORTION_ELEMENTS)
    for chunk, members in groupby(every, key=lambda portion: portion.chunk):
        runs = PieceRuns(reader.stored(old, state, chunk), dtype)
        for portion in members:
            values = runs.take(portion.num_elements).reshape(portion.extent)
            for writer in writers:
                writer.write_stored(number, state.name, portion.start, values)


def _move_scales(
    reader: StepReader,
    number: int,
    old: LeafRecord,
    state: StateRecord,
    writers: Sequence[ChunkWriter],
) -> None:
    whole = np.empty(-(-old.grid.num_elements // CODE_BLOCK), dtype_of(state.dtype))
    for position, chunk in enumerate(old.grid.chunks()):
        blocks = _blocks(old.grid, chunk)
        assert blocks is not None, "check_blocks has seen that"
        runs = PieceRuns(reader.stored(old, state, position), whole.dtype)
        whole[blocks] = runs.take(blocks.size)
    for writer in writers:
        leaf = writer.directory.manifest.leaves[number]
        chunks = writer.directory.chunks[number]
        for position in leaf.held:
            blocks = _blocks(leaf.grid, chunks[position])
            writer.write_scales(number, state.name, position, whole[blocks])


def _blocks(grid: LeafGrid, chunk: Chunk) -> Array | None:
    """Returns the numbers of a chunk's blocks among those of the leaf in C order.

    None if they are others: if a block has a gap in the leaf, or begins elsewhere.
    """
    firsts = np.arange(0, chunk.num_elements, CODE_BLOCK)
    lasts = np.minimum(firsts + CODE_BLOCK, chunk.num_elements) - 1
    begin, end = (_places(grid, chunk, positions) for positions in (firsts, lasts))
    wanted = np.minimum(begin + CODE_BLOCK, grid.num_elements) - 1
    is_there = (begin % CODE_BLOCK == 0) & (end == wanted)
    is_whole = is_there & (end - begin == lasts - firsts)
    return begin // CODE_BLOCK if is_whole.all() else None


def _places(grid: LeafGrid, chunk: Chunk, positions: Array) -> Array:
    """Returns the places in the leaf, in C order, of elements of a chunk."""
    inside = np.unravel_index(positions, chunk.extent)
    at = [first + index for first, index in zip(chunk.start, inside, strict=True)]
    return np.ravel_multi_index(at, grid.shape)
