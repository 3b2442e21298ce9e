"""Applies gradients near storage: each updates its leaf as soon as it arrives.

    runner ─ put ─► queue, bounded in bytes ─► thread: kernel near storage
                                                       all done ─► finish: one commit

Invariant: the store advances by one step if every gradient arrived and was finite;
  otherwise it does not advance. A unit that the store moves as a whole is updated as a
  whole.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np

from jaxinf.csd import ScalarInputs, is_idle
from jaxinf.engine import (
    KeptLeaf,
    Store,
    StoreShape,
    UpdateRequest,
    carried_leaves,
    check_carried,
    engine_of,
)
from jaxinf.program import UpdateProgram, effect_of_nonfinite, refused_gradient
from jaxinf.store import KeptPlan, ScalarState
from jaxinf.streaming.move.params import Params
from jaxinf.streaming.move.scratch import THREADS_PER_DRIVE, Scratch
from jaxinf.streaming.move.spill import Spill, Waiting
from jaxinf.streaming.move.stage import Handed, Stage, Work
from jaxinf.streaming.plan.calls import Plan
from jaxinf.streaming.plan.fit import Prepared
from jaxinf.streaming.plan.kept import check_same, kept_cuts, streams_of
from jaxinf.streaming.plan.memory import Division
from jaxinf.streaming.plan.options import StepOptions
from jaxinf.streaming.program.graph import Piece
from jaxinf.streaming.program.shards import (
    Gradient,
    gathered,
    handed_out,
    shards_of,
    whole,
)
from jaxinf.streaming.program.units import Unit
from jaxinf.streaming.update.compressing import Compressor
from jaxinf.streaming.update.device_updates import NUM_UNDER_WAY, DeviceShare
from jaxinf.streaming.update.near_storage import (
    Updates,
    divided,
    drive_folders,
    traffic,
)
from jaxinf.streaming.update.passes import PassRunner
from jaxinf.streaming.update.sink import Sink, is_finite, on_host
from jaxinf.transfer import ByteCounts
from jaxinf.typing import Array, PyTree

# Gradients up to this long share a call of the engine.
_SHORT_BYTES = 1 << 20
_NO_PARAMS = np.empty(0, np.float32)


class StoreSink(Sink):
    """The optimizer's side of a streamed step. Making it compiles its programs.

    Gradients are deferred if the optimizer needs numbers of all of them, such as their
    norm, or if a step overwrites one that is not committed. Updates then start when all
    have arrived, and with them all reads of params are over.

    Args:
      store: The store; it is bound to the optimizer when this is used.
      ready: The loss function, traced for the batch.
      program: The optimizer.
      shape: The store's chunks; it need not be there.

    Attributes:
      spill: Holds gradients until the last one arrives; None if none waits.
    """

    def __init__(
        self,
        store: Store,
        ready: Prepared,
        program: UpdateProgram,
        shape: StoreShape,
        options: StepOptions,
    ) -> None:
        self._updates = updates = Updates.of(ready, program, shape, options)
        super().__init__(options, store, updates.store_units)
        self._engine, self._program = engine_of(store), program
        self.num_drives = max(1, shape.directory.num_csds)
        bits = {"is_deterministic": options.deterministic}
        self._passes = PassRunner(self._engine, program, updates.passes, **bits)
        arrivals = updates.arrivals(ready.traced.params)
        self._numbers_bytes = self._passes.compile(arrivals)
        self._compressor: Compressor | None = None
        if options.compress is not None:
            own = self._engine, options.compress, shape
            self._compressor = Compressor(*own, **bits)
            compressing_bytes = self._compressor.compile(updates.units)
            self._numbers_bytes = max(self._numbers_bytes, compressing_bytes)
        self._device = DeviceShare(updates, store, options, ready.traced.mesh)
        self._nonfinite = effect_of_nonfinite(
            options.nonfinite, is_guarded=program.is_guarded
        )
        self._kept = set[Unit]()
        self._carried: Mapping[tuple[str, ...], Array] = {}
        self._streams: Mapping[str, KeptPlan] = {}
        # Units of which parts are missing, and the parts that are there.
        self._parts: dict[Unit, tuple[Array, set[Piece]]] = {}
        self._bad: list[str] = []
        self._step = self._num_skipped = 0
        self.spill: Spill | None = None
        self._stage = Stage("jaxinf-updates", 1, _SHORT_BYTES)
        self._fetched: Params

    # --- what it takes -------------------------------------------------------------

    def divided(self, ready: Prepared, budgets: Mapping[str, int]) -> Division:
        division = divided(self._updates, ready, budgets, self.options)
        purpose = "computing numbers of its gradients"
        return self._device.without(division).without(
            self._numbers_bytes, purpose, is_on_device=True
        )

    def kept_cuts(self, ready: Prepared) -> Sequence[int] | None:
        if self._engine.commit is None:
            return None
        where = self._engine.options.path, self._engine.opened.finished
        return kept_cuts(*where, ready)

    def is_frozen(self, unit: Unit) -> bool:
        return is_idle(self._program.leaves[unit.leaf].kernel)

    def takes_read(self, unit: Unit) -> bool:
        return self._updates.takes_read(unit)

    def waiting(self, plan: Plan) -> Waiting | None:
        return self._updates.waiting(plan)

    def traffic(self, plan: Plan) -> ByteCounts:
        return traffic(self._updates, plan)

    def scratch(self, content: str) -> Scratch:
        opened = self._engine.opened
        num_threads = 1 if content == "gradients" else THREADS_PER_DRIVE
        how = {"content": content, "num_threads": num_threads}
        return Scratch(drive_folders(opened.directory), opened.meters, **how)

    # --- a step --------------------------------------------------------------------

    def open(self, plan: Plan, ready: Prepared) -> None:
        self._streams = streams_of(ready, plan.cuts)
        division, waits = plan.division, self.waiting(plan)
        room_bytes, num_threads = division.gradients, 1
        if waits is not None:
            self.spill = Spill(self.scratch("gradients"), waits)
            room_bytes -= waits.capacity_bytes
        room_bytes = min(room_bytes, division.leaving)
        self._assignment = self._device.assignment(division.gradients)
        if self._assignment.updater is not None:
            num_threads = NUM_UNDER_WAY
            room_bytes += (num_threads - 1) * self._updates.largest_bytes
        how = room_bytes, _SHORT_BYTES, num_threads
        self._stage = Stage("jaxinf-updates", *how)

    def begin(self, extra_args: Mapping[str, Any], params: Params) -> None:
        self._fetched = params
        opened = self._engine.opened
        if not self.options.replan:
            check_same(self._engine.options.path, opened.finished, self._streams)
        self._step = opened.finished.step
        opened.assign(self._assignment)
        self._passes.begin(extra_args)
        self._parts, self._bad = {}, []
        self._kept.clear()
        self._stage.waited_s = 0.0
        if self.spill is not None:
            self.spill.reset()
        self._stage.start(self._update if self.spill is None else self._defer)

    def put(self, piece: Piece, gradient: jax.Array | Array) -> None:
        is_looked_at = self._passes.looks_at(piece.leaf)
        if piece.leaf in self._updates.idle:
            self._kept.add(self._updates.store_units.unit(piece))
            if not is_looked_at:
                return
        if is_looked_at and not self._together.group.is_alone:  # whole, in all
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
            self._engine.opened.abandon()
            if self._nonfinite == "skip":
                self._num_skipped += 1
                return False
            raise refused_gradient(self._bad, self._step)
        assert not self._parts, "every part of a unit has its gradient"
        kept = [  # leaves that stay as they are
            KeptLeaf(unit.leaf, unit.origin_of(box), unit.extent_of(box))
            for unit in sorted(self._kept, key=lambda unit: unit.place)
            for box in unit.boxes
        ]
        opened = self._engine.opened
        if kept:
            opened.update(self._step, *kept)
        held = zip(opened.finished.scalar_state, self._passes.finish(), strict=True)
        scalars = [ScalarState.of(old.path, new) for old, new in held]
        num_skipped = opened.finished.skipped_steps + self._num_skipped
        kept = {"carry": self._carried, "streams": self._streams}
        opened.finish(self._step, scalars, num_skipped, **kept)
        self._num_skipped = 0
        return True

    def abandon(self) -> None:
        """Abandons the step without a commit."""
        self._stage.abandon()
        if self.spill is not None:
            self.spill.reset()
        self._passes.close()
        self._engine.opened.abandon()

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

    # --- the end of a step ---------------------------------------------------------

    @property
    def _is_refused(self) -> bool:
        return bool(self._bad) and self._nonfinite != "allow"

    def _agree(self, action: Callable[[], None]) -> None:
        """Runs the rest of what is under way, and agrees on gradients that refuse."""

        def refusing() -> list[str]:
            action()
            return self._bad

        self._bad = self._together.agree(refusing)

    def _end_all(self, results: PyTree) -> None:
        self._stage.end()
        if (carry := self.options.carry) is not None:
            carried = carried_leaves(carry(results[1]))
            names = self._engine.opened.directory.manifest.state_names
            check_carried(self._engine, carried, names)
            self._carried = {path: on_host(x) for path, x in carried.items()}

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

    # --- gradients, on threads -----------------------------------------------------

    def _defer(self, taken: Sequence[Handed]) -> None:
        assert self.spill is not None
        # An update that overwrites a step cannot be undone if a later one is refused.
        is_checked = self._engine.options.rewrites_steps
        for piece, handed in taken:
            if piece.leaf in self._passes.passes.whole:
                unit = self._updates.store_units.unit(piece)
                complete = self._gathered(unit, piece, handed)
                if complete is None:
                    continue
                piece, handed = Piece(unit.leaf), np.asarray(complete)
            self._passes.add(piece, whole(handed))
            array = np.asarray(handed)  # it need not stay on the device
            if is_checked and not is_finite(array):
                self._bad.append(self._name(piece.leaf))
            if piece.leaf not in self._updates.idle:
                self.spill.put(piece, array)

    def _update(self, taken: Sequence[Handed]) -> Work | None:
        asked: dict[Unit, list[UpdateRequest]] = {}
        for piece, gradient in taken:
            unit = self._updates.store_units.unit(piece)
            complete = self._gathered(unit, piece, gradient)
            if complete is None:
                continue
            if self._is_held(complete):
                self._bad.append(self._name(unit.leaf))
                self._fetched.free(unit)
            else:
                asked[unit] = self._requests(unit, complete)
        return partial(self._run, asked) if asked else None

    def _run(self, asked: Mapping[Unit, Sequence[UpdateRequest]]) -> None:
        requests = [request for own in asked.values() for request in own]
        finite = self._engine.opened.update(self._step, *requests)
        for unit in asked:
            self._fetched.free(unit)
        pairs = zip(requests, finite, strict=True)
        self._bad += [self._name(one.leaf) for one, is_finite in pairs if not is_finite]

    def _gathered(
        self, unit: Unit, piece: Piece, gradient: Gradient
    ) -> Gradient | None:
        """Returns the gradient of a unit; None while some of its parts are missing."""
        part = self._updates.store_units.part(unit, piece)
        if not part.index:
            return gradient
        if unit not in self._parts:
            self._parts[unit] = np.empty(unit.shape, unit.dtype), set()
        array, there = self._parts[unit]
        array[part.index] = np.asarray(gradient)
        there.add(part)
        is_whole = sum(array[one.index].size for one in there) == array.size
        return self._parts.pop(unit)[0] if is_whole else None

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
            sent, feedback = part, None
            if self._compressor is not None:
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

    def _is_held(self, gradient: Gradient) -> bool:
        """Whether a gradient refuses the step, which the CSDs could not tell."""
        if self._compressor is None or self._nonfinite == "allow":
            return False
        return not is_finite(np.asarray(gradient))

    def _name(self, leaf: int) -> str:
        return self._program.leaves[leaf].info.name
