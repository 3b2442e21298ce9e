"""A unit's update: what is asked of the store, and parts that it must wait for.

Invariant: what a process does not update itself is zero in new params.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from jaxinf.csd import ScalarInputs
from jaxinf.engine import UpdateRequest, changes_params
from jaxinf.program import UpdateProgram
from jaxinf.streaming.program.graph import Piece
from jaxinf.streaming.program.shards import Gradient, shards_of
from jaxinf.streaming.program.units import Unit
from jaxinf.streaming.update.compressing import Compressor
from jaxinf.streaming.update.passes import PassRunner
from jaxinf.typing import Array

_NO_PARAMS = np.empty(0, np.float32)


class Asked:
    """The requests for the update of a unit.

    Attributes:
      requests: One for each part that moves.
    """

    def __init__(
        self, unit: Unit, requests: list[UpdateRequest], *, changes_params: bool
    ) -> None:
        self._unit = unit
        self.requests, self.changes_params = requests, changes_params
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


class Asking:
    """Makes requests of gradients, in the optimizer's last pass."""

    def __init__(
        self, program: UpdateProgram, passes: PassRunner, compressor: Compressor
    ) -> None:
        self._program, self._passes = program, passes
        self._compressor = compressor

    def __call__(
        self,
        unit: Unit,
        gradient: Gradient,
        params: Sequence[Array] | None,
        step: int,
    ) -> Asked:
        """Makes the requests for a unit's update; blocks while inputs are computed.

        Args:
          params: Its parts in memory, if they are.
          step: The step that the update goes on from.
        """
        assert params is None or unit.is_divided, "the update takes parts that it moves"
        kernel = self._program.leaves[unit.leaf].kernel
        parts = shards_of(gradient, unit.boxes)
        inputs = ScalarInputs(())
        requests = []
        for number, (box, part) in enumerate(zip(unit.boxes, parts, strict=True)):
            part = part.reshape(unit.extent_of(box))
            given = None if params is None else params[number]
            if not number:  # a unit in parts has none but scalars, the same for all
                inputs = self._passes.inputs(unit.leaf, part, given)
            sent, feedback = self._compressor(unit, part, step)
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
        changes = changes_params(kernel, inputs)
        return Asked(unit, requests, changes_params=changes)


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
