"""Applies gradients near storage: each updates its leaf as soon as it arrives.

    runner ─ put ─► queue, bounded in bytes ─► thread: kernel near storage
                                                       all done ─► finish: one commit

Invariant: the store advances by one step if every gradient arrived and was finite;
  otherwise it does not advance. A unit that the store moves as a whole is updated as a
  whole.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from threading import Lock
from typing import Any, TypeAlias

import jax
import numpy as np

from jaxinf.csd import ScalarInputs
from jaxinf.engine import (
    Assignment,
    Engine,
    KeptLeaf,
    UpdateRequest,
    carried_leaves,
    check_carried,
)
from jaxinf.errors import StreamError
from jaxinf.program import refused_gradient
from jaxinf.store import ScalarState
from jaxinf.streaming.move.params import Params
from jaxinf.streaming.move.scratch import THREADS_PER_DRIVE, Scratch, Spill
from jaxinf.streaming.move.work_queues import WorkQueues
from jaxinf.streaming.plan.calls import Plan
from jaxinf.streaming.plan.kept import check_same, streams_of
from jaxinf.streaming.program.graph import Piece
from jaxinf.streaming.program.lifetimes import OrderedProgram
from jaxinf.streaming.program.meshes import on_this_process
from jaxinf.streaming.program.units import (
    Gradient,
    Unit,
    gathered,
    handed_out,
    shards_of,
    whole,
)
from jaxinf.streaming.update.device_updates import (
    NUM_MEASURED,
    NUM_UNDER_WAY,
    every_kth,
    next_interval,
)
from jaxinf.streaming.update.near_storage import NearStorageUpdates
from jaxinf.typing import Array, PyTree

_LOG = logging.getLogger("jaxinf")

Agree: TypeAlias = Callable[[Callable[[], Sequence[str]]], list[str]]
"""Runs an action in all processes; returns the leaves that refuse the step in any."""

# Gradients up to this long share a call of the engine, if several wait.
_SHORT_BYTES = 1 << 20
# Elements whose finiteness is looked at together: it takes memory.
_RUN_ELEMENTS = 1 << 18
_NO_PARAMS = np.empty(0, np.float32)


def store_scratch(engine: Engine, content: str = "activations") -> Scratch:
    """Returns files on the store's drives, for what waits there in a step."""
    opened = engine.opened
    num_threads = 1 if content == "gradients" else THREADS_PER_DRIVE
    directory, folders = opened.directory, [opened.directory.path]
    if directory.manifest.csds:
        folders = [*map(directory.csd_directory, range(directory.num_csds))]
    how = {"content": content, "num_threads": num_threads}
    return Scratch(folders, opened.meters, **how)


