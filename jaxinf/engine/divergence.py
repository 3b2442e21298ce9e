"""Checks that the caller's params agree with the store's master.

Invariant: zeros and denormals count as equal, as JAX on a CPU flushes denormals.
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
    """Checks that params equal a chunk, except for zeros and denormals.

    Reads the chunk again. It is called when a checksum has shown a difference.

    Args:
      directory: the store's files.
      chunks: the newest version of each chunk.
      layout: a subgroup of the chunk.
      params: the leaf or a shard of it, in the dtype of the store's params.
      origin: index in the leaf of the array's first element.

    Raises:
      DivergedParamsError: they differ; names the place.
      StoreCorruptError: the chunk is damaged.
    """
    subgroup = layout.subgroup
    record = directory.manifest.leaves[subgroup.leaf]
    slot = chunks.source(layout, 0)
    newest = CommitRecord(step=0, scalar_state=(), checksums=chunks.checksums())
    found = None
    step = directory.step_path(slot)
    with StepReader(step, newest, directory=directory) as reader:
        for piece in reader.stored(record, record.states[0], subgroup.chunk):
            held = piece.values
            given = gather(params, piece.chunk, tuple(origin), piece.start, held.size)
            if found is None and not same_values(held, given):
                first = int(np.argmax(held != given))
                few = slice(first, first + 3)
                found = diverged_error(record.name, given[few].copy(), held[few].copy())
    if found is not None:  # the chunk is not damaged
        raise found


def same_values(a: Array, b: Array, *, bound: float = 0.0) -> bool:
    """Compares element by element; NaNs are equal, and so are zeros and denormals.

    JAX on a CPU flushes denormals and NumPy does not, so that is no difference.

    Args:
      a, b: arrays of one shape.
      bound: a difference that does not count.
    """
    wide_a, wide_b = a.astype(np.float32), b.astype(np.float32)
    same = wide_a == wide_b
    if same.all():
        return True
    tiny = np.finfo(np.float32).tiny
    same |= (np.abs(wide_a) < tiny) & (np.abs(wide_b) < tiny)
    same |= np.isnan(wide_a) & np.isnan(wide_b)
    if bound:
        same |= np.abs(wide_a - wide_b) <= bound
    return bool(same.all())


def diverged_error(name: str, given: Array, held: Array) -> DivergedParamsError:
    """Makes the error for params that differ from the store's master."""
    return DivergedParamsError(
        f"leaf {name}: the params given to update are not those the store's master is "
        f"of (at one place they are {given}, the store's {held}); apply the returned "
        "updates unchanged (smart_update last in the chain, then "
        "optax.apply_updates), or take store.params(like=params)"
    )
