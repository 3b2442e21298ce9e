"""A step: every leaf updated into the spare slot, then one commit.

      update(leaf 0) … update(leaf n) ──► finish ──► [drain, sync, publish] ──► prefetch
       blocks until the leaf's result is there        in the background

Invariant: the committed slot is only read; a step becomes visible as a whole or not at
all, and no write of the next step starts before this one's commit has returned. Steps
between two commits rewrite the other slot in place.
"""

import contextlib
import json
import logging
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from jaxinf.compress import SparseLeaf
from jaxinf.csd import Csd, CsdBuffer, ScalarInputs
from jaxinf.engine.session import Session
from jaxinf.engine.state import (
    compare_chunk,
    diverged_error,
    gather_gradient,
    gather_inputs,
    gather_run,
    rounding_of,
    same_values,
)
from jaxinf.engine.tasks import SubgroupLayout, Task
from jaxinf.errors import StaleStateError, StoreError
from jaxinf.io import ByteCounts
from jaxinf.kernels import Kernel
from jaxinf.kernels.specialise import specialise, state_read
from jaxinf.layout import Subgroup, scatter, target_view
from jaxinf.store import ERROR_FEEDBACK, CommitRecord, ScalarState, Slot, dtype_of
from jaxinf.typing import Array, JsonValue

__all__ = ["LeafPart", "StepEngine", "StepMetrics"]


_LOG = logging.getLogger("jaxinf")

_NUM_METRICS_KEPT = 8


@dataclass(frozen=True)
class StepMetrics:
    """What a committed step cost.

    Attributes:
      step: its number.
      update_s: from the first gradient's arrival to the last result.
      commit_s: from then until the step was durable.
      traffic: bytes on drives and host link since the step before.
    """

    step: int
    update_s: float
    commit_s: float
    traffic: ByteCounts


@dataclass(frozen=True)
class LeafPart:
    """What one call brings for an update: a leaf, or a JAX device's shard of it.

    Attributes:
      leaf: its number.
      kernel: the update.
      origin: index in the leaf of the arrays' first element.
      gradient: 16 or 32 bits, or what a compression sends of it; only read.
      inputs: scalars, and arrays of the gradient's shape.
      out: of the gradient's shape; float32 receives the update, 16 bits the new params,
        rounded to nearest even, or as the store rounds them (docs/format.md, "Codecs").
      probe: the first few params on the JAX device, or empty: compared with the master.
      params: params on the JAX device, of the gradient's shape. Where they are what
        the store has as `params` to the bit, they are taken instead of reading those.
        None where they are not at hand.
      wants_params: float32 `out` receives the new params, not the update.
      feedback: float32 of the gradient's shape, the error feedback after this step;
        None where it stays as it is.
    """

    leaf: int
    kernel: Kernel
    origin: tuple[int, ...]
    gradient: Array | SparseLeaf
    inputs: ScalarInputs
    out: Array
    probe: Array
    params: Array | None = None
    wants_params: bool = False
    feedback: Array | None = None

    @property
    def link_bytes(self) -> int:
        """Bytes that the gradient takes on the link, error feedback included."""
        feedback = 0 if self.feedback is None else self.feedback.nbytes
        return self.gradient.nbytes + feedback


@dataclass(frozen=True)
class _Arrival:
    """A subgroup that a step has updated, and the states that it read for that."""

    layout: SubgroupLayout
    loads: frozenset[int]


_Arrivals: TypeAlias = dict[Subgroup, _Arrival]