class StoreSink:
    """Takes the gradients of a plan's steps, and updates the store.

    Gradients are deferred if the optimizer needs numbers of all of them, such as their
    norm, or if a step overwrites one that is not committed. Updates then start when all
    have arrived, and with them all reads of params are over.

    Attributes:
      spill: Holds gradients until the last one arrives; None if none waits.
      waited_s: Time that gradients of the last step waited for room.
    """

    def __init__(
        self, updates: NearStorageUpdates, plan: Plan, ready: OrderedProgram
    ) -> None:
        self.updates, self.engine, self.inputs = updates, updates.engine, updates.inputs
        self.share, self.spill, self.waited_s = updates.share, None, 0.0
        self._nonfinite = updates.options.nonfinite
        self._streams = streams_of(ready, plan.cuts)
        self._num_skipped = 0  # since the last commit
        self._update_s: list[float] = []  # of the steps by which k is measured
        self._carried: Mapping[tuple[str, ...], Array] = {}
        memory, waits = plan.memory, updates.waiting(plan)
        self._copies = memory.staged > 0  # from a device with memory of its own
        kept_bytes = 0 if waits is None else waits.capacity_bytes
        room_bytes = min(memory.gradients - kept_bytes, memory.leaving)
        self._num_threads = 1
        if self.share.updater is not None:
            self._num_threads = NUM_UNDER_WAY
            room_bytes += (NUM_UNDER_WAY - 1) * updates.largest_bytes
        self._jobs, self._in_order = WorkQueues("jaxinf-updates"), Lock()
        self._waiting: deque[tuple[Piece, Gradient]] = deque()
        self._room_bytes, self._held_bytes = max(1, room_bytes), 0
        if waits is not None:
            self.spill = Spill(store_scratch(self.engine, "gradients"), waits)

    # --- a step --------------------------------------------------------------------

    def begin(self, extra_args: Mapping[str, Any], params: Params) -> None:
        """Gets ready for a step.

        Args:
          params: The source of the step's params, which updates may take.
        """
        opened, options = self.engine.opened, self.updates.options
        if not options.replan:
            check_same(self.engine.options.path, opened.finished, self._streams)
        self._params, self._step = params, opened.finished.step
        opened.assign(self._assignment())
        self._first_s = self.waited_s = 0.0  # when the first gradient came
        self.inputs.begin(extra_args)
        # Units of which parts are missing, and the parts that are there.
        self._parts: dict[Unit, tuple[Array, set[Piece]]] = {}
        self._bad: list[str] = []
        self._kept = set[Unit]()
        self._action = self._update
        if self.spill is not None:
            self.spill.reset()
            self._action = self._defer

    def put(self, piece: Piece, gradient: jax.Array | Array) -> None:
        """Takes a complete gradient; blocks while too many wait.

        Raises:
          BaseException: The exception that stopped the updates.
        """
        self._first_s = self._first_s or time.perf_counter()
        updates, leaf = self.updates, piece.leaf
        is_looked_at = bool(updates.passes.of_leaf(leaf))
        if leaf in updates.idle:
            self._kept.add(updates.unit_of(piece))
            if not is_looked_at:
                return
        if is_looked_at and not self.engine.group.is_alone:  # whole, in all
            gradient = gathered(gradient)
        looks_first = updates.passes.part(0, leaf) and leaf not in updates.passes.whole
        stays = self.spill is not None and bool(looks_first)
        own = handed_out(gradient, copies=self._copies, stays=stays)
        self._hand_on(piece, own)

    def finish(
        self,
        extra_args: Mapping[str, Any],
        results: PyTree,
        check: Callable[[], None],
        agree: Agree,
    ) -> bool:
        """Waits for all updates and ends the step; returns whether params changed.

        Args:
          extra_args: As for `begin`, now with those that are known late.
          results: Loss and aux.
          check: Called where the step can be given up; raises if it must be.

        Raises:
          NonFiniteGradientError: The step was refused.
          BaseException: The exception that stopped the updates.
        """
        self._bad = agree(partial(self._ended, results))
        self.inputs.give(extra_args)
        if self.spill is not None and not self._is_refused:
            self._bad = agree(partial(self._update_deferred, self.spill, check))
        if self._is_refused:
            self.inputs.close()
            self.engine.opened.abandon()
            if self._nonfinite == "skip":
                self._num_skipped += 1
                return False
            raise refused_gradient(self._bad, self._step)
        assert not self._parts, "every part of a unit has its gradient"
        kept = [  # leaves that stay as they are
            KeptLeaf(unit.leaf, unit.origin_of(box), unit.extent_of(box))
            for unit in sorted(self._kept, key=lambda unit: (unit.leaf, unit.index))
            for box in unit.boxes
        ]
        opened = self.engine.opened
        if kept:
            opened.update(self._step, *kept)
        held = zip(opened.finished.scalar_state, self.inputs.finish(), strict=True)
        scalars = [ScalarState.of(old.path, new) for old, new in held]
        num_skipped = opened.finished.skipped_steps + self._num_skipped
        kept = {"carry": self._carried, "streams": self._streams}
        opened.finish(self._step, scalars, num_skipped, **kept)
        self._num_skipped = 0
        if self.share.every == "auto":
            self._update_s.append(time.perf_counter() - self._first_s)
        return True

    def abandon(self) -> None:
        """Gives the step up, without a commit."""
        self._drop_waiting()
        if self.spill is not None:
            self.spill.reset()
        self.inputs.close()
        self.engine.opened.abandon()

    @property
    def spilled_bytes(self) -> tuple[int, int]:
        """Bytes of the last step's gradients that waited in memory and in files."""
        spill = self.spill
        return (0, 0) if spill is None else (spill.kept_bytes, spill.written_bytes)

    def close(self) -> None:
        """Frees the files of gradients that wait, and ends the threads; idempotent."""
        self._drop_waiting()
        self._jobs.close()
        self.inputs.close()
        if self.spill is not None:
            self.spill.close()

    def _assignment(self) -> Assignment:
        """Returns what the device computes in the next step; chooses k at its time."""
        share, last = self.share, self.engine.opened.finished
        if share.every != "auto" or share.updater is None:
            return share
        every = last.device_updates
        if not last.step or every == "auto":  # not chosen by batches of another shape
            every = next_interval(self._update_s, len(share.subgroups))
            if len(self._update_s) < NUM_MEASURED:
                return replace(every_kth(share, every), every="auto")
            _LOG.warning("device_updates=%d, as measured in the first steps", every)
        self.share = every_kth(share, every)
        return self.share

    # --- the end of a step ---------------------------------------------------------

    @property
    def _is_refused(self) -> bool:
        return bool(self._bad) and self._nonfinite != "allow"

    def _ended(self, results: PyTree) -> list[str]:
        """Ends what the arriving gradients have started; returns leaves that refuse."""
        self._jobs.end()
        if (carry := self.updates.options.carry) is not None:
            carried = carried_leaves(carry(results[1]))
            names = self.engine.opened.directory.manifest.state_names
            check_carried(self.engine, carried, names)
            self._carried = {path: _on_host(x) for path, x in carried.items()}
        return self._bad

    def _update_deferred(self, spill: Spill, check: Callable[[], None]) -> list[str]:
        """Runs the other passes; returns leaves that refuse the step.

        What gradients are read into had the params before. Writes over an uncommitted
        step are not interrupted.
        """
        self._params.free_idle()
        num_passes = self.updates.passes.num_passes
        for _ in range(2, num_passes):
            self.inputs.advance()
            for piece, gradient in spill.read():
                check()
                self.inputs.add(piece, gradient)
        if num_passes > 1:
            self.inputs.advance()
        check()
        overwrites = self.engine.opened.num_uncommitted > 0
        self._action = self._update
        for piece, gradient in spill.read(removes=True):
            self._hand_on(piece, gradient)
            if not overwrites:
                check()
        self._jobs.end()
        return self._bad

    # --- gradients on their way to an action, which works on them on threads ---------

    def _hand_on(self, piece: Piece, gradient: Gradient) -> None:
        """Passes a gradient on, in order; blocks while too many wait.

        One is always accepted.
        """
        most = self._room_bytes - min(gradient.nbytes, self._room_bytes)
        self.waited_s += self._jobs.wait_for(lambda: self._held_bytes <= most)
        with self._jobs.changed:
            self._waiting.append((piece, gradient))
            self._held_bytes += gradient.nbytes
            self._jobs.submit(self._pass_on, num_threads=self._num_threads)

    def _drop_waiting(self) -> None:
        self._jobs.reset()
        self._waiting.clear()
        self._held_bytes = 0

    def _pass_on(self) -> None:
        """Works on the next gradients, unless another job took them; on a thread."""
        with self._in_order:
            taken = self._next() if self._jobs.error is None else []
            num_bytes = sum(gradient.nbytes for _, gradient in taken)
            work = self._action(taken) if taken else None
            del taken
        if work is not None:  # it may run beside that of other gradients
            work()
            del work
        with self._jobs.changed:
            self._held_bytes -= num_bytes

    def _next(self) -> list[tuple[Piece, Gradient]]:
        """Takes a gradient, or several short ones."""
        taken = [self._waiting.popleft()] if self._waiting else []
        while taken and self._waiting and taken[-1][1].nbytes <= _SHORT_BYTES:
            if self._waiting[0][1].nbytes > _SHORT_BYTES:
                break
            taken.append(self._waiting.popleft())
        return taken

    def _defer(self, taken: Sequence[tuple[Piece, Gradient]]) -> None:
        assert self.spill is not None
        updates = self.updates
        # An update that overwrites a step cannot be undone if a later one is refused.
        is_checked = self.engine.options.rewrites_steps
        for piece, handed in taken:
            if piece.leaf in updates.passes.whole:
                unit = updates.unit_of(piece)
                complete = self._complete(unit, piece, handed)
                if complete is None:
                    continue
                piece, handed = Piece(unit.leaf), np.asarray(complete)
            if updates.passes.num_passes > 1:  # else the update computes all
                self.inputs.add(piece, whole(handed))
            array = np.asarray(handed)  # it need not stay on the device
            if is_checked and not _is_finite(array):
                self._bad.append(self._name(piece.leaf))
            if piece.leaf not in updates.idle:
                self.spill.put(piece, array)

    def _update(
        self, taken: Sequence[tuple[Piece, Gradient]]
    ) -> Callable[[], None] | None:
        asked: dict[Unit, list[UpdateRequest]] = {}
        # The CSDs cannot tell whether a compressed gradient was finite.
        is_checked = self.updates.compress is not None and self._nonfinite != "allow"
        for piece, gradient in taken:
            unit = self.updates.unit_of(piece)
            complete = self._complete(unit, piece, gradient)
            if complete is None:
                continue
            if is_checked and not _is_finite(np.asarray(complete)):
                self._bad.append(self._name(unit.leaf))
                self._params.free(unit)
            else:
                asked[unit] = self._requests(unit, complete)
        return partial(self._run, asked) if asked else None

    def _run(self, asked: Mapping[Unit, Sequence[UpdateRequest]]) -> None:
        requests = [request for own in asked.values() for request in own]
        finite = self.engine.opened.update(self._step, *requests)
        for unit in asked:
            self._params.free(unit)
        pairs = zip(requests, finite, strict=True)
        self._bad += [self._name(one.leaf) for one, is_finite in pairs if not is_finite]

    def _complete(
        self, unit: Unit, piece: Piece, gradient: Gradient
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

    def _requests(self, unit: Unit, gradient: Gradient) -> list[UpdateRequest]:
        """Returns what a unit's update asks for; blocks while inputs are computed."""
        params = self._params.take(unit)
        assert params is None or unit.is_divided, "the update takes parts that it moves"
        parts = shards_of(gradient, unit.boxes)
        inputs, requests = ScalarInputs(()), []
        for number, (box, part) in enumerate(zip(unit.boxes, parts, strict=True)):
            part = part.reshape(unit.extent_of(box))
            given = None if params is None else params[number]
            if not number:  # a unit in parts has none but scalars, the same for all
                inputs = self.inputs.of_leaf(unit.leaf, part, given)
            sent, feedback = part, None
            if self.updates.compress is not None:
                sent, feedback = self.updates.compress(unit, part, self._step)
            requests.append(
                UpdateRequest(
                    leaf=unit.leaf,
                    kernel=self.updates.program.leaves[unit.leaf].kernel,
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

    def _name(self, leaf: int) -> str:
        return self.updates.program.leaves[leaf].info.name


def _is_finite(array: Array) -> bool:
    """Whether an array has neither NaN nor Inf; takes little memory."""
    flat = array.reshape(-1)
    starts = range(0, flat.size, _RUN_ELEMENTS)
    return all(np.isfinite(flat[n : n + _RUN_ELEMENTS]).all() for n in starts)


def _on_host(array: jax.Array | Array) -> Array:
    """Returns an array of which this process has the whole; raises StreamError."""
    if isinstance(array, jax.Array) and not array.is_fully_addressable:
        if not array.is_fully_replicated:
            raise StreamError(
                "carry: expected arrays that every process has whole, found one that "
                "is sharded over them; replicate it"
            )
        array = on_this_process(array)
    return np.asarray(array)
