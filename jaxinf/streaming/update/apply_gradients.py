"""Applies gradients near storage: each updates its leaf as soon as it arrives.

    put ─► queue, bounded in bytes ─► thread: parts of a unit ─► kernel near storage
                                       │                              ▲
                                       └─► spill ─► further passes ───┘
    finish: all done ─► one commit

Invariant: the store advances by one step if every gradient arrived and was finite;
  otherwise it does not advance. A unit that the store moves as a whole is updated as a
  whole.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import jax
import numpy as np

from jaxinf.engine import UpdateRequest, carried_leaves, check_carried
from jaxinf.errors import StreamError
from jaxinf.program import LeafInputs, refused_gradient
from jaxinf.store import ScalarState
from jaxinf.streaming.move.params import ParamReader
from jaxinf.streaming.move.scratch import store_scratch
from jaxinf.streaming.move.spill import Spill
from jaxinf.streaming.move.work_queues import Queue, WorkQueues
from jaxinf.streaming.plan.calls import Plan
from jaxinf.streaming.plan.kept import check_same, streams_of
from jaxinf.streaming.program.graph import Piece
from jaxinf.streaming.program.lifetimes import OrderedProgram
from jaxinf.streaming.program.meshes import on_this_process
from jaxinf.streaming.program.units import ParamUnit
from jaxinf.streaming.update.device_updates import NUM_UNDER_WAY, next_assignment
from jaxinf.streaming.update.gradients import (
    Gradient,
    as_one_array,
    gathered,
    handed_out,
    shards_of,
)
from jaxinf.streaming.update.near_storage import UpdatePlan
from jaxinf.typing import Array, PyTree

Agree: TypeAlias = Callable[[Callable[[], Sequence[str]]], list[str]]
"""Runs an action in all processes; returns the leaves that refuse the step in any."""

# Elements whose finiteness is looked at together: it takes memory.
_RUN_ELEMENTS = 1 << 18
_NO_PARAMS = np.empty(0, np.float32)


class StoreSink:
    """The sink that updates a store.

    Gradients are deferred if the optimizer needs numbers of all of them, such as their
    norm, or if a step overwrites one that is not committed. Updates then start when all
    have arrived, and with them all reads of params are over.

    Args:
      params: The source of a step's params, which updates may take.
      jobs: Update, and move gradients that wait; when a step is given up, they are
        reset before this abandons it.

    Attributes:
      spill: Holds gradients until the last one arrives; None if none waits.
      waited_s: Time that gradients of the last step waited for room.
      spilled_bytes: Bytes of those that waited for the last, in memory and in files.
    """

    def __init__(
        self,
        updates: UpdatePlan,
        plan: Plan,
        ready: OrderedProgram,
        params: ParamReader,
        jobs: WorkQueues,
    ) -> None:
        self.updates, self.share = updates, updates.share
        self._params = params
        self.spill, self.waited_s, self.spilled_bytes = None, 0.0, (0, 0)
        self._streams = streams_of(ready, plan.cuts)
        self._num_skipped = 0  # since the last commit
        self._update_s: list[float] = []  # of the steps by which k is measured
        memory, on_drives = plan.memory, updates.on_drives(plan)
        self._copies = memory.staged > 0  # from a device with memory of its own
        room_bytes = memory.gradients - updates.kept_bytes(plan)
        room_bytes = min(room_bytes, memory.leaving)
        num_threads = 1
        if self.share.updater is not None:
            num_threads = NUM_UNDER_WAY
            room_bytes += (num_threads - 1) * updates.largest_bytes
        self._jobs = jobs
        self._queue = Queue("updates", num_threads, room_bytes)
        if on_drives is not None:
            scratch = store_scratch(updates.engine, "gradients")
            self.spill = Spill(jobs, scratch, scratch.allocate(on_drives))

    # --- a step --------------------------------------------------------------------

    def begin(self, extra_args: Mapping[str, Any]) -> None:
        """Gets ready for a step, with further arguments of the optimizer's update."""
        updates, files = self.updates, self.updates.engine.files
        finished = files.finished
        if not updates.options.replan:
            check_same(updates.engine.path, finished, self._streams)
        assigned = next_assignment(self.share, finished, self._update_s)
        if assigned.interval != "auto":
            self.share = assigned
        files.assign(assigned)
        self._step = finished.step
        self._first_s = self.waited_s = 0.0  # when the first gradient came
        updates.inputs.begin(extra_args)
        # Units of which parts are missing, and the parts that are there.
        self._parts: dict[ParamUnit, tuple[Array, set[Piece]]] = {}
        self._bad: list[str] = []  # leaves that refuse the step
        self.spilled_bytes = 0, 0
        if self.spill is not None:
            self.spill.held.clear()

    def put(self, piece: Piece, gradient: jax.Array) -> None:
        """Takes a complete gradient; blocks while too many wait.

        Raises:
          BaseException: The exception that stopped the updates.
        """
        self._first_s = self._first_s or time.perf_counter()
        updates, leaf = self.updates, piece.leaf
        is_looked_at = bool(updates.passes.of_leaf(leaf))
        if leaf in updates.idle and not is_looked_at:
            return
        if is_looked_at and not updates.engine.group.is_alone:  # whole, in all
            gradient = gathered(gradient)
        looks_first = (0, leaf) in updates.passes.parts
        looks_first &= leaf not in updates.passes.whole
        stays = self.spill is not None and looks_first
        own = handed_out(gradient, copies=self._copies, stays=stays)
        self._hand_on(piece, own, self._update if self.spill is None else self._defer)

    def finish(
        self,
        extra_args: Mapping[str, Any],
        results: PyTree,
        check: Callable[[], None],
        agree: Agree,
    ) -> bool:
        """Waits for all updates and ends the step; returns whether params changed.

        Args:
          extra_args: Arguments, as for `begin`, now with those that are known late.
          results: Loss and aux.
          check: Called where the step can be given up; raises if it must be.

        Raises:
          NonFiniteGradientError: The step was refused.
          BaseException: The exception that stopped the updates.
        """
        updates, inputs = self.updates, self.updates.inputs
        nonfinite = updates.options.nonfinite
        carried: dict[tuple[str, ...], Array] = {}

        def arrived() -> list[str]:
            """Ends what the arriving gradients have started."""
            self._jobs.end()
            carried.update(_carried(updates, results))
            return self._bad

        def is_refused() -> bool:
            return bool(self._bad) and nonfinite != "allow"

        self._bad = agree(arrived)
        inputs.give(extra_args)
        if self.spill is not None and not is_refused():
            self._bad = agree(partial(self._update_deferred, self.spill, check))
        if is_refused():
            self.abandon()
            if nonfinite == "error":
                raise refused_gradient(self._bad, self._step)
            self._num_skipped += 1
            return False
        assert not self._parts, "every part of a unit has its gradient"
        self._commit(carried)
        if self.share.interval == "auto":
            self._update_s.append(time.perf_counter() - self._first_s)
        return True

    def abandon(self) -> None:
        """Gives the step up, without a commit."""
        if self.spill is not None:
            self.spill.held.clear()
        self.updates.inputs.close()
        self.updates.engine.steps.abandon()

    def close(self) -> None:
        """Frees memory and files; idempotent."""
        self.updates.inputs.close()
        if self.spill is not None:
            self.spill.held.clear()
            self.spill.scratch.close()

    # --- the end of a step ---------------------------------------------------------

    def _update_deferred(self, spill: Spill, check: Callable[[], None]) -> list[str]:
        """Runs the other passes; returns leaves that refuse the step.

        What gradients are read into had the params before. Writes over an uncommitted
        step are not interrupted.
        """
        self._params.buffers.free_idle()
        inputs, num_passes = self.updates.inputs, self.updates.passes.num_passes
        for _ in range(2, num_passes):
            inputs.advance()
            for piece, gradient in spill.read():
                check()
                inputs.add(piece, gradient)
        if num_passes > 1:
            inputs.advance()
        check()
        overwrites = self.updates.engine.files.num_uncommitted > 0
        for piece, gradient in spill.read(removes=True):
            self._hand_on(piece, gradient, self._update)
            if not overwrites:
                check()
        self._jobs.end()
        return self._bad

    def _commit(self, carried: Mapping[tuple[str, ...], Array]) -> None:
        """Ends the step; starts the commit of its leaves and scalars, if it is due."""
        engine = self.updates.engine
        last, new = engine.files.finished, self.updates.inputs.finish()
        held = zip(last.scalar_state, new, strict=True)
        scalars = [ScalarState.of(old.path, value) for old, value in held]
        num_skipped = last.skipped_steps + self._num_skipped
        engine.steps.finish(
            self._step,
            scalars,
            num_skipped,
            kept=self.updates.idle,
            carry=carried,
            streams=self._streams,
        )
        self._num_skipped = 0

    # --- what gradients come to, on the queue's threads -----------------------------

    def _hand_on(self, piece: Piece, gradient: Gradient, action: Any) -> None:
        item = piece, gradient
        self.waited_s += self._jobs.put(item, gradient.nbytes, action, self._queue)

    def _defer(self, taken: Sequence[tuple[Piece, Gradient]]) -> None:
        """Computes what the first pass needs of gradients, and lets them wait."""
        assert self.spill is not None
        updates = self.updates
        # An update that overwrites a step cannot be undone if a later one is refused.
        is_checked = updates.engine.options.rewrites_steps
        for piece, handed in taken:
            if piece.leaf in updates.passes.whole:
                unit = updates.unit_of(piece)
                complete = self._complete(unit, piece, handed)
                if complete is None:
                    continue
                piece, handed = Piece(unit.leaf), np.asarray(complete)
            if updates.passes.num_passes > 1:  # else the update computes all
                updates.inputs.add(piece, as_one_array(handed))
            array = np.asarray(handed)  # it need not stay on the device
            if is_checked and not _is_finite(array):
                self._bad.append(updates.name(piece.leaf))
            if piece.leaf not in updates.idle:
                written_bytes, held = self.spill.put(piece, array), self.spilled_bytes
                in_memory = held[0] + (0 if written_bytes else array.nbytes)
                self.spilled_bytes = in_memory, held[1] + written_bytes

    def _update(
        self, taken: Sequence[tuple[Piece, Gradient]]
    ) -> Callable[[], None] | None:
        """Computes the inputs of units that are complete; returns their updates."""
        updates, asked = self.updates, dict[ParamUnit, list[UpdateRequest]]()
        # The CSDs cannot tell whether a compressed gradient was finite.
        is_checked = updates.compress is not None
        is_checked &= updates.options.nonfinite != "allow"
        for piece, gradient in taken:
            unit = updates.unit_of(piece)
            complete = self._complete(unit, piece, gradient)
            if complete is None:
                continue
            if is_checked and not _is_finite(np.asarray(complete)):
                self._bad.append(updates.name(unit.leaf))
                self._params.free(unit)
            else:
                asked[unit] = self._requests(unit, complete)
        return partial(self._run, asked) if asked else None

    def _requests(self, unit: ParamUnit, gradient: Gradient) -> list[UpdateRequest]:
        """Returns what a unit's update asks for; blocks while inputs are computed."""
        updates, params = self.updates, self._params.take(unit)
        assert params is None or unit.is_divided, "the update takes parts that it moves"
        parts = shards_of(gradient, unit.boxes)
        inputs, requests = LeafInputs(()), []
        for number, (box, part) in enumerate(zip(unit.boxes, parts, strict=True)):
            place = unit.in_leaf(box)
            part = part.reshape(place.shape)
            given = None if params is None else params[number].reshape(place.shape)
            if not number:  # a unit in parts has none but scalars, the same for all
                inputs = updates.inputs.of_leaf(unit.leaf, part, given)
            sent, feedback = part, None
            if updates.compress is not None:
                sent, feedback = updates.compress(unit, part, self._step)
            requests.append(
                UpdateRequest(
                    leaf=unit.leaf,
                    kernel=updates.program.leaves[unit.leaf].kernel,
                    origin=place.start,
                    gradient=sent,
                    inputs=inputs,
                    out=None,
                    probe=_NO_PARAMS,
                    params=given,
                    feedback=feedback,
                )
            )
        return requests

    def _run(self, asked: Mapping[ParamUnit, Sequence[UpdateRequest]]) -> None:
        """Updates units, which may run beside other updates; blocks."""
        requests = [request for own in asked.values() for request in own]
        finite = self.updates.engine.steps.update(self._step, *requests)
        for unit in asked:
            self._params.free(unit)
        pairs = zip(requests, finite, strict=True)
        self._bad += [self.updates.name(one.leaf) for one, is_ok in pairs if not is_ok]

    def _complete(
        self, unit: ParamUnit, piece: Piece, gradient: Gradient
    ) -> Gradient | None:
        """Returns the gradient of a unit; None while some of its parts are missing."""
        part = unit.part(piece)
        if not part.index:
            return gradient
        if unit not in self._parts:
            self._parts[unit] = np.empty(unit.shape, unit.dtype), set()
        array, there = self._parts[unit]
        array[part.index] = np.asarray(gradient)
        there.add(part)
        is_whole = sum(array[one.index].size for one in there) == array.size
        return self._parts.pop(unit)[0] if is_whole else None


def _is_finite(array: Array) -> bool:
    """Whether an array has neither NaN nor Inf; takes little memory."""
    flat = array.reshape(-1)
    starts = range(0, flat.size, _RUN_ELEMENTS)
    return all(np.isfinite(flat[n : n + _RUN_ELEMENTS]).all() for n in starts)


def _carried(updates: UpdatePlan, results: PyTree) -> Mapping[tuple[str, ...], Array]:
    """Returns the arrays that are committed with a step, of its loss and aux.

    Raises:
      StreamError: This process does not have the whole of one.
    """
    if updates.options.carry is None:
        return {}
    arrays = carried_leaves(updates.options.carry(results[1]))
    names = updates.engine.directory.manifest.state_names
    check_carried(updates.engine.path, arrays, names)
    for path, array in arrays.items():
        if isinstance(array, jax.Array) and not array.is_fully_addressable:
            if not array.is_fully_replicated:
                raise StreamError(
                    "carry: expected arrays that every process has whole, found one "
                    "that is sharded over them; replicate it"
                )
            arrays[path] = on_this_process(array)
    return {path: np.asarray(array) for path, array in arrays.items()}
