"""What of a leaf's arrays belongs to one of its subgroups.

Invariant: arrays are only read, and copied only where a subgroup is no one run of them.
"""

from collections.abc import Sequence

from jaxinf.compress import SparseGradient, SparseLeaf
from jaxinf.csd import Rounding, ScalarInputs
from jaxinf.engine.subgroup_layout import SubgroupLayout
from jaxinf.errors import StoreMismatchError
from jaxinf.layout import covers, gather
from jaxinf.store import StoreDirectory
from jaxinf.typing import Array

__all__ = [
    "gather_gradient",
    "gather_inputs",
    "gather_run",
    "rounding_of",
    "rounding_of_chunk",
]


def gather_run(
    directory: StoreDirectory,
    layout: SubgroupLayout,
    array: Array,
    origin: Sequence[int],
) -> Array:
    """A subgroup's elements of a leaf's array, as a view where they lie in one run."""
    subgroup = layout.subgroup
    chunk = directory.chunks[subgroup.leaf][subgroup.chunk]
    return gather(
        array, chunk, tuple(origin), subgroup.offset_elements, subgroup.num_elements
    )


def gather_gradient(
    directory: StoreDirectory,
    layout: SubgroupLayout,
    gradient: Array | SparseLeaf,
    origin: Sequence[int],
) -> Array | SparseGradient:
    """A subgroup's part of a gradient, dense or sparse as it came.

    Raises:
      StoreMismatchError: it was compressed for other chunks.
    """
    if not isinstance(gradient, SparseLeaf):
        return gather_run(directory, layout, gradient, origin)
    subgroup = layout.subgroup
    record = directory.manifest.leaves[subgroup.leaf]
    positions = covers(record.grid, tuple(origin), gradient.shape)
    chunks = directory.chunks[subgroup.leaf]
    lengths = tuple(chunks[position].num_elements for position in positions)
    if tuple(gradient.lengths) != lengths:
        raise StoreMismatchError(
            f"leaf {record.name}: the gradient was compressed for chunks of other "
            f"lengths than the store's ({record.chunk_shape}): the update was traced "
            "before the store was made; trace it again"
        )
    sent = gradient.chunk(positions.index(subgroup.chunk))
    start = subgroup.offset_elements
    return sent.part(start, start + subgroup.num_elements)


def gather_inputs(
    directory: StoreDirectory,
    layout: SubgroupLayout,
    inputs: ScalarInputs,
    origin: Sequence[int],
) -> ScalarInputs:
    """The same of a kernel's further arrays."""
    if not inputs.arrays:
        return inputs
    arrays = tuple(gather_run(directory, layout, a, origin) for a in inputs.arrays)
    return ScalarInputs(inputs.scalars, arrays)


def rounding_of(layout: SubgroupLayout, step: int) -> Rounding:
    """The random bits of a subgroup in a step: the same wherever it is computed."""
    subgroup = layout.subgroup
    key = rounding_of_chunk(subgroup.leaf, subgroup.chunk, step)
    return Rounding(key, subgroup.offset_elements)


def rounding_of_chunk(leaf: int, chunk: int, step: int) -> int:
    """32 bits that differ from chunk to chunk and from step to step."""
    key = leaf
    for part in (chunk, step):
        key = (key * 0x9E3779B1 + part + 0x7F4A7C15) & 0xFFFFFFFF
        key ^= key >> 15
    return (key * 0x85EBCA6B) & 0xFFFFFFFF
