"""A step: every leaf updated into the spare slot, then one commit.

      update(leaf 0) … update(leaf n) ──► finish ──► [drain, sync, publish] ──► prefetch
       blocks until the leaf's result is there        in the background

Invariant: the committed slot is only read; a step becomes visible as a whole or not at
all, and no write of the next step starts before this one's commit has returned. Steps
between two commits rewrite the other slot in place.
"""

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple, TypeAlias

from jaxinf.engine.divergence import stale_state
from jaxinf.engine.opened import OpenStore
from jaxinf.engine.retention import remove_surplus
from jaxinf.engine.subgroup_layout import SubgroupLayout
from jaxinf.engine.update_request import KeptLeaf, SlotRequest, UpdateRequest
from jaxinf.engine.update_tasks import (
    compute_nothing,
    kept_tasks,
    nan_scalar_error,
    nan_scalars,
    recall_tasks,
    request_tasks,
)
from jaxinf.errors import StoreError
from jaxinf.interrupts import Ending
from jaxinf.layout import Subgroup
from jaxinf.store import CarriedArray, CommitRecord, ScalarState, save_checkpoint
from jaxinf.transfer import ByteCounts, Loads, Task, span, timeline
from jaxinf.typing import Array

_LOG = logging.getLogger("jaxinf")

LAST_STEP = 2**31 - 1
"""The last step that a state's int32 counts."""

_NUM_METRICS_KEPT = 8


@dataclass(frozen=True)
class StepMetrics:
    """The cost of a committed step.

    Attributes:
      step: its number.
      update_s: time from the first gradient's arrival to the last result.
      commit_s: time from then until the step was durable, or written.
      traffic: bytes on drives and host link since the previous step.
      is_committed: whether it was committed when it ended.
      hit_share: share of the updated state that was in memory when it was needed.
    """

    step: int
    update_s: float
    commit_s: float
    traffic: ByteCounts
    is_committed: bool = True
    hit_share: float = 0.0


class _Arrival(NamedTuple):
    """A subgroup that a step has updated, with the states that it has read."""

    layout: SubgroupLayout
    loads: Loads
    runs_kernel: bool
    is_moved: bool


_Arrivals: TypeAlias = dict[Subgroup, _Arrival]


@dataclass
class _Step:
    """A step under way.

    Attributes:
      arrivals: the subgroups that it has updated, in order.
      nan_scalars: scalars that are NaN and that it computed with.
      is_finite: whether every gradient so far is.
      kept: leaves that it leaves as they are.
      repeats: whether it has read slots before its updates, and the next one will.
    """

    started_s: float
    arrivals: _Arrivals = field(default_factory=dict)
    nan_scalars: tuple[str, ...] = ()
    is_finite: bool = True
    kept: set[int] = field(default_factory=set)
    repeats: bool = False


