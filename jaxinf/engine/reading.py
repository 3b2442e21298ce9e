"""Reads leaves of the last step onto JAX devices, or into the host's memory.

Invariant: no step ends or is committed meanwhile, since the caller has paused the
steps. In a run of several processes all call alike what returns whole arrays.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxinf.documents import first_few
from jaxinf.engine.sharding import (
    assemble_shards,
    gather_whole,
    held_shards,
    place_parts,
    shard_whole,
)
from jaxinf.engine.store_files import StoreFiles
from jaxinf.errors import StoreError, StoreMismatchError
from jaxinf.layout import Chunk, scatter, target_view
from jaxinf.program import leaf_infos
from jaxinf.store import (
    SCHEDULE_FREE,
    ChunkFile,
    ChunkRun,
    CommittedStep,
    StepReader,
    dtype_of,
    leaf_name,
    map_in_threads,
    schedule_free_params,
)
from jaxinf.transfer import MACHINE_MEMORY_BYTES
from jaxinf.typing import AVERAGE, Array, PyTree


class StateReader(StepReader):
    """Reads states of the last finished step, which may not be committed.

    A step may be under way if it writes nothing that is read here. A context manager.

    Args:
      memory_bytes: Memory for reads; by default as much as the store has.
    """

    def __init__(self, files: StoreFiles, memory_bytes: int | None = None) -> None:
        self._files, chunks, directory = files, files.chunks, files.directory
        record = files.commit
        if chunks.has_working:
            record = files.finished.replace(checksums=chunks.checksums())
        super().__init__(
            CommittedStep(directory.path, directory.manifest, record, ()),
            memory_bytes=memory_bytes or files.options.memory_bytes,
            meters=files.meters,
            drives=[str(folder) for folder in directory.csd_directories],
        )

    def root_of(self, chunk: ChunkFile) -> Path:
        """Returns the directory of the slot that has a chunk's newest version."""
        state = chunk.leaf.states.index(chunk.state)
        entry = self._files.subgroups.entry(chunk.leaf_number, chunk.number, state)
        slot = self._files.chunks.newest_slot(entry)
        return self._files.directory.chunk_roots(slot)[chunk.csd]

    def visit_pieces(
        self,
        leaf: int,
        state: int,
        chunks: Sequence[int],
        dtype: np.dtype,
        visit: Callable[[ChunkRun], None],
        into: Callable[[Chunk], Array | None] = lambda _: None,
    ) -> None:
        """Calls `visit` with the pieces of chunks of a state, from several threads.

        Args:
          into: Targets, as for `stored_pieces`; used if the state has that dtype.

        Raises:
          StoreError: The drive failed, or a chunk is damaged, perhaps only after its
            last piece; the store is stopped.
        """
        files, record = self._files, self._files.leaves[leaf]
        state_record = record.states[state]
        is_stored = dtype_of(state_record.dtype) == dtype

        def visit_chunk(chunk: int) -> None:
            file = ChunkFile(leaf, record, state_record, chunk)
            pieces = self.decoded_pieces(file)
            if is_stored:
                pieces = self.stored_pieces(file, into=into)
            for piece in pieces:
                visit(replace(piece, values=piece.values.astype(dtype, copy=False)))

        try:
            for _ in map_in_threads(chunks, visit_chunk, self.num_threads):
                pass
        except StoreError as error:
            files.health.fail(error)
            raise

    def read(self, leaf: int, out: Array, origin: Sequence[int], *states: int) -> None:
        """Reads a box of a leaf's state, or of its average; blocks.

        Args:
          out: The box, of any dtype; it must cover whole chunks
            (`SubgroupTable.has_whole_chunks`). Values in the dtype of the store's
            `params` are rounded as these are, others to nearest even.
          origin: Index in the leaf of the first element of `out`.
          states: Number of the state, or the two of `average_states`.
        """
        files, start, (state, *others) = self._files, tuple(origin), states
        chunks = files.subgroups.chunks_of(leaf, origin, out.shape)
        if others:  # the schedule-free average is computed chunk by chunk
            b1 = files.finished.schedule_free_b1
            assert b1 is not None
            grid_chunks = files.leaves[leaf].grid.chunks()
            for chunk in (grid_chunks[number] for number in chunks):
                y, z = (np.empty(chunk.extent, np.float32) for _ in states)
                for number, values in zip(states, (y, z), strict=True):
                    self.read(leaf, values, chunk.start, number)
                values = schedule_free_params(y, z, b1).astype(out.dtype)
                scatter(out, chunk, start, 0, values.reshape(-1))
            return

        def visit(piece: ChunkRun) -> None:
            if not np.may_share_memory(piece.values, out):
                scatter(out, piece.chunk, start, piece.start, piece.values)
            files.meters.add(link_up_bytes=piece.values.nbytes)

        def into(chunk: Chunk) -> Array | None:
            return target_view(out, chunk, start, 0, chunk.num_elements)

        self.visit_pieces(leaf, state, chunks, out.dtype, visit, into)

    def close(self) -> None:
        """Frees the memory."""
        self.__exit__()


