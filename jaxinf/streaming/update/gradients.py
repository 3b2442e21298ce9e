"""Gradients on their way to an update: by shards, one replica of each in this process.

    a program's output ─► by_shards ─► split ─► updates of the unit's boxes
                                    └─► as_one_array ─► numbers, or a file

Invariant: shards are read in place. A gradient that is copied to the host holds no
memory of its device, unless it is kept there.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxinf.compress import SparseLeaf, TopK, compress_leaf
from jaxinf.engine import Engine, SubgroupTable, keeps_feedback, read_feedback
from jaxinf.layout import Box, LeafGrid
from jaxinf.streaming.program.units import PINNED, ParamUnit
from jaxinf.typing import FLOAT32, Array


def wait_for_copy(copy: jax.Array) -> Array:
    """Returns a host copy in place; blocks until the copy has ended.

    No other function reads a gradient on its way.
    """
    return np.asarray(copy)


@dataclass(frozen=True, eq=False)
class ShardedGradient:
    """A gradient by shards: one replica of each in this process.

    Attributes:
      shards: On devices, or in pinned memory of the host, which is read in place.
      on_device: The gradient, if it is kept there.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    shards: Mapping[Box, jax.Array]
    on_device: jax.Array | None

    @property
    def nbytes(self) -> int:
        return sum(shard.nbytes for shard in self.shards.values())

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        """Gathers the whole, with zeros for shards of other processes; blocks."""
        del copy  # one shard that is the whole is not copied, others are
        whole = self.shards.get(Box.of(None, self.shape))
        if whole is not None:
            return np.asarray(wait_for_copy(whole), dtype)
        array = np.zeros(self.shape, self.dtype if dtype is None else dtype)
        for box, shard in self.shards.items():
            array[box.slices] = wait_for_copy(shard)
        return array


Gradient: TypeAlias = Array | ShardedGradient
"""A gradient on the host, or by shards."""


def by_shards(
    gradient: jax.Array, *, to_host: bool = False, keep_on_device: bool = False
) -> ShardedGradient:
    """Returns a program's gradient without the replicas on other devices.

    A gradient that goes to the host begins its copy, and holds no memory of the device,
    unless it is on a single one and is kept there.
    """
    shape, dtype = gradient.shape, np.dtype(gradient.dtype)
    is_on_one = len(gradient.devices()) == 1
    on_device = gradient if is_on_one and (keep_on_device or not to_host) else None
    replicas = reversed(gradient.addressable_shards)  # of a shard's the first
    shards = {Box.of(replica.index, shape): replica.data for replica in replicas}
    if to_host:
        pinned = [x.sharding.with_memory_kind(PINNED) for x in shards.values()]
        on_host = jax.device_put([*shards.values()], pinned)
        shards = dict(zip(shards, on_host, strict=True))
    return ShardedGradient(shape, dtype, shards, on_device)


def gather_shards(gradient: jax.Array) -> jax.Array:
    """Returns a gradient with all shards in every process; all call it."""
    sharding = gradient.sharding
    if not isinstance(sharding, NamedSharding) or sharding.is_fully_replicated:
        return gradient
    return jax.device_put(gradient, NamedSharding(sharding.mesh, PartitionSpec()))


def split(gradient: Gradient, boxes: Sequence[Box]) -> Sequence[Array]:
    """Returns a gradient's arrays in disjoint boxes, its shards in place; blocks."""
    shards = gradient.shards if isinstance(gradient, ShardedGradient) else {}
    if shards.keys() == {*boxes}:
        return [wait_for_copy(shards[box]) for box in boxes]
    array = np.asarray(gradient)
    return [array[(*box.slices, ...)] for box in boxes]


def as_one_array(gradient: Gradient) -> jax.Array | Array:
    """Returns a gradient as one array: on its device if it is there, or gathered."""
    on_device = getattr(gradient, "on_device", None)
    return np.asarray(gradient) if on_device is None else on_device


Compress: TypeAlias = Callable[
    [ParamUnit, Array, int], tuple[Array | SparseLeaf, Array | None]
]
"""Returns a unit's gradient as the step of a number sends it, and the new error
feedback; blocks."""


def compressor(
    compression: TopK,
    engine: Engine,
    subgroups: SubgroupTable,
    units: Iterable[ParamUnit],
    jit: Any,
) -> tuple[Compress, int]:
    """Returns the function that compresses gradients, and its largest program's memory.

    The elements sent are those that `jaxinf.smart_update` sends of the same gradient,
    since both select chunk by chunk.
    """
    has_feedback = keeps_feedback(compression)

    @cache
    def compiled(grid: LeafGrid, dtype: np.dtype) -> Any:
        def select(gradient: jax.Array, feedback: jax.Array | None = None) -> Any:
            return compress_leaf(gradient, grid, compression, feedback)

        dtypes = [dtype, FLOAT32][: 1 + has_feedback]
        avals = [jax.ShapeDtypeStruct(grid.shape, dtype) for dtype in dtypes]
        return jit(select).lower(*avals).compile()

    def program_of(unit: ParamUnit) -> Any:
        chunk_shape = subgroups.leaves[unit.leaf].grid.chunk_shape
        return compiled(LeafGrid(unit.place.shape, chunk_shape), unit.dtype)

    def compress(
        unit: ParamUnit, gradient: Array, step: int
    ) -> tuple[Array | SparseLeaf, Array | None]:
        if step < compression.warmup_steps:
            return gradient, None
        arrays = [gradient]
        if has_feedback:
            arrays.append(np.empty(unit.place.shape, np.float32))
            read_feedback(engine.files, unit.leaf, arrays[1], unit.place.start)
        sent, feedback = program_of(unit)(*map(jnp.asarray, arrays))
        return jax.tree.map(np.asarray, (sent, feedback))

    return compress, max(
        m.temp_size_in_bytes + m.output_size_in_bytes + m.argument_size_in_bytes
        for m in (program_of(unit).memory_analysis() for unit in units)
    )
