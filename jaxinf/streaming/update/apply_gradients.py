"""Applies gradients near storage: each updates its leaf as soon as it arrives.

    put ─► queue, bounded in bytes ─► thread: pieces of a unit ─► kernel near storage
                                       │                               ▲
                                       └─► spill ─► further passes ────┘
    finish: all updates done ─► one commit

Invariant: the store advances by one step if every gradient arrived and was finite;
  otherwise it does not advance. A unit that the store moves as a whole is updated as a
  whole.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any, TypeAlias

import jax
import numpy as np

from jaxinf.engine import UpdateRequest, carried_leaves, check_carried
from jaxinf.errors import StreamError
from jaxinf.program import LeafInputs, nonfinite_error
from jaxinf.store import ScalarState
from jaxinf.streaming.move.params import ParamReader
from jaxinf.streaming.move.scratch import scratch_files
from jaxinf.streaming.move.spill import Spill
from jaxinf.streaming.move.work_queues import BeginWork, Queue, WorkQueues
from jaxinf.streaming.plan.calls import Plan
from jaxinf.streaming.plan.kept import check_cuts, cuts_record
from jaxinf.streaming.program.graph import Piece
from jaxinf.streaming.program.lifetimes import OrderedProgram
from jaxinf.streaming.program.meshes import on_this_process
from jaxinf.streaming.program.units import ParamUnit
from jaxinf.streaming.update.device_updates import NUM_UNDER_WAY, next_assignment
from jaxinf.streaming.update.gradients import (
    Gradient,
    as_one_array,
    by_shards,
    gather_shards,
    split,
)
from jaxinf.streaming.update.update_plan import UpdatePlan
from jaxinf.typing import Array, PyTree

Agree: TypeAlias = Callable[[Callable[[], Sequence[str]]], list[str]]
"""Runs an action in all processes; returns the leaves that refuse the step in any."""

# Elements that are checked together: a check takes memory.
_CHECKED_ELEMENTS = 1 << 18
_NO_PARAMS = np.empty(0, np.float32)


class StoreSink:
    """Takes the gradients of steps and updates a store.

    Gradients are deferred if the optimizer needs numbers of all of them, such as their
    norm, or if a step overwrites one that is not committed. Updates then start when all
    have arrived, and with them all reads of params are over.

    Attributes:
      spill: Holds gradients until the last one arrives; None if none waits.
      waited_s: Time that gradients of the last step waited for room.
      spilled_bytes: Bytes of gradients that `spill` held, in memory and in files.
    """

    def __init__(
        self,
        updates: UpdatePlan,
        plan: Plan,
        ordered: OrderedProgram,
        params: ParamReader,
        jobs: WorkQueues,
    ) -> None:
        self.updates, self._assignment = updates, updates.assignment
        self._params = params
        self.spill, self.waited_s, self.spilled_bytes = None, 0.0, (0, 0)
        self._streams = cuts_record(ordered, plan.cuts)
        self._num_skipped = 0  # since the last commit
        self._update_s: list[float] = []  # of the steps by which k is measured
        memory, on_drives = plan.memory, updates.on_drives(plan)
        self._copies_to_host = memory.staged_bytes > 0  # the device has its own memory
        room_bytes = memory.gradient_bytes - updates.kept_bytes(plan)
        room_bytes = min(room_bytes, memory.leaving_bytes)
        num_threads = 1
        if self._assignment.updater is not None:
            num_threads = NUM_UNDER_WAY
            room_bytes += (num_threads - 1) * updates.largest_gradient_bytes
        self._jobs = jobs
        self._queue = Queue("updates", num_threads, room_bytes)
        if on_drives is not None:
            scratch = scratch_files(updates.engine, "gradients")
            self.spill = Spill(jobs, scratch, scratch.allocate(on_drives))

    # --- a step --------------------------------------------------------------------

    def begin(self, extra_args: Mapping[str, Any]) -> None:
        updates, files = self.updates, self.updates.engine.files
        finished = files.finished
        if not updates.options.replan:
            check_cuts(updates.engine, self._streams)
        assignment = next_assignment(self._assignment, finished, self._update_s)
        if assignment.interval != "auto":
            self._assignment = assignment
        files.assign(assignment)
        self._step = finished.step
        self._first_s = self.waited_s = 0.0  # when the first gradient came
        updates.pass_runner.begin(extra_args)
        # Gradients of units of which pieces are missing, and the pieces that came.
        self._incomplete: dict[ParamUnit, tuple[Array, set[Piece]]] = {}
        self._refusing: list[str] = []  # leaves that refuse the step
        self.spilled_bytes = 0, 0
        if self.spill is not None:
            self.spill.held.clear()

    def put(self, piece: Piece, gradient: jax.Array) -> None:
        """Takes a complete gradient; blocks while too many wait; raises as `finish`."""
        self._first_s = self._first_s or time.perf_counter()
        passes, leaf = self.updates.passes, piece.leaf
        has_numbers = bool(passes.of_leaf(leaf))
        if leaf in self.updates.idle_leaves and not has_numbers:
            return
        if has_numbers and not self.updates.engine.group.is_alone:
            gradient = gather_shards(gradient)  # for the numbers, in all processes
        stays = self.spill is not None and (0, leaf) in passes.parts
        stays &= leaf not in passes.gathered_leaves
        shards = by_shards(gradient, to_host=self._copies_to_host, keep_on_device=stays)
        begin = self._begin_updates if self.spill is None else self._defer
        self._submit(piece, shards, begin)

    def finish(
        self,
        extra_args: Mapping[str, Any],
        results: PyTree,
        check: Callable[[], None],
        agree: Agree,
    ) -> bool:
        """Waits for all updates and ends the step; returns whether params changed.

        Args:
          extra_args: Those of `begin`, now with the values that are known late.
          results: Loss and aux.
          check: Called where the step can be given up; raises if it must be.

        Raises:
          NonFiniteGradientError: The step was refused.
          BaseException: The exception that stopped the updates.
        """
        updates, nonfinite = self.updates, self.updates.options.nonfinite
        carried: dict[tuple[str, ...], Array] = {}

        def wait_for_gradients() -> list[str]:
            self._jobs.wait_all()
            carried.update(_carried(updates, results))
            return self._refusing

        def is_refused() -> bool:
            return bool(self._refusing) and nonfinite != "allow"

        self._refusing = agree(wait_for_gradients)
        updates.pass_runner.set_arguments(extra_args)
        if self.spill is not None and not is_refused():
            self._refusing = agree(partial(self._update_deferred, self.spill, check))
        if is_refused():
            self.abandon()
            if nonfinite == "error":
                raise nonfinite_error(self._refusing, self._step)
            self._num_skipped += 1
            return False
        assert not self._incomplete, "every piece of a unit has its gradient"
        self._commit(carried)
        if self._assignment.interval == "auto":
            self._update_s.append(time.perf_counter() - self._first_s)
        return True

    def abandon(self) -> None:
        if self.spill is not None:
            self.spill.held.clear()
        self.updates.pass_runner.close()
        self.updates.engine.steps.abandon()

    def close(self) -> None:
        """Frees memory and files; idempotent."""
        self.updates.pass_runner.close()
        if self.spill is not None:
            self.spill.held.clear()
            self.spill.scratch.close()

    # --- the end of a step ---------------------------------------------------------

    def _update_deferred(self, spill: Spill, check: Callable[[], None]) -> list[str]:
        """Runs the other passes; returns leaves that refuse the step.

        Gradients are read into memory that params had before. Writes over an
        uncommitted step are not interrupted.
        """
        self._params.buffers.free_idle()
        runner, num_passes = self.updates.pass_runner, self.updates.passes.num_passes
        for _ in range(2, num_passes):
            runner.advance()
            for piece, gradient in spill.read():
                check()
                runner.add(piece, gradient)
        if num_passes > 1:
            runner.advance()
        check()
        overwrites = self.updates.engine.files.num_uncommitted > 0
        for piece, gradient in spill.read(removes=True):
            self._submit(piece, gradient, self._begin_updates)
            if not overwrites:
                check()
        self._jobs.wait_all()
        return self._refusing

    def _commit(self, carried: Mapping[tuple[str, ...], Array]) -> None:
        """Ends the step; starts the commit of its leaves and scalars, if it is due."""
        engine = self.updates.engine
        last, values = engine.files.finished, self.updates.pass_runner.finish()
        pairs = zip(last.scalar_state, values, strict=True)
        engine.steps.finish(
            self._step,
            [ScalarState.of(scalar.path, value) for scalar, value in pairs],
            last.skipped_steps + self._num_skipped,
            kept=self.updates.idle_leaves,
            carry=carried,
            streams=self._streams,
        )
        self._num_skipped = 0

    # --- on the queue's threads ------------------------------------------------------

    def _submit(self, piece: Piece, gradient: Gradient, begin: BeginWork) -> None:
        item, num_bytes = (piece, gradient), gradient.nbytes
        self.waited_s += self._jobs.submit_item(item, num_bytes, begin, self._queue)

    def _defer(self, batch: Sequence[tuple[Piece, Gradient]]) -> None:
        """Computes what the first pass needs of gradients, and lets them wait."""
        assert self.spill is not None
        updates = self.updates
        # An update that overwrites a step cannot be undone if a later one is refused.
        is_checked = updates.engine.options.rewrites_steps
        for piece, gradient in batch:
            if piece.leaf in updates.passes.gathered_leaves:
                unit = updates.unit_of(piece)
                complete = self._complete(unit, piece, gradient)
                if complete is None:
                    continue
                piece, gradient = Piece(unit.leaf), np.asarray(complete)
            if updates.passes.num_passes > 1:  # else the update computes all
                updates.pass_runner.add(piece, as_one_array(gradient))
            array = np.asarray(gradient)  # it need not stay on the device
            if is_checked and not _is_finite(array):
                self._refusing.append(updates.name(piece.leaf))
            if piece.leaf not in updates.idle_leaves:
                written_bytes = self.spill.put(piece, array)
                in_memory, in_files = self.spilled_bytes
                in_memory += 0 if written_bytes else array.nbytes
                self.spilled_bytes = in_memory, in_files + written_bytes

    def _begin_updates(
        self, batch: Sequence[tuple[Piece, Gradient]]
    ) -> Callable[[], None] | None:
        """Computes the inputs of units that are complete; returns their updates."""
        updates, requests = self.updates, dict[ParamUnit, list[UpdateRequest]]()
        # The CSDs cannot tell whether a compressed gradient was finite.
        is_checked = updates.compress is not None
        is_checked &= updates.options.nonfinite != "allow"
        for piece, gradient in batch:
            unit = updates.unit_of(piece)
            complete = self._complete(unit, piece, gradient)
            if complete is None:
                continue
            if is_checked and not _is_finite(np.asarray(complete)):
                self._refusing.append(updates.name(unit.leaf))
                self._params.end_update(unit)
            else:
                requests[unit] = self._requests(unit, complete)
        return partial(self._update_units, requests) if requests else None

    def _requests(self, unit: ParamUnit, gradient: Gradient) -> list[UpdateRequest]:
        """Returns the requests of a unit's update; blocks while inputs are computed."""
        updates, params = self.updates, self._params.shards_for_update(unit)
        assert params is None or unit.moves_by_shard, "an update takes what it moves"
        arrays = split(gradient, unit.stored_boxes)
        inputs, requests = LeafInputs(()), []
        for number, box in enumerate(unit.stored_boxes):
            place = unit.in_leaf(box)
            array = arrays[number].reshape(place.shape)
            shard = None if params is None else params[number].reshape(place.shape)
            if not number:  # a sharded unit has none but scalars, the same for all
                inputs = updates.pass_runner.kernel_inputs(unit.leaf, array, shard)
            sent, feedback = array, None
            if updates.compress is not None:
                sent, feedback = updates.compress(unit, array, self._step)
            requests.append(
                UpdateRequest(
                    leaf=unit.leaf,
                    kernel=updates.program.leaves[unit.leaf].kernel,
                    origin=place.start,
                    gradient=sent,
                    inputs=inputs,
                    out=None,
                    probe=_NO_PARAMS,
                    params=shard,
                    feedback=feedback,
                )
            )
        return requests

    def _update_units(self, requests: Mapping[ParamUnit, list[UpdateRequest]]) -> None:
        """Updates units beside other updates; blocks."""
        in_order = [*chain.from_iterable(requests.values())]
        are_finite = self.updates.engine.steps.update(self._step, *in_order)
        for unit in requests:
            self._params.end_update(unit)
        for request, is_finite in zip(in_order, are_finite, strict=True):
            if not is_finite:
                self._refusing.append(self.updates.name(request.leaf))

    def _complete(
        self, unit: ParamUnit, piece: Piece, gradient: Gradient
    ) -> Gradient | None:
        """Returns the gradient of a unit; None while some of its pieces are missing."""
        piece = unit.piece_within(piece)
        if not piece.index:
            return gradient
        if unit not in self._incomplete:
            self._incomplete[unit] = np.empty(unit.shape, unit.dtype), set()
        array, arrived = self._incomplete[unit]
        array[piece.index] = np.asarray(gradient)
        arrived.add(piece)
        is_whole = sum(array[x.index].size for x in arrived) == array.size
        return self._incomplete.pop(unit)[0] if is_whole else None


def _is_finite(array: Array) -> bool:
    flat = array.reshape(-1)
    starts = range(0, flat.size, _CHECKED_ELEMENTS)
    return all(np.isfinite(flat[n : n + _CHECKED_ELEMENTS]).all() for n in starts)


def _carried(updates: UpdatePlan, results: PyTree) -> Mapping[tuple[str, ...], Array]:
    """Returns the arrays of a step's aux that are committed with it.

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
