"""What the update of a unit asks the engine for, once its gradient is complete.

Invariant: a unit that the store moves as a whole is updated as a whole.
"""

from collections.abc import Callable, Collection, Sequence

import numpy as np

from jaxinf.compress import SparseLeaf
from jaxinf.csd import ScalarInputs
from jaxinf.engine import KeptLeaf, UpdateRequest
from jaxinf.program import Kernel
from jaxinf.streaming.program.graph import Piece
from jaxinf.streaming.program.shards import Gradient, shards_of
from jaxinf.streaming.program.units import Unit
from jaxinf.streaming.update.passes import PassRunner
from jaxinf.typing import Array

_NO_PARAMS = np.empty(0, np.float32)


def whole_unit(
    unit: Unit,
    part: Piece,
    gradient: Gradient,
    held: dict[Unit, tuple[Array, set[Piece]]],
) -> Gradient | None:
    """Returns the gradient of a unit; None while some of its parts are missing.

    Args:
      part: What of the unit the gradient is of.
      held: Units of which parts are missing, and the parts that are there.
    """
    if not part.index:
        return gradient
    if unit not in held:
        held[unit] = np.empty(unit.shape, unit.dtype), set()
    array, there = held[unit]
    array[part.index] = np.asarray(gradient)
    there.add(part)
    is_whole = sum(array[one.index].size for one in there) == array.size
    return held.pop(unit)[0] if is_whole else None


def update_requests(
    unit: Unit,
    gradient: Gradient,
    params: Sequence[Array] | None,
    passes: PassRunner,
    kernel: Kernel,
    compressed: Callable[[Unit, Array], tuple[Array | SparseLeaf, Array | None]] | None,
) -> list[UpdateRequest]:
    """Returns what a unit's update asks for; blocks while inputs are computed.

    Args:
      params: Its shards in memory, if they are there.
      compressed: Returns a part's gradient as it is sent, and the new error feedback;
        None to send it as it is.
    """
    assert params is None or unit.is_divided, "the update takes parts that it moves"
    parts = shards_of(gradient, unit.boxes)
    inputs, requests = ScalarInputs(()), []
    for number, (box, part) in enumerate(zip(unit.boxes, parts, strict=True)):
        part = part.reshape(unit.extent_of(box))
        given = None if params is None else params[number]
        if not number:  # a unit in parts has none but scalars, the same for all
            inputs = passes.inputs(unit.leaf, part, given)
        sent, feedback = compressed(unit, part) if compressed else (part, None)
        requests.append(
            UpdateRequest(
                leaf=unit.leaf,
                kernel=kernel,
                origin=unit.origin_of(box),
                gradient=sent,
                inputs=inputs,
                out=None,
                probe=_NO_PARAMS,
                params=None if given is None else given.reshape(part.shape),
                feedback=feedback,
            )
        )
    return requests


def kept_leaves(units: Collection[Unit]) -> list[KeptLeaf]:
    """Returns what tells the engine of units that stay as they are."""
    return [
        KeptLeaf(unit.leaf, unit.origin_of(box), unit.extent_of(box))
        for unit in sorted(units, key=lambda unit: unit.place)
        for box in unit.boxes
    ]
