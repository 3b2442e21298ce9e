"""Applies gradients near storage: each updates its leaf as soon as it arrives.

    runner ─ put ─► queue, bounded in bytes ─► thread: kernel near storage
                                                       all done ─► finish: one commit

Invariant: the store advances by one step if every gradient arrived and was finite;
  otherwise it does not advance.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np

from jaxinf.csd import ScalarInputs
from jaxinf.engine import (
    Assignment,
    KeptLeaf,
    Store,
    StoreShape,
    UpdateRequest,
    carried_leaves,
    check_carried,
)
from jaxinf.program import UpdateProgram, effect_of_nonfinite
from jaxinf.store import ScalarState
from jaxinf.streaming.move.params import Params
from jaxinf.streaming.move.spill import Spill
from jaxinf.streaming.move.stage import Handed, Stage, Work
from jaxinf.streaming.plan.fit import Prepared
from jaxinf.streaming.plan.options import Options
from jaxinf.streaming.plan.planned import Planned
from jaxinf.streaming.program.graph import Piece
from jaxinf.streaming.program.shards import (
    Gradient,
    gathered,
    handed_out,
    shards_of,
    whole,
)
from jaxinf.streaming.program.units import Unit
from jaxinf.streaming.update.assigning import (
    NUM_UNDER_WAY,
    measured,
)
from jaxinf.streaming.update.near_storage import (
    non_finite,
)
from jaxinf.streaming.update.sink import is_finite, on_host
from jaxinf.streaming.update.stored import Stored
from jaxinf.typing import Array, PyTree

_NO_PARAMS = np.empty(0, np.float32)
# Gradients up to this long share a call of the engine.
_SHORT_BYTES = 1 << 20


class StoreSink(Stored):
    """The optimizer's side of a streamed step.

    Gradients are deferred if the optimizer needs numbers of all of them, such as their
    norm, or if a step overwrites one that is not committed. Updates then start when all
    have arrived, and with them all reads of params are over.

    Attributes:
      spill: Holds gradients until the last one arrives; None if none waits.
    """

    def __init__(
        self,
        store: Store,
        ready: Prepared,
        program: UpdateProgram,
        shape: StoreShape,
        options: Options,
    ) -> None:
        super().__init__(store, ready, program, shape, options)
        self._nonfinite = effect_of_nonfinite(
            options.nonfinite, is_guarded=program.is_guarded
        )
        self._kept = set[Unit]()
        # Passes look at whole gradients, in every process.
        self._is_gathered = not self._together.group.is_alone
        self._carried: Mapping[tuple[str, ...], Array] = {}
        self._gathering: dict[Unit, _Gathered] = {}
        self._bad: list[str] = []
        self._step = self._num_skipped = 0
        self.spill: Spill | None = None
        self._assignment = Assignment()
        self._stage = Stage("jaxinf-updates", 1, _SHORT_BYTES)
        self._fetched: Params

    def open(self, planned: Planned) -> None:
        division, waits = planned.division, self.waiting(planned)
        room_bytes = division.gradients
        if waits is not None:
            self.spill = Spill(self.scratch("gradients"), waits)
            room_bytes -= waits.capacity_bytes
        room_bytes, num_threads = min(room_bytes, division.leaving), 1
        if self._every is None:
            self._every = measured(self._updater, self._layouts, division.gradients)
        self._assignment = self._assigned(self._every)
        if self._assignment.updater is not None:
            num_threads = NUM_UNDER_WAY
            room_bytes += (num_threads - 1) * max(self._gradient_bytes.values())
        how = room_bytes, _SHORT_BYTES, num_threads
        self._stage = Stage("jaxinf-updates", *how)

    def begin(self, extra_args: Mapping[str, Any], params: Params) -> None:
        self._fetched = params
        opened = self._engine.opened
        self._step = opened.finished.step
        opened.assign(self._assignment)
        self._passes.begin(extra_args)
        self._gathering, self._bad = {}, []
        self._kept.clear()
        self._stage.waited_s = 0.0
        if self.spill is not None:
            self.spill.reset()
        self._stage.start(self._update if self.spill is None else self._defer)

    def put(self, piece: Piece, gradient: jax.Array | Array) -> None:
        is_looked_at = self._passes.looks_at(piece.leaf)
        if piece.leaf in self._idle:
            self._kept.add(self._store_units.unit(piece))
            if not is_looked_at:
                return
        if self._is_gathered and is_looked_at:
            gradient = gathered(gradient)
        with self._together.holding():
            stays = self.spill is not None and self._passes.looks_first(piece.leaf)
            copies = not self.options.limit.is_host
            own = handed_out(gradient, copies=copies, stays=stays)
            self._stage.put(piece, own)

    def finish(
        self,
        extra_args: Mapping[str, Any],
        results: PyTree,
        check: Callable[[], None],
    ) -> bool:
        self._agree(partial(self._end_all, results))
        self._passes.give(extra_args)
        spill = self.spill
        if spill is not None and not self._is_refused:
            self._agree(lambda: self._update_deferred(spill, check))
        if self._is_refused:
            self._passes.close()
            self._engine.steps.abandon()
            if self._nonfinite == "skip":
                self._num_skipped += 1
                return False
            raise non_finite(self._step, self._bad)
        assert not self._gathering, "every part of a unit has its gradient"
        self._keep()
        record = self._engine.opened.finished
        scalars = [
            ScalarState(old.path, new)
            for old, new in zip(record.scalar_state, self._passes.finish(), strict=True)
        ]
        num_skipped = record.skipped_steps + self._num_skipped
        self._engine.steps.finish(self._step, scalars, num_skipped, carry=self._carried)
        self._num_skipped = 0
        return True

    def abandon(self) -> None:
        """Abandons the step without a commit."""
        self._stage.abandon()
        if self.spill is not None:
            self.spill.reset()
        self._passes.close()
        self._engine.steps.abandon()

    @property
    def waited_s(self) -> float:
        return self._stage.waited_s

    @property
    def spilled_bytes(self) -> tuple[int, int]:
        spill = self.spill
        return (0, 0) if spill is None else (spill.kept_bytes, spill.written_bytes)

    def close(self) -> None:
        """Frees the files of gradients that wait, and ends the thread."""
        self._stage.close()
        self._passes.close()
        if self.spill is not None:
            self.spill.close()

    # --- inside --------------------------------------------------------------------

    @property
    def _is_refused(self) -> bool:
        return bool(self._bad) and self._nonfinite != "allow"

    def _agree(self, action: Callable[[], None]) -> None:
        """Runs the rest of what is under way, and agrees on gradients that refuse."""

        def refusing() -> list[str]:
            action()
            return self._bad

        self._bad = self._together.agree(refusing)

    def _update_deferred(self, spill: Spill, check: Callable[[], None]) -> None:
        """Runs the other passes.

        Writes over an uncommitted step are not interrupted.
        """
        for number in range(1, self._passes.num_passes):
            self._passes.advance()
            if number == self._passes.num_passes - 1:
                break
            for piece, gradient in spill.read():
                check()
                self._passes.add(piece, gradient)
        check()
        overwrites = self._engine.opened.num_uncommitted > 0
        self._stage.start(self._update)
        for piece, gradient in spill.read(removes=True):
            self._stage.put(piece, gradient)
            if not overwrites:
                check()
        self._stage.end()

    def _keep(self) -> None:
        """Tells the store of leaves that stay as they are."""
        kept = (
            KeptLeaf(unit.leaf, unit.origin_of(box), unit.extent_of(box))
            for unit in sorted(self._kept, key=lambda unit: unit.place)
            for box in unit.boxes
        )
        if self._kept:
            self._engine.steps.update(self._step, *kept)

    def _end_all(self, results: PyTree) -> None:
        self._stage.end()
        if (carry := self.options.carry) is not None:
            carried = carried_leaves(carry(results[1]))
            names = self._engine.opened.directory.manifest.state_names
            check_carried(self._engine, carried, names)
            self._carried = {path: on_host(x) for path, x in carried.items()}

    def _defer(self, taken: Sequence[Handed]) -> None:
        assert self.spill is not None
        # An update that overwrites a step cannot be undone if a later one is refused.
        is_checked = self._engine.options.rewrites_steps
        for piece, handed in taken:
            if piece.leaf in self._passes.passes.whole:
                unit = self._store_units.unit(piece)
                gathered = self._gathered(unit, piece, handed)
                if gathered is None:
                    continue
                piece, handed = Piece(unit.leaf), np.asarray(gathered)
            self._passes.add(piece, whole(handed))
            array = np.asarray(handed)  # it need not stay on the device
            if is_checked and not is_finite(array):
                self._bad.append(self._program.leaves[piece.leaf].info.name)
            if piece.leaf not in self._idle:
                self.spill.put(piece, array)

    def _update(self, taken: Sequence[Handed]) -> Work | None:
        asked: dict[Unit, list[UpdateRequest]] = {}
        for piece, gradient in taken:
            unit = self._store_units.unit(piece)
            gathered = self._gathered(unit, piece, gradient)
            if gathered is None:
                continue
            if self._is_held(gathered):
                self._bad.append(self._program.leaves[unit.leaf].info.name)
                self._fetched.free(unit)
            else:
                asked[unit] = self._requests(unit, gathered)
        return partial(self._run, asked) if asked else None

    def _run(self, asked: Mapping[Unit, Sequence[UpdateRequest]]) -> None:
        requests = [request for own in asked.values() for request in own]
        finite = self._engine.steps.update(self._step, *requests)
        for unit in asked:
            self._fetched.free(unit)
        self._bad += [
            self._program.leaves[request.leaf].info.name
            for request, is_finite in zip(requests, finite, strict=True)
            if not is_finite
        ]

    def _gathered(
        self, unit: Unit, piece: Piece, gradient: Gradient
    ) -> Gradient | None:
        """Returns the gradient of the whole unit; None while parts are missing."""
        part = self._store_units.part(unit, piece)
        if not part.index:
            return gradient
        gathered = self._gathering.setdefault(unit, _Gathered(unit))
        if not gathered.add(part, np.asarray(gradient)):
            return None
        return self._gathering.pop(unit).array

    def _is_held(self, gradient: Gradient) -> bool:
        """Whether a gradient refuses the step, which the CSDs could not tell."""
        is_checked = self._compressor.is_on and self._nonfinite != "allow"
        return is_checked and not is_finite(np.asarray(gradient))

    def _requests(self, unit: Unit, gradient: Gradient) -> list[UpdateRequest]:
        """Returns what a unit's update asks for; blocks while inputs are computed."""
        params = self._fetched.take(unit)
        assert params is None or unit.is_divided, "the update takes parts that it moves"
        parts = shards_of(gradient, unit.boxes)
        inputs, requests = ScalarInputs(()), []
        for number, (box, part) in enumerate(zip(unit.boxes, parts, strict=True)):
            part = part.reshape(unit.extent_of(box))
            given = None if params is None else params[number]
            if not number:  # a unit in parts has none but scalars, the same for all
                inputs = self._passes.inputs(unit.leaf, part, given)
            sent, feedback = self._compressor(unit, part, self._step)
            requests.append(
                UpdateRequest(
                    leaf=unit.leaf,
                    kernel=self._program.leaves[unit.leaf].kernel,
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


class _Gathered:
    """Gradients of the parts of a unit that is stored as a whole."""

    def __init__(self, unit: Unit) -> None:
        self.array = np.empty(unit.shape, unit.dtype)
        self._num_missing = self.array.size

    def add(self, part: Piece, gradient: Array) -> bool:
        """Keeps a part's gradient; returns whether it was the last."""
        self.array[part.index] = gradient
        self._num_missing -= gradient.size
        return not self._num_missing
