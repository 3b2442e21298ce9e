"""Takes a subgroup's part from the arrays of a leaf.

Invariant: arrays are only read, and copied only if the part is not contiguous.
"""

from collections.abc import Sequence

from jaxinf.compress import SparseGradient, SparseLeaf
from jaxinf.csd import Rounding, ScalarInputs
from jaxinf.engine.subgroup_layout import SubgroupLayout
from jaxinf.errors import StoreMismatchError
from jaxinf.layout import covers, gather, rounding_of_chunk
from jaxinf.store import StoreDirectory
from jaxinf.typing import Array


def gather_run(
    directory: StoreDirectory,
    layout: SubgroupLayout,
    array: Array,
    origin: Sequence[int],
) -> Array:
    """Returns a subgroup's elements of a leaf's array, as a view if contiguous."""
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
    """Returns a subgroup's part of a dense or sparse gradient.

    Raises:
      StoreMismatchError: the gradient was compressed for other chunks.
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
    """Returns a subgroup's part of a kernel's other arrays."""
    if not inputs.arrays:
        return inputs
    arrays = tuple(gather_run(directory, layout, a, origin) for a in inputs.arrays)
    return ScalarInputs(inputs.scalars, arrays)


def rounding_of(layout: SubgroupLayout, step: int) -> Rounding:
    """Returns the seed of a subgroup's rounding in a step, the same on every CSD."""
    subgroup = layout.subgroup
    key = rounding_of_chunk(subgroup.leaf, subgroup.chunk, step)
    return Rounding(key, subgroup.offset_elements)
