"""Batches of rows, which Grain shuffles, divides over processes and prefetches.

Invariant: batch n is a function of the rows, the seed and n alone, for any number of
processes or threads. So a position in the data is one number.
"""

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import grain

from jaxinf.train.data.rows import RowMap, Rows
from jaxinf.typing import Array

Batch: TypeAlias = Mapping[str, Array]

_READ_AHEAD = grain.ReadOptions(num_threads=1, prefetch_buffer_size=4)


def endless_batches(
    rows: Rows,
    *,
    batch_size: int,
    seed: int,
    row_map: RowMap | None = None,
    shard: tuple[int, int] = (0, 1),
) -> Sequence[Batch]:
    """Returns endless shuffled batches; every epoch has an order of its own.

    Args:
      seed: Seed of the order and of `row_map`, 0 to 2**32 - 1.
      row_map: A random change of each row, different in each epoch.
      shard: Number of this process, and the number of processes, which divides the
        batch size; they share each batch.
    """
    number, num_shards = shard
    mapped = _shuffle(rows, seed, row_map, is_endless=True)
    shares = mapped.batch(batch_size // num_shards, drop_remainder=True)
    # Together they are the batch of one process, in its order.
    return shares[number::num_shards] if num_shards > 1 else shares


def iterate_from(batches: Any, number: int) -> grain.DatasetIterator[Batch]:
    """Iterates over endless batches from one on; close it to end Grain's thread."""
    iterator: Any = iter(batches.to_iter_dataset(_READ_AHEAD))
    iterator.set_state({"next_index": number})
    return iterator


def epoch_batches(
    rows: Rows, *, batch_size: int, seed: int, row_map: RowMap | None = None
) -> Sequence[Batch]:
    """Returns every row once, always in the same batches; the last may be short."""
    mapped = _shuffle(rows, seed, row_map, is_endless=False)
    return mapped.batch(batch_size, drop_remainder=False)


def _shuffle(rows: Any, seed: int, row_map: RowMap | None, *, is_endless: bool) -> Any:
    """Shuffles and maps rows before they are divided: the same for any division."""
    shuffled = grain.MapDataset.source(rows).seed(seed).shuffle()
    shuffled = shuffled.repeat() if is_endless else shuffled
    return shuffled if row_map is None else shuffled.random_map(row_map)