class StepEngine:
    """Runs steps on a session. Thread-safe; a step's parts may come in any order."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._guard = threading.RLock()
        self._commit_thread: threading.Thread | None = None
        self._is_open = False
        self._started_s = 0.0
        self._arrivals: _Arrivals = {}
        self._inexact: frozenset[int] = frozenset()
        self._payload_guard = threading.Lock()
        self._payloads: dict[int, JsonValue] = {}
        self._last_taken = -1
        self._metrics: deque[StepMetrics] = deque(maxlen=_NUM_METRICS_KEPT)
        self._counted = session.meters.snapshot()
        session.on_close(self._close)

    # --- a step --------------------------------------------------------------------

    def update(self, step: int, part: LeafPart) -> bool:
        """Updates a leaf or a shard; blocks until `part.out` holds the result.

        Args:
          step: the step that the caller's state is of.
          part: what to update with.

        Returns:
          Whether the gradient is finite.

        Raises:
          StaleStateError: the caller's state is not of the store's step.
          DivergedParamsError: the caller's params are not the store's.
          StoreError: the drive failed.
        """
        verdicts: list[bool] = []
        with self._guard:
            self._begin(step)
            tasks = [
                self._task(part, layout, verdicts)
                for layout in self._session.layouts(
                    part.leaf, part.origin, part.gradient.shape
                )
            ]
            arrivals = {
                t.layout.subgroup: _Arrival(t.layout, frozenset(n for n, _ in t.loads))
                for t in tasks
            }
            if arrivals.keys() & self._arrivals.keys():
                # The computation failed elsewhere and is run again: what it wrote
                # before must not come after what it writes now.
                self._session.handler.drain()
                self._check_undoable()
            self._arrivals |= arrivals
        with self._session.timeline.span("leaf"):
            self._session.handler.run(tasks)
        given = self._given(part)
        down_bytes = part.link_bytes + (0 if given is None else given.nbytes)
        self._session.meters.add(
            link_down_bytes=down_bytes, link_up_bytes=part.out.nbytes
        )
        return all(verdicts)

    def finish(
        self,
        step: int,
        scalars: Sequence[ScalarState],
        skipped_steps: int,
        inexact: Iterable[int] = (),
    ) -> None:
        """Ends the step after `step`, in the background; all leaves are updated.

        It is committed where the store's durability says so, else kept for the next
        commit.

        Args:
          step: the step that the caller's state is of.
          scalars: the optimizer's new scalar state.
          skipped_steps: so far.
          inexact: leaves of which the caller's 16-bit params are not to the bit what
            `LeafPart.out` received; the next step takes none of theirs.
        """
        with self._guard:
            self._begin(step)
            step += 1
            record = CommitRecord(
                step=step,
                scalar_state=tuple(scalars),
                skipped_steps=skipped_steps,
                payload=self._take_payload(step),
            )
            self._check_complete()
            self._inexact = frozenset(inexact)
            self._commit_thread = threading.Thread(
                target=self._end_step,
                args=(record, self._arrivals, time.monotonic()),
                name="jaxinf-commit",
                daemon=True,
            )
            self._arrivals, self._is_open = {}, False
            try:
                self._commit_thread.start()
            except RuntimeError as error:  # the process has all it may have
                _LOG.warning(
                    "%s: no thread to commit step %s in the background (%s); it is "
                    "committed at once, and JAX waits. Raise the limit (ulimit -u)",
                    self._session.options.path,
                    step,
                    error,
                )
                thread, self._commit_thread = self._commit_thread, None
                thread.run()

    def abandon(self) -> None:
        """Gives the step up: nothing of it is committed; it may start over."""
        with self._guard:
            if self._is_open:
                self._session.handler.drain()
                self._check_undoable()
                self._session.chunks.forget_step()
                self._prefetch(self._arrivals)
                self._arrivals, self._is_open = {}, False

    def wait(self) -> None:
        """Blocks until every finished step is durable, and makes it so.

        Raises:
          StoreError: a step is under way that overwrites one that is not committed.
          BaseException: what stopped the store.
        """
        with self._guard:
            self.join()
            if not self._session.num_uncommitted:
                return
            if self._arrivals:
                raise StoreError(
                    f"{self._session.options.path}: step {self._next_step} is under "
                    "way, and the steps before it are not committed (the store's "
                    "durability is not every step); wait for its state first: "
                    "store.wait(state)"
                )
            self._publish()

    def join(self) -> None:
        """Blocks until the last step has ended, and its commit if it has one.

        Raises:
          BaseException: what stopped the store.
        """
        self._session.check()
        with self._guard:
            self._join_commit()
        self._session.check()

    @property
    def is_open(self) -> bool:
        """Whether a step has begun and not finished."""
        return self._is_open

    @property
    def metrics(self) -> StepMetrics | None:
        """The last committed step's."""
        return self._metrics[-1] if self._metrics else None

    def metrics_of(self, step: int) -> StepMetrics | None:
        """A step's, after its commit; None if not one of the last few of this process.

        Blocks for a commit in flight only where that is the step's.
        """
        with self._guard:
            last = self.metrics
            if self._commit_thread is not None and (last is None or last.step < step):
                self.join()
            # A copy: a later step's commit may append beside this.
            return next((m for m in tuple(self._metrics) if m.step == step), None)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """No step begins and none commits while the context lasts."""
        with self._guard:
            self.wait()
            yield

    def annotate(self, step: int, payload: JsonValue) -> None:
        """Sets what the commit of a step to come will carry.

        Raises:
          ValueError: the step is committed already, or the payload holds NaN or Inf.
          TypeError: the payload is no JSON.
        """
        payload = json.loads(json.dumps(payload, allow_nan=False))
        with self._payload_guard:
            finished = self._session.finished
            last = max(self._last_taken, finished.step if finished else -1)
            if step <= last:
                raise ValueError(
                    f"{self._session.options.path}: annotate(step={step}): expected a "
                    f"step still to be committed, the store is at step {last}; "
                    "annotate before the update"
                )
            self._payloads[step] = payload

    def _take_payload(self, step: int) -> JsonValue:
        with self._payload_guard:
            self._last_taken = step
            payload = self._payloads.pop(step, None)
            self._payloads = {s: p for s, p in self._payloads.items() if s > step}
        return payload

    # --- inside --------------------------------------------------------------------

    def _begin(self, step: int) -> None:
        """Opens the step unless it is."""
        session = self._session
        session.check()
        with self._guard:
            if not self._is_open:
                self.join()
            else:
                session.check()
            assert session.finished is not None
            if step != session.finished.step:
                raise StaleStateError(
                    f"{session.options.path}: the optimizer state given to update is "
                    f"of step {step}, the store is at step {session.finished.step}; "
                    "initialise the state from the store (state = tx.init(store.params("
                    "like=params))), or open the checkpoint of that step"
                )
            if not self._is_open:
                if not session.num_uncommitted:
                    session.files.unpublish(session.chunks.target)
                if not self._metrics:  # initialising and comparing are no step's
                    self._counted = session.meters.snapshot()
                self._is_open, self._started_s = True, time.monotonic()

    def _check_undoable(self) -> None:
        """Stops the store where chunks were overwritten that no commit holds.

        Raises:
          StoreError: says how many steps are lost.
        """
        session = self._session
        if session.num_uncommitted and self._arrivals:
            error = StoreError(
                f"{session.options.path}: step {self._next_step} was given up after "
                "part of it was written over the step before, which is not committed "
                "(the store's durability is not every step)"
            )
            session.fail(error)
            raise error

    @property
    def _next_step(self) -> int:
        finished = self._session.finished
        assert finished is not None
        return finished.step + 1

    def _task(
        self, part: LeafPart, layout: SubgroupLayout, verdicts: list[bool]
    ) -> Task:
        session = self._session
        kernel = specialise(part.kernel, part.inputs.scalars)
        chunk = session.files.chunks[part.leaf][layout.subgroup.chunk]
        offset = layout.subgroup.offset_elements
        is_first = offset == 0 and chunk.start == part.origin
        is_probed = is_first and part.probe.size and part.leaf not in self._inexact

        rounding = rounding_of(layout, self._next_step)
        states = range(len(layout.states))
        needed = state_read(kernel)
        unchanged = kernel.unchanged
        if part.feedback is None:
            unchanged |= {ERROR_FEEDBACK}
        loads = frozenset(n for n in states if layout.slots[n] in needed)
        if part.out.dtype != np.float32:  # which comes of the params, moved or not
            loads |= {0}
        # Over a step that is not committed a chunk's parts are overwritten one by one:
        # when the whole could be compared, it is not there any more.
        is_part = layout.subgroup.num_elements < chunk.num_elements
        is_overwritten = is_part and session.num_uncommitted > 0
        given = self._given(part) if 0 in loads and not is_overwritten else None
        if given is not None:
            loads -= {0}

        def compute(csd: Csd, buffer: CsdBuffer) -> Mapping[int, int]:
            params = None
            if given is not None:
                params = gather_run(session, layout, given, part.origin)
            elif is_probed and 0 in loads:
                master = csd.view(buffer, layout.extents[0])
                self._check_probe(part, layout, master, is_whole=not is_overwritten)
            gradient = gather_gradient(session, layout, part.gradient, part.origin)
            own = gather_inputs(session, layout, part.inputs, part.origin)
            num = layout.subgroup.num_elements
            out = target_view(part.out, chunk, part.origin, offset, num)
            result = np.empty(num, part.out.dtype) if out is None else out
            outcome = csd.update(
                buffer,
                layout.kernel_extents,
                kernel,
                gradient,
                own,
                result,
                rounding,
                given=params,
                wants_params=part.wants_params,
            )
            read_checksums = dict(outcome.read_checksums)
            if given is not None:
                self._check_given(part, layout, read_checksums.pop(0))
            verdicts.append(outcome.is_finite)
            if part.feedback is not None:
                assert layout.feedback is not None
                left = gather_run(session, layout, part.feedback, part.origin)
                csd.view(buffer, layout.extents[layout.feedback])[...] = left
            if out is None:
                scatter(part.out, chunk, part.origin, offset, result)
            return read_checksums

        return Task(
            layout,
            compute,
            loads=self._sources(layout, loads),
            stores=tuple(n for n in states if layout.slots[n] not in unchanged),
            runs_kernel=True,
        )

    def _given(self, part: LeafPart) -> Array | None:
        """The caller's params, where they are what the store has, and are wanted."""
        session = self._session
        stored = session.files.manifest.leaves[part.leaf].states[0]
        is_wanted = session.options.csd.takes_params and part.leaf not in self._inexact
        if part.params is None or not is_wanted:
            return None
        return part.params if part.params.dtype == dtype_of(stored.dtype) else None

    def _sources(
        self, layout: SubgroupLayout, states: Iterable[int]
    ) -> tuple[tuple[int, Slot], ...]:
        source = self._session.chunks.source
        slots: list[tuple[int, Slot]] = [(n, source(layout, n)) for n in sorted(states)]
        return tuple(slots)

    def _prefetch(self, arrivals: _Arrivals) -> None:
        """Loads what the next step will load, in the order in which gradients came."""
        self._session.handler.prefetch(
            [
                Task(a.layout, _nothing, loads=self._sources(a.layout, a.loads))
                for a in arrivals.values()
            ]
        )

    def _check_probe(
        self, part: LeafPart, layout: SubgroupLayout, master: Array, *, is_whole: bool
    ) -> None:
        held = master[: part.probe.size].astype(part.probe.dtype)
        if not same_values(held, part.probe):
            if is_whole:
                self._session.chunks.check_file(layout, 0)  # or the drive is to blame
            name = self._session.files.manifest.leaves[part.leaf].name
            raise diverged_error(name, part.probe[:3], held[:3])

    def _check_given(
        self, part: LeafPart, layout: SubgroupLayout, checksum: int
    ) -> None:
        """The params that were given must be what the last step left in the store.

        Their checksum comes of the update's own pass; nothing of that is stored yet.
        """
        if not self._session.chunks.matches(layout, 0, checksum):
            assert part.params is not None
            compare_chunk(self._session, layout, part.params, part.origin)

    def _check_complete(self) -> None:
        session = self._session
        done = sum(subgroup.num_elements for subgroup in self._arrivals)
        expected = session.files.manifest.num_params
        if done != expected:
            raise AssertionError(
                f"{session.options.path}: the step updated {done} of {expected} params"
            )

    def _end_step(
        self, record: CommitRecord, arrivals: _Arrivals, updated_s: float
    ) -> None:
        session = self._session
        try:
            with session.timeline.span("drain"):
                session.handler.drain()
            session.chunks.end_step()
            session.finished = record
            every = session.options.steps_per_commit
            if every is not None and session.num_uncommitted >= every:
                session.publish()
            traffic = session.meters.snapshot()
            self._metrics.append(
                StepMetrics(
                    step=record.step,
                    update_s=updated_s - self._started_s,
                    commit_s=time.monotonic() - updated_s,
                    traffic=traffic - self._counted,
                )
            )
            self._counted = traffic
            if not session.is_closed:
                self._prefetch(arrivals)
        except BaseException as error:
            session.fail(error)

    def _publish(self) -> None:
        try:
            self._session.publish()
            if self._is_open:
                self._session.files.unpublish(self._session.chunks.target)
        except BaseException as error:
            self._session.fail(error)
            raise

    def _close(self) -> None:
        session = self._session
        with self._guard:
            self._join_commit()
            if session.failure is not None or not session.num_uncommitted:
                return
            if self._arrivals:
                _LOG.warning(
                    "step %s is incomplete. %s", self._next_step, session.loss_note()
                )
            else:
                self._publish()

    def _join_commit(self) -> None:
        """Forgets the thread only when it has ended: an interrupt may end the wait."""
        if self._commit_thread is not None:
            self._commit_thread.join()
            self._commit_thread = None


def _nothing(csd: Csd, buffer: CsdBuffer) -> None:
    """A prefetch computes nothing."""
    del csd, buffer
