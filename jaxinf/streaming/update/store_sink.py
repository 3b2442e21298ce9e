"""Applies gradients near storage: each updates its leaf as soon as it arrives.

    runner ─ put ─► queue, bounded in bytes ─► thread: kernel near storage
                                                       all done ─► finish: one commit

Invariant: the store advances by one step if every gradient arrived and was finite;
  otherwise it does not advance. What a step takes and moves depends on the store's
  chunks alone, so it can be planned before its store is made.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np

from jaxinf.csd import is_idle
from jaxinf.engine import (
    Assignment,
    Store,
    StoreShape,
    UpdateRequest,
    carried_leaves,
    check_carried,
    engine_of,
)
from jaxinf.program import UpdateProgram, effect_of_nonfinite
from jaxinf.store import ScalarState
from jaxinf.streaming.move.params import Params
from jaxinf.streaming.move.scratch import THREADS_PER_DRIVE, Scratch
from jaxinf.streaming.move.spill import Spill, Waiting
from jaxinf.streaming.move.stage import Handed, Stage, Work
from jaxinf.streaming.plan.calls import Plan
from jaxinf.streaming.plan.fit import Prepared
from jaxinf.streaming.plan.memory import Division
from jaxinf.streaming.plan.options import Options
from jaxinf.streaming.program.graph import Piece
from jaxinf.streaming.program.shards import (
    Gradient,
    gathered,
    handed_out,
    whole,
)
from jaxinf.streaming.program.units import Unit
from jaxinf.streaming.update.assigning import (
    NUM_UNDER_WAY,
    Layouts,
    asked_interval,
    assignment,
    layouts_of,
    measured,
    without_updates,
)
from jaxinf.streaming.update.compressing import Compressor
from jaxinf.streaming.update.near_storage import (
    divided,
    drive_folders,
    non_finite,
    takes_read,
    traffic,
    updates_of,
)
from jaxinf.streaming.update.on_device import DeviceUpdater
from jaxinf.streaming.update.optimizer import arrivals_of
from jaxinf.streaming.update.passes import PassRunner
from jaxinf.streaming.update.requests import kept_leaves, update_requests, whole_unit
from jaxinf.streaming.update.sink import Sink, is_finite, on_host
from jaxinf.transfer import ByteCounts
from jaxinf.typing import Array, PyTree

# Gradients up to this long share a call of the engine.
_SHORT_BYTES = 1 << 20


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
        options: Options,
    ) -> None:
        self._updates = updates = updates_of(ready, program, shape, options)
        super().__init__(options, store, updates.store_units)
        self._engine, self._program = engine_of(store), program
        self.num_drives = max(1, shape.directory.num_csds)
        self.keeps_plans_in = store.path
        bits = {"is_deterministic": options.deterministic}
        self._passes = PassRunner(self._engine, program, updates.passes, **bits)
        compress, self._compressor = options.compress, None
        if compress is not None:
            self._compressor = Compressor(self._engine, compress, shape, **bits)
        shapes = [leaf.shape for leaf in ready.traced.params]
        whole = updates.passes.whole
        self._numbers_bytes = max(
            self._passes.compile(arrivals_of(ready.gradient_pieces, shapes, whole)),
            self._compressor.compile(updates.units) if self._compressor else 0,
        )
        is_host = options.limit.is_host
        self._updater = DeviceUpdater(options.device, is_host=is_host, **bits)
        asked = options.device_updates
        self._every = asked_interval(
            asked, store, ready.traced.mesh, replan=options.replan
        )
        self._layouts: Layouts = ()
        if self._every != 0:
            chosen = self._assigned(1 if asked == "auto" else self._every or 1)
            self._layouts = layouts_of(updates, chosen)
        self._nonfinite = effect_of_nonfinite(
            options.nonfinite, is_guarded=program.is_guarded
        )
        self._kept = set[Unit]()
        self._carried: Mapping[tuple[str, ...], Array] = {}
        self._parts: dict[Unit, tuple[Array, set[Piece]]] = {}
        self._bad: list[str] = []
        self._step = self._num_skipped = 0
        self.spill: Spill | None = None
        self._assignment = Assignment()
        self._stage = Stage("jaxinf-updates", 1, _SHORT_BYTES)
        self._fetched: Params

    def _assigned(self, every: int) -> Assignment:
        is_auto = self.options.device_updates == "auto"
        return assignment(self._updates, self._updater, every, is_auto=is_auto)

    # --- what it takes -------------------------------------------------------------

    def divided(self, ready: Prepared, budgets: Mapping[str, int]) -> Division:
        division = divided(self._updates, ready, budgets, self.options)
        largest_bytes = self._updates.largest_bytes
        division = without_updates(division, self._layouts, largest_bytes)
        purpose = "computing numbers of its gradients"
        return division.without(self._numbers_bytes, purpose, is_on_device=True)

    def is_frozen(self, unit: Unit) -> bool:
        return is_idle(self._program.leaves[unit.leaf].kernel)

    def takes_read(self, unit: Unit) -> bool:
        return takes_read(self._updates, unit)

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

    def open(self, plan: Plan) -> None:
        division, waits = plan.division, self.waiting(plan)
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
            room_bytes += (num_threads - 1) * self._updates.largest_bytes
        how = room_bytes, _SHORT_BYTES, num_threads
        self._stage = Stage("jaxinf-updates", *how)

    def begin(self, extra_args: Mapping[str, Any], params: Params) -> None:
        self._fetched = params
        opened = self._engine.opened
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
            raise non_finite(self._step, self._bad)
        assert not self._parts, "every part of a unit has its gradient"
        if self._kept:  # leaves that stay as they are
            self._engine.opened.update(self._step, *kept_leaves(self._kept))
        opened = self._engine.opened
        held = zip(opened.finished.scalar_state, self._passes.finish(), strict=True)
        scalars = [ScalarState(old.path, new) for old, new in held]
        num_skipped = opened.finished.skipped_steps + self._num_skipped
        opened.finish(self._step, scalars, num_skipped, carry=self._carried)
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
                unit = self._updates.store_units.unit(piece)
                gathered = self._gathered(unit, piece, handed)
                if gathered is None:
                    continue
                piece, handed = Piece(unit.leaf), np.asarray(gathered)
            self._passes.add(piece, whole(handed))
            array = np.asarray(handed)  # it need not stay on the device
            if is_checked and not is_finite(array):
                self._bad.append(self._program.leaves[piece.leaf].info.name)
            if piece.leaf not in self._updates.idle:
                self.spill.put(piece, array)

    def _update(self, taken: Sequence[Handed]) -> Work | None:
        asked: dict[Unit, list[UpdateRequest]] = {}
        for piece, gradient in taken:
            unit = self._updates.store_units.unit(piece)
            gathered = self._gathered(unit, piece, gradient)
            if gathered is None:
                continue
            if self._is_held(gathered):
                self._bad.append(self._program.leaves[unit.leaf].info.name)
                self._fetched.free(unit)
            else:
                asked[unit] = update_requests(
                    unit,
                    gathered,
                    self._fetched.take(unit),
                    self._passes,
                    self._program.leaves[unit.leaf].kernel,
                    self._compressor and partial(self._compressor, step=self._step),
                )
        return partial(self._run, asked) if asked else None

    def _run(self, asked: Mapping[Unit, Sequence[UpdateRequest]]) -> None:
        requests = [request for own in asked.values() for request in own]
        finite = self._engine.opened.update(self._step, *requests)
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
        part = self._updates.store_units.part(unit, piece)
        return whole_unit(unit, part, gradient, self._parts)

    def _is_held(self, gradient: Gradient) -> bool:
        """Whether a gradient refuses the step, which the CSDs could not tell."""
        if self._compressor is None or self._nonfinite == "allow":
            return False
        return not is_finite(np.asarray(gradient))