def average_states(files: StoreFiles, leaf: int) -> tuple[int, ...]:
    """Returns the numbers of the states of which a leaf's average is made.

    They are the average alone; of a schedule-free optimizer the master params and its
    z, or the master params of a leaf that it does not train. A store without an average
    is refused.
    """
    states = [state.name for state in files.leaves[leaf].states]
    if AVERAGE in states:
        return (states.index(AVERAGE),)
    if files.finished.schedule_free_b1 is not None:
        return (0, states.index(SCHEDULE_FREE)) if SCHEDULE_FREE in states else (0,)
    raise StoreMismatchError(
        f"{files.options.path}: expected an average of the params, found "
        f"{', '.join(states)}; leave average=True out"
    )


def read_feedback(
    files: StoreFiles, leaf: int, out: Array, origin: Sequence[int]
) -> None:
    """Reads a leaf's or a shard's error feedback, the last of its states."""
    with StateReader(files) as reader:
        reader.read(leaf, out, origin, len(files.leaves[leaf].states) - 1)


# --- whole arrays ---------------------------------------------------------------------


def check_like(files: StoreFiles, like: PyTree, what: str = "`like`") -> None:
    """Refuses a tree, called `what` in the error, if its leaves are not the store's."""
    stored = [f"{leaf.name} {list(leaf.shape)}" for leaf in files.leaves]
    given = [f"{leaf_name(x.path)} {list(x.shape)}" for x in leaf_infos(like)]
    if given != stored:
        expected = first_few([leaf for leaf in stored if leaf not in given])
        found = first_few([leaf for leaf in given if leaf not in stored])
        raise StoreMismatchError(
            f"{files.options.path}: {what} has other leaves than the store: expected "
            f"{expected}, found {found}; give a tree of all {len(stored)} leaves"
        )


def read_array(files: StoreFiles, number: int, dtype: np.dtype, *states: int) -> Array:
    """Returns a leaf's whole committed state, or its average; blocks."""
    record = files.leaves[number]
    box = [0] * len(record.shape), record.shape
    read = partial(_read_box, files, number, dtype, states, *box)
    held = files.group.in_all(f"read {record.name}", read)
    return held if files.group.is_alone else gather_whole(held)


def _read_box(
    files: StoreFiles,
    number: int,
    dtype: np.dtype,
    states: Sequence[int],
    origin: Sequence[int],
    extent: Sequence[int],
) -> Array:
    """Reads a box of a leaf, with zeros for what other processes hold."""
    leaf, num_elements = files.leaves[number], math.prod(extent)
    if num_elements * dtype.itemsize > MACHINE_MEMORY_BYTES:
        raise StoreError(
            f"{files.options.path}: leaf {leaf.name}: {num_elements} elements of "
            f"{dtype} take more memory than this machine has ({MACHINE_MEMORY_BYTES} "
            "bytes); read it in parts (jaxinf inspect names its array, which "
            "tensorstore opens)"
        )
    out = (np.empty if leaf.is_whole else np.zeros)(extent, dtype)
    with StateReader(files) as reader:
        reader.read(number, out, origin, *states)
    return out


def read_leaf(files: StoreFiles, number: int, like: Any, *states: int) -> jax.Array:
    """Reads a leaf's committed state, or its average, onto JAX devices; blocks.

    In a run of several processes all call it. If each shard's holders own its chunks,
    the leaf is read shard by shard; otherwise it is in the memory of every host for a
    while.

    Args:
      like: The leaf's shape, the wanted dtype and, optionally, a sharding.
    """
    shape, dtype = tuple(like.shape), np.dtype(like.dtype)
    sharding, is_alone = getattr(like, "sharding", None), files.group.is_alone
    is_divided = not is_alone and isinstance(getattr(sharding, "mesh", None), Mesh)
    record, count = files.leaves[number], files.group.count
    if is_divided and held_shards(like.sharding, shape).suit(record, count):
        read_box = partial(_read_box, files, number, dtype, states)
        parts = partial(place_parts, like.sharding, shape, read_box)
        what = f"params of {record.name}"
        return assemble_shards(files.group.in_all(what, parts))
    whole = read_array(files, number, dtype, *states)
    if is_divided:
        return shard_whole(whole, like.sharding)
    # Uncommitted if `like` is: otherwise a jitted step would be compiled again.
    if is_alone and not getattr(like, "committed", True):
        sharding = None
    return jax.device_put(whole, sharding)