class StepEngine:
    """Runs the steps of a store. Thread-safe; a step's parts may come in any order."""

    def __init__(self, opened: OpenStore) -> None:
        self.opened = self._opened = opened
        self._guard = threading.RLock()
        self._ending: Ending | None = None  # of the last step's commit
        self._step: _Step | None = None
        self._metrics: deque[StepMetrics] = deque(maxlen=_NUM_METRICS_KEPT)
        self._counted = opened.meters.snapshot()

    # --- a step --------------------------------------------------------------------

    def update(self, step: int, *requests: UpdateRequest | KeptLeaf) -> list[bool]:
        """Updates leaves or shards; blocks until every `out` has its result.

        Args:
          step: the step of the caller's state.
          requests: the updates; short ones take less time together.

        Returns:
          For each request, whether the gradient is finite, if there is one.

        Raises:
          StaleStateError: the caller's state is not of the store's step.
          DivergedParamsError: the caller's params are not the store's.
          NonFiniteScalarError: a kernel would compute with NaN, and the step overwrites
            one that is not committed; else `finish` raises it.
          StoreError: the drive failed.
        """
        updates = [one for one in requests if isinstance(one, UpdateRequest)]
        bad = nan_scalars(self._opened, updates)
        with self._guard:
            under_way = self._begin(step)
            if bad and self._opened.num_uncommitted and not under_way.arrivals:
                self.wait()  # otherwise the overwritten steps would be lost
                raise nan_scalar_error(self._opened, step + 1, bad, ())
            inexact = self._opened.finished.inexact
            kept = {one.leaf for one in requests if isinstance(one, KeptLeaf)}
            under_way.kept |= kept
            found = [
                kept_tasks(self._opened, request)
                if isinstance(request, KeptLeaf)
                else request_tasks(
                    self._opened,
                    request,
                    step + 1,
                    inexact=inexact.get(self._name(request.leaf)),
                )
                for request in requests
            ]
            tasks = [task for one in found for task in one.tasks]
            arrivals = {
                t.piece.subgroup: _Arrival(
                    t.piece, t.loads, t.runs_kernel, bool(t.loads or t.stores)
                )
                for t in tasks
            }
            if arrivals.keys() & under_way.arrivals.keys():
                # The computation failed elsewhere and is run again. Its earlier writes
                # must not come after the new ones.
                self._opened.mover.drain()
                _check_undoable(self._opened, under_way.arrivals)
            under_way.arrivals |= arrivals
            under_way.nan_scalars += bad
        with span("leaf", self._shown(requests)):
            self._opened.mover.run(tasks)
        self._opened.meters.add(
            link_down_bytes=sum([one.link_down_bytes for one in found]),
            link_up_bytes=sum([one.link_up_bytes for one in found]),
        )
        finite = [one.is_finite for one in found]
        if not all(finite):
            under_way.is_finite = False
        return finite

    def recall(self, step: int, *requests: SlotRequest, repeats: bool = False) -> None:
        """Reads slots before the step's first update; blocks until every `out` is full.

        Args:
          step: the step of the caller's state.
          repeats: whether the next step will do the same, so that nothing is to be
            read ahead for its updates.

        Raises:
          StaleStateError, StoreError: as `update`.
        """
        with self._guard:
            self._begin(step).repeats |= repeats
            tasks = [
                task for one in requests for task in recall_tasks(self._opened, one)
            ]
        with span("leaf", self._shown(requests)):
            self._opened.mover.run(tasks)
        up_bytes = sum([request.out.nbytes for request in requests])
        self._opened.meters.add(link_up_bytes=up_bytes)

    def finish(
        self,
        step: int,
        scalars: Sequence[ScalarState],
        skipped_steps: int,
        inexact: Mapping[int, float] = MappingProxyType({}),
        *,
        is_compared: bool = True,
        carry: Mapping[tuple[str, ...], Array] = MappingProxyType({}),
    ) -> None:
        """Ends the step after `step` in the background, when all leaves are updated.

        It is committed if the store's durability requires it, otherwise by the next
        commit.

        Args:
          step: the step of the caller's state.
          inexact: leaves whose 16-bit params at the caller differ in bits from
            `UpdateRequest.out`, and the greatest difference. The next step does not
            use the caller's.
          is_compared: whether the caller's params, if it has any, were given.
          carry: further arrays by path, which are copied.

        Raises:
          NonFiniteScalarError: the gradients are finite, and a kernel computed with a
            scalar that is NaN; the step is given up.
        """
        with self._guard:
            ended = self._begin(step)
            step += 1
            if ended.nan_scalars and ended.is_finite:
                found = ended.nan_scalars
                error = nan_scalar_error(self._opened, step, found, scalars)
                self.abandon()
                self.wait()  # commits the steps before
                raise error
            before = self._opened.finished.inexact
            unseen = self._opened.finished.steps_without_params + 1
            kept = {self._name(leaf) for leaf in ended.kept}
            still = {name: before[name] for name in kept & before.keys()}
            raw = [value.tobytes() for value in carry.values()]
            described = [
                CarriedArray.of(path, value.shape, value.dtype.name, own)
                for (path, value), own in zip(carry.items(), raw, strict=True)
            ]
            record = CommitRecord(
                step=step,
                scalar_state=tuple(scalars),
                skipped_steps=skipped_steps,
                payload=self._opened.annotations.take(step),
                inexact=still | {self._name(n): bound for n, bound in inexact.items()},
                steps_without_params=0 if is_compared else unseen,
                device_updates=self._opened.assignment.every,
                carry=tuple(described),
                carried=raw,
            )
            _check_complete(self._opened, ended.arrivals)
            ending = self._ending = Ending()
            thread = threading.Thread(
                target=self._end_step,
                args=(record, ended, time.monotonic(), ending),
                name="jaxinf-commit",
                daemon=True,
            )
            self._step = None
            try:
                thread.start()
            except RuntimeError as error:  # the process has reached its limit
                _LOG.warning(
                    "%s: no thread to commit step %s in the background (%s); it is "
                    "committed at once, and JAX waits. Raise the limit (ulimit -u)",
                    self._opened.options.path,
                    step,
                    error,
                )
                thread.run()

    def abandon(self) -> None:
        """Abandons the step without a commit; it may start over."""
        with self._guard:
            if self._step is not None:
                arrivals = self._step.arrivals
                self._opened.mover.drain()
                _check_undoable(self._opened, arrivals)
                self._opened.chunks.forget_step()
                _prefetch(self._opened, arrivals, given_up=arrivals)
                self._step = None

    def wait(self) -> None:
        """Commits every finished step; blocks until all are durable.

        Raises:
          StoreError: a step that overwrites an uncommitted one is under way.
          BaseException: the exception that stopped the store.
        """
        with self._guard:
            self.join()
            if not self._opened.num_uncommitted:
                return
            if self._has_arrivals:
                raise StoreError(
                    f"{self._opened.options.path}: step {self._next_step} is under "
                    "way, and the steps before it are not committed (the store's "
                    "durability is not every step); wait for its state first: "
                    "store.wait(state)"
                )
            self._publish()

    def join(self) -> None:
        """Blocks until the last step has ended, and its commit if it has one.

        Raises:
          BaseException: the exception that stopped the store.
        """
        self._opened.health.check()
        with self._guard:
            self._join_commit()
        self._opened.health.check()

    @property
    def metrics(self) -> StepMetrics | None:
        return self._metrics[-1] if self._metrics else None

    def metrics_of(self, step: int) -> StepMetrics | None:
        """Metrics of one of the last few steps of this process, or None.

        Blocks only for the commit of that step.
        """
        with self._guard:
            last = self.metrics
            if self._ending is not None and (last is None or last.step < step):
                self.join()
            # A copy, since a later step's commit may append at the same time.
            return next((m for m in tuple(self._metrics) if m.step == step), None)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Prevents steps from beginning and committing while the context lasts."""
        with self._guard:
            self.wait()
            yield

    def close(self) -> None:
        """Commits finished steps, after the commit in flight; keeps errors."""
        opened = self._opened
        with self._guard:
            self._join_commit()
            if opened.health.error is not None or not opened.num_uncommitted:
                return
            if self._has_arrivals:
                _LOG.warning(
                    "step %s is incomplete. %s", self._next_step, opened.loss_note()
                )
            else:
                self._publish()

    # --- inside --------------------------------------------------------------------

    def _begin(self, step: int) -> _Step:
        """Returns the step under way, or begins one."""
        opened = self._opened
        opened.health.check()
        with self._guard:
            if self._step is None:
                self.join()
            else:
                opened.health.check()
            if step != opened.finished.step:
                raise stale_state(opened.options.path, step, opened.finished.step)
            if step == LAST_STEP:
                raise StoreError(
                    f"{opened.options.path}: expected a step to follow, found step "
                    f"{LAST_STEP} (2**31 - 1), the last that a store counts; go on in "
                    "a new store from store.params(like=params) and store.state(like=)"
                )
            if self._step is None:
                if not opened.num_uncommitted:
                    opened.begin_slot()
                if not self._metrics:  # earlier traffic is of `init`, not of a step
                    self._counted = opened.meters.snapshot()
                opened.mover.defer_writes(not opened.must_commit(step + 1))
                self._step = _Step(time.monotonic())
            return self._step

    def _shown(self, requests: Sequence[UpdateRequest | KeptLeaf | SlotRequest]) -> str:
        """Names the leaves of requests while spans are recorded."""
        if not timeline.is_recording:
            return ""
        return ", ".join(dict.fromkeys(self._name(one.leaf) for one in requests))

    def _name(self, leaf: int) -> str:
        return self._opened.directory.manifest.leaves[leaf].name

    @property
    def _has_arrivals(self) -> bool:
        return self._step is not None and bool(self._step.arrivals)

    @property
    def _next_step(self) -> int:
        return self._opened.finished.step + 1

    def _end_step(
        self,
        record: CommitRecord,
        ended: _Step,
        updated_s: float,
        ending: Ending,
    ) -> None:
        opened = self._opened
        try:
            with span("drain", f"step {record.step}"):
                opened.mover.drain()
            opened.chunks.end_step()
            opened.finished = record
            if opened.must_commit(record.step):
                opened.publish()
            if opened.options.keeps(record.step):
                made = save_checkpoint(opened.directory, overwrite=True)
                remove_surplus(opened.directory, opened.options.num_kept, made)
            if opened.options.exports(record.step):
                opened.exports.begin(opened.directory, record.step)
            traffic = opened.meters.snapshot()
            updated = {s: one for s, one in ended.arrivals.items() if one.is_moved}
            moved_bytes = sum([one.layout.num_bytes for one in updated.values()])
            self._metrics.append(
                StepMetrics(
                    step=record.step,
                    update_s=updated_s - ended.started_s,
                    commit_s=time.monotonic() - updated_s,
                    traffic=traffic - self._counted,
                    is_committed=opened.commit.step == record.step,
                    hit_share=opened.mover.take_found_bytes() / max(1, moved_bytes),
                )
            )
            self._counted = traffic
            opened.keep_moved(updated.keys())
            if not opened.health.is_closed:
                # A step that reads slots first would take what was read ahead.
                _prefetch(opened, {} if ended.repeats else ended.arrivals)
        except BaseException as error:
            opened.health.fail(error)
        finally:
            ending.reach()

    def _publish(self) -> None:
        try:
            self._opened.publish()
            if self._step is not None:
                self._opened.directory.unpublish(self._opened.chunks.target)
        except BaseException as error:
            self._opened.health.fail(error)
            raise

    def _join_commit(self) -> None:
        """Waits for the thread, and forgets it then: an interrupt may end the wait."""
        if self._ending is not None:
            with span("wait", "commit"):
                self._ending.wait()
            self._ending = None


def _check_undoable(opened: OpenStore, arrivals: _Arrivals) -> None:
    """Stops the store if chunks of uncommitted steps were overwritten.

    Raises:
      StoreError: gives the number of lost steps.
    """
    if opened.num_uncommitted and arrivals:
        error = StoreError(
            f"{opened.options.path}: step {opened.finished.step + 1} was given up "
            "after part of it was written over the step before, which is not committed "
            "(the store's durability is not every step)"
        )
        opened.health.fail(error)
        raise error


def _prefetch(
    opened: OpenStore, arrivals: _Arrivals, given_up: Collection[Subgroup] = ()
) -> None:
    """Prefetches the next step's states, in the order in which gradients came.

    Args:
      arrivals: the subgroups that the last step has updated.
      given_up: those whose updates do not count.
    """

    def sources(arrival: _Arrival) -> Loads:
        states = [state for state, _ in arrival.loads]
        return opened.chunks.sources(arrival.layout, states)

    kept = opened.mover.end_step(given_up)
    opened.mover.prefetch(
        [
            Task(
                arrival.layout,
                compute_nothing,
                loads=sources(arrival),
                runs_kernel=arrival.runs_kernel,
            )
            for subgroup, arrival in arrivals.items()
            if arrival.loads and subgroup not in kept
        ]
    )


def _check_complete(opened: OpenStore, arrivals: _Arrivals) -> None:
    done = sum(subgroup.num_elements for subgroup in arrivals)
    expected = opened.directory.manifest.num_held_params
    if done != expected:
        raise AssertionError(
            f"{opened.options.path}: the step updated {done} of {expected} params"
        )
