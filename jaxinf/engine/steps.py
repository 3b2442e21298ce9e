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
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from jaxinf.csd import Csd, CsdBuffer
from jaxinf.engine.parts import LeafPart, PartTasks
from jaxinf.engine.session import Session
from jaxinf.engine.tasks import SubgroupLayout, Task
from jaxinf.engine.units import Loads
from jaxinf.errors import StaleStateError, StoreError
from jaxinf.io import ByteCounts
from jaxinf.layout import Subgroup
from jaxinf.store import CommitRecord, ScalarState
from jaxinf.typing import JsonValue

__all__ = ["StepEngine", "StepMetrics"]


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


class _Arrival(NamedTuple):
    """A subgroup that a step has updated, and what it read for that."""

    layout: SubgroupLayout
    loads: Loads


_Arrivals: TypeAlias = dict[Subgroup, _Arrival]


class StepEngine:
    """Runs steps on a session. Thread-safe; a step's parts may come in any order."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._parts = PartTasks(session)
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
            is_exact = part.leaf not in self._inexact
            tasks = [
                self._parts.task(part, layout, step + 1, verdicts, is_exact=is_exact)
                for layout in self._session.layouts(
                    part.leaf, part.origin, part.gradient.shape
                )
            ]
            arrivals = {t.layout.subgroup: _Arrival(t.layout, t.loads) for t in tasks}
            if arrivals.keys() & self._arrivals.keys():
                # The computation failed elsewhere and is run again: what it wrote
                # before must not come after what it writes now.
                self._session.handler.drain()
                self._check_undoable()
            self._arrivals |= arrivals
        with self._session.timeline.span("leaf"):
            self._session.handler.run(tasks)
        given = self._parts.given(part) if is_exact else None
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

    def _prefetch(self, arrivals: _Arrivals) -> None:
        """Loads what the next step will load, in the order in which gradients came."""
        sources = self._session.chunks.sources
        self._session.handler.prefetch(
            [
                Task(
                    arrival.layout,
                    _nothing,
                    loads=sources(arrival.layout, [n for n, _ in arrival.loads]),
                )
                for arrival in arrivals.values()
            ]
        )

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
