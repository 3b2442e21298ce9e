"""Whether params that a caller gives are those that the store's master is of.

Invariant: zeros and denormals are no difference, as JAX on a CPU flushes denormals.
"""

from collections.abc import Sequence

import numpy as np

from jaxinf.engine.chunks import ChunkTable
from jaxinf.engine.subgroup_layout import SubgroupLayout
from jaxinf.errors import DivergedParamsError
from jaxinf.layout import gather
from jaxinf.store import CommitRecord, StepReader, StoreDirectory
from jaxinf.typing import Array

__all__ = ["compare_chunk", "diverged_error", "same_values"]


def compare_chunk(
    directory: StoreDirectory,
    chunks: ChunkTable,
    layout: SubgroupLayout,
    params: Array,
    origin: Sequence[int],
) -> None:
    """Checks that params are what a chunk holds but for zeros and denormals.

    Reads the chunk anew: for when a checksum has said that they differ in some bit.

    Args:
      directory: the store's files.
      chunks: which of them are the newest.
      layout: a subgroup of the chunk.
      params: the leaf or a shard of it, of the dtype in which the store has its params.
      origin: index in the leaf of the array's first element.

    Raises:
      DivergedParamsError: they differ; says where.
      StoreCorruptError: the chunk is not what was written.
    """
    subgroup = layout.subgroup
    record = directory.manifest.leaves[subgroup.leaf]
    slot = chunks.source(layout, 0)
    newest = CommitRecord(step=0, scalar_state=(), checksums=chunks.checksums())
    found = None
    with StepReader(directory.step_path(slot), newest) as reader:
        for piece in reader.stored(record, record.states[0], subgroup.chunk):
            held = piece.values
            given = gather(params, piece.chunk, tuple(origin), piece.start, held.size)
            if found is None and not same_values(held, given):
                first = int(np.argmax(held != given))
                few = slice(first, first + 3)
                found = diverged_error(record.name, given[few].copy(), held[few].copy())
    if found is not None:  # the chunk is as it was written
        raise found


def same_values(a: Array, b: Array) -> bool:
    """Equal element by element; NaNs are equal, and so are zeros and denormals.

    JAX on a CPU flushes denormals, NumPy does not: neither is a difference.
    """
    wide_a, wide_b = a.astype(np.float32), b.astype(np.float32)
    same = wide_a == wide_b
    if same.all():
        return True
    tiny = np.finfo(np.float32).tiny
    same |= (np.abs(wide_a) < tiny) & (np.abs(wide_b) < tiny)
    same |= np.isnan(wide_a) & np.isnan(wide_b)
    return bool(same.all())


def diverged_error(name: str, given: Array, held: Array) -> DivergedParamsError:
    """What is raised for params that the store's master is not of."""
    return DivergedParamsError(
        f"leaf {name}: the params given to update are not those the store's master is "
        f"of (at one place they are {given}, the store's {held}); apply the returned "
        "updates unchanged (smart_update last in the chain, then "
        "optax.apply_updates), or take store.params(like=params)"
    )
