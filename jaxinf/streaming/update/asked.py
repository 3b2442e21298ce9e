"""A unit's update: what is asked of the store, and parts that it must wait for.

Invariant: what a process does not update itself is zero in new params.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from jaxinf.engine import UpdateRequest
from jaxinf.streaming.program.graph import Piece
from jaxinf.streaming.program.units import Unit
from jaxinf.typing import Array


class Asked:
    """The requests for the update of a unit.

    Attributes:
      requests: One for each part that moves.
    """

    def __init__(self, unit: Unit, requests: list[UpdateRequest]) -> None:
        self._unit, self.requests = unit, requests
        self._target: Sequence[Array] = ()

    def fill(self, target: Sequence[Array] | None) -> None:
        """Asks for the new params, too: in the memory of the unit's shards."""
        if target is None:
            return
        unit, outs = self._unit, target
        if not unit.is_divided:
            self._target, outs = target, [np.zeros(unit.shape, unit.dtype)]
        self.requests = [
            replace(request, out=out.reshape(unit.extent_of(box)), wants_params=True)
            for request, box, out in zip(self.requests, unit.boxes, outs, strict=True)
        ]

    def end(self) -> None:
        for box, shard in zip(self._unit.shards, self._target, strict=False):
            out = self.requests[0].out
            assert out is not None, "the new params of all shards"
            shard[...] = out.reshape(self._unit.shape)[box.slices]


class Gathered:
    """Gradients of the parts of a unit that is stored as a whole."""

    def __init__(self, unit: Unit) -> None:
        self.array = np.empty(unit.shape, unit.dtype)
        self._num_missing = self.array.size

    def add(self, part: Piece, gradient: Array) -> bool:
        """Keeps a part's gradient; returns whether it was the last."""
        self.array[part.index] = gradient
        self._num_missing -= gradient.size
        return not self._num_missing
