"""Runs the steps of an open store: updates, waits, commits.

      update(leaf 0) … update(leaf n) ──► finish ──► [drain, sync, commit] ──► prefetch
       blocks until the leaf's result is there        in the background

Invariant: no write of a step starts before the commit of the one before it has
returned. Steps between two commits rewrite the spare slot in place. After the first
failure nothing more is written.
"""

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import MappingProxyType

import numpy as np

from jaxinf.engine.carry import carry_fields
from jaxinf.engine.exports import Exports
from jaxinf.engine.resume_check import ResumeCheck, stale_state_error
from jaxinf.engine.store_files import StoreFiles
from jaxinf.engine.updates import (
    LeafUpdate,
    StateRequest,
    UpdateRequest,
    name_nan_scalars,
    nan_scalar_error,
    state_tasks,
)
from jaxinf.errors import StoreError
from jaxinf.layout import Subgroup
from jaxinf.processes import BackgroundCall, Completion
from jaxinf.store import CommitRecord, KeptCuts, ScalarState, save_checkpoint
from jaxinf.transfer import ByteCounts, Task, idle, span
from jaxinf.typing import Array, JsonValue

_LOG = logging.getLogger("jaxinf")

LAST_STEP = 2**31 - 1
"""The last step that a state's int32 counts."""


@dataclass(frozen=True)
class StepMetrics:
    """The cost of a committed step.

    Attributes:
      step: Number of the step.
      update_s: Time from the first gradient's arrival to the last result.
      commit_s: Time from then until the step was durable, or written.
      traffic: Bytes on drives and host link since the previous step.
      is_committed: Whether it was committed when it ended.
      hit_share: Share of the updated state that was in memory when it was needed.
    """

    step: int
    update_s: float
    commit_s: float
    traffic: ByteCounts
    is_committed: bool = True
    hit_share: float = 0.0


@dataclass
class _Step:
    """A step under way.

    Attributes:
      updated: The tasks of its updates by subgroup, in order; copies that compute
        nothing, since the tasks themselves hold arrays.
    """

    started_s: float
    updated: dict[Subgroup, Task] = field(default_factory=dict)
    nan_scalars: tuple[str, ...] = ()  # names of those that are NaN and used
    is_finite: bool = True  # whether every gradient so far is
    reads_states_first: bool = False  # before its updates, as the next step may


class StepRunner:
    """Runs the steps of an open store, one after another. Thread-safe.

    The updates of a step may come in any order.

    Args:
      take_payload: Returns a caller's payload for a step that ends.
      on_replaced: Called when a commit has replaced the contents, not by a step.

    Attributes:
      resume_check: Ties a run's params and state to the last step.
    """

    def __init__(
        self,
        files: StoreFiles,
        exports: Exports,
        *,
        take_payload: Callable[[int], JsonValue],
        on_replaced: Callable[[], None],
    ) -> None:
        self.files, self._exports = files, exports
        self._take_payload, self._on_replaced = take_payload, on_replaced
        self.resume_check = ResumeCheck(files)
        self.metrics: deque[StepMetrics] = deque(maxlen=8)
        self._guard = threading.RLock()
        self._ending: Completion | None = None  # of the last step's commit
        self._step: _Step | None = None
        self._counted = files.meters.snapshot()
        files.health.failure.note = self._loss_note

    # --- a step ----------------------------------------------------------------------

    def update(self, step: int, *requests: UpdateRequest) -> list[bool]:
        """Updates leaves or shards; blocks until every `out` has its result.

        Args:
          step: The step of the caller's state.
          requests: The updates; short ones take less time together.

        Returns:
          For each update, whether the gradient is finite.

        Raises:
          StaleStateError: The caller's state is not of the store's step.
          DivergedParamsError: The caller's params are not the store's.
          NonFiniteScalarError: A kernel would compute with NaN, and the step overwrites
            one that is not committed; else `finish` raises it.
        """
        files, nan_names = self.files, name_nan_scalars(self.files, requests)
        with self._guard:
            under_way = self._begin(step)
            if nan_names and files.num_uncommitted and not under_way.updated:
                self.wait()  # otherwise the overwritten steps would be lost
                raise nan_scalar_error(files, nan_names, ())
            updates = [LeafUpdate(files, request, step + 1) for request in requests]
            tasks = [task for update in updates for task in update.tasks]
            if under_way.updated.keys() & {task.layout.subgroup for task in tasks}:
                # The computation failed in JAX, which runs it again. Its first writes
                # must not come after the new ones.
                files.mover.drain()
                self._check_undoable(under_way)
            for task in tasks:
                kind = task.runs_kernel, task.is_remote
                copy = Task(task.layout, idle, task.loads, task.stores, *kind)
                under_way.updated[task.layout.subgroup] = copy
            under_way.nan_scalars += nan_names
        with span("leaf"):
            files.mover.run(tasks)
        are_finite = [update.is_finite for update in updates]
        if not all(are_finite):
            under_way.is_finite = False
        return are_finite

    def read_states(self, step: int, *requests: StateRequest) -> None:
        """Reads states before the step's first update; blocks until they are there."""
        with self._guard:
            self._begin(step).reads_states_first = True
            tasks = [t for each in requests for t in state_tasks(self.files, each)]
        with span("leaf"):
            self.files.mover.run(tasks)
        moved_bytes = sum([request.out.nbytes for request in requests])
        self.files.meters.add(link_up_bytes=moved_bytes)

    def _begin(self, step: int) -> _Step:
        """Returns the step under way, or begins one. The caller holds the guard."""
        files = self.files
        if self._step is None:
            self.join()
        files.health.check()
        if step != files.finished.step:
            raise stale_state_error(files, step)
        if step == LAST_STEP:
            raise StoreError(
                f"{self._where}: expected a step to follow, found step {step}, the "
                "last that a store counts; go on in a new store"
            )
        if self._step is None:
            if not files.num_uncommitted:
                files.directory.remove_record(files.chunks.target)
            if not self.metrics:  # earlier traffic is of `init`, not of a step
                self._counted = files.meters.snapshot()
            files.mover.defer_writes(not self._must_commit(step + 1))
            self._step = _Step(time.monotonic())
        return self._step

    def finish(
        self,
        step: int,
        scalars: Sequence[ScalarState],
        skipped_steps: int,
        inexact: Mapping[int, float] = MappingProxyType({}),
        *,
        kept: Collection[int] = (),
        carry: Mapping[tuple[str, ...], Array] = MappingProxyType({}),
        streams: Mapping[str, KeptCuts] = MappingProxyType({}),
    ) -> None:
        """Ends the step after `step` in the background; all leaves must be updated.

        The step is committed if the store's durability requires it, otherwise by the
        next commit.

        Args:
          inexact: The greatest difference of each leaf whose 16-bit params at the
            caller are not `UpdateRequest.out` to the bit; the next step does not use
            the caller's.
          kept: Leaves that the step leaves as they are.
          carry: Further arrays by path, which are copied.
          streams: The cuts of the programs that have computed the step.

        Raises:
          NonFiniteScalarError: The gradients are finite, and a kernel computed with a
            scalar that is NaN; the step is given up.
        """
        files = self.files
        with self._guard:
            ended = self._begin(step)
            if ended.nan_scalars and ended.is_finite:
                error = nan_scalar_error(files, ended.nan_scalars, scalars)
                self.abandon()
                self.wait()  # commits the steps before
                raise error
            self._check_complete(ended, kept)
            record = CommitRecord(
                step=step + 1,
                scalar_state=tuple(scalars),
                skipped_steps=skipped_steps,
                payload=self._take_payload(step + 1),
                inexact=self._inexact_leaves(inexact, kept),
                device_updates=files.assignment.interval,
                streams={**files.finished.streams, **streams},
                **carry_fields(carry),
            )
            complete = partial(self._complete_step, record, ended, time.monotonic())
            self._start_ending(BackgroundCall(complete))

    def _check_complete(self, ended: _Step, kept: Collection[int]) -> None:
        files = self.files
        chunks = [c for leaf in kept for c in files.subgroups.layouts_by_chunk(leaf)]
        unchanged = [layout.subgroup for chunk in chunks for layout in chunk]
        if not ended.updated.keys().isdisjoint(unchanged):
            raise StoreError(
                f"{self._where}: step {files.finished.step + 1} was to leave params as "
                "they are that a computation of it, which failed, has updated; open "
                "the store again, and run the step again"
            )
        done = sum([each.num_elements for each in (*ended.updated, *unchanged)])
        num_params = files.directory.manifest.num_held_params
        assert done == num_params, f"the step updated {done} of {num_params} params"

    def _inexact_leaves(
        self, inexact: Mapping[int, float], kept: Collection[int]
    ) -> dict[str, np.float32]:
        """Returns the differences of inexact leaves; kept ones are as they were."""
        names = [leaf.name for leaf in self.files.leaves]
        before, kept_names = self.files.finished.inexact, {names[leaf] for leaf in kept}
        bounds = {name: before[name] for name in before if name in kept_names}
        return bounds | {names[n]: np.float32(bound) for n, bound in inexact.items()}

    def _start_ending(self, call: BackgroundCall) -> None:
        # First, since an interrupt may come when the thread runs already.
        self._step, self._ending = None, call.completion
        try:
            name = "jaxinf-commit"
            threading.Thread(target=call.run, name=name, daemon=True).start()
        except BaseException as error:
            call.run()  # unless the thread does
            if not isinstance(error, RuntimeError):  # it may have no more threads
                raise

    def _must_commit(self, step: int) -> bool:
        options, every = self.files.options, self.files.options.steps_per_commit
        is_due = every is not None and step - self.files.commit.step >= every
        return is_due or options.keeps(step) or options.exports(step)

    def _complete_step(
        self, record: CommitRecord, ended: _Step, updated_s: float
    ) -> None:
        files, options, step = self.files, self.files.options, record.step
        try:
            with span("drain"):
                files.mover.drain()
            files.note_finished(record)
            if self._must_commit(step):
                files.commit_finished()
            if options.keeps(step):
                made = save_checkpoint(files.directory, overwrite=True)
                options.remove_surplus_checkpoints(files.directory, made)
            self._note_cost(ended, updated_s)
            self._read_ahead(ended)
            if options.exports(step):
                self._exports.export_step(files.directory, step)
        except BaseException as error:
            files.health.fail(error)

    def _note_cost(self, ended: _Step, updated_s: float) -> None:
        files, tasks = self.files, ended.updated.items()
        moved = {key: task for key, task in tasks if task.loads or task.stores}
        moved_bytes = sum([task.layout.num_bytes for task in moved.values()])
        traffic = files.meters.snapshot()
        self.metrics.append(
            StepMetrics(
                step=files.finished.step,
                update_s=updated_s - ended.started_s,
                commit_s=time.monotonic() - updated_s,
                traffic=traffic - self._counted,
                is_committed=not files.num_uncommitted,
                hit_share=files.mover.take_hit_bytes() / max(1, moved_bytes),
            )
        )
        self._counted = traffic
        files.note_moved(moved)

    def _read_ahead(self, ended: _Step) -> None:
        """Reads for the next step what this one has, in the order of its gradients."""
        files = self.files
        cached = files.mover.drop_prefetched()
        # A step that reads states first would take what was read ahead.
        if not (ended.reads_states_first or files.health.is_closed):
            updated = ended.updated.items()
            tasks = [task for key, task in updated if task.loads and key not in cached]
            for task in tasks:
                states = [state for state, _ in task.loads]
                task.loads = files.chunks.sources(task.layout, states)
                task.stores = ()
            files.mover.prefetch(tasks)

    def abandon(self) -> None:
        """Gives up the step under way, if there is one; it may start over."""
        with self._guard:
            if (step := self._step) is not None:
                self.files.mover.drain()
                self._check_undoable(step)
                self.files.chunks.forget_step()
                self.files.mover.drop_prefetched(given_up=step.updated)
                self._step = None

    def _check_undoable(self, step: _Step) -> None:
        """Stops the store if a step has overwritten one that is not committed."""
        if self.files.num_uncommitted and step.updated:
            error = StoreError(
                f"{self._where}: step {self.files.finished.step + 1} was given up after"
                " part of it was written over the step before, which is not committed "
                "(the store's durability is not every step)"
            )
            self.files.health.fail(error)
            raise error

    # --- a step without updates: an initial or a loaded one --------------------------

    def begin_overwrite(self) -> None:
        """Begins a step that the caller's tasks write in place of the last one."""
        files = self.files
        files.cache_only(frozenset())  # what was read is of the step before
        files.mover.drop_prefetched()
        files.directory.remove_record(files.chunks.target)
        files.mover.defer_writes(False)

    def commit_written_step(self, step: int, scalars: Sequence[ScalarState]) -> None:
        """Commits a step that the caller's tasks have written; blocks."""
        files = self.files
        files.mover.drain()
        files.health.check()
        payload, state = self._take_payload(step), tuple(scalars)
        record = CommitRecord(step=step, scalar_state=state, payload=payload)
        files.note_finished(record)
        self._commit()
        self._on_replaced()
        self.resume_check.expected_step = None if step else 0
        files.choose_cached()

    def _commit(self) -> None:
        files = self.files
        try:
            files.commit_finished()
            if self._step is not None:
                # It began before this commit, and will now write to the other slot,
                # whose record must go first.
                files.directory.remove_record(files.chunks.target)
        except BaseException as error:
            files.health.fail(error)
            raise

    # --- waiting ---------------------------------------------------------------------

    def wait(self) -> None:
        """Commits every finished step; blocks until all are durable."""
        with self._guard:
            self.join()
            if not self.files.num_uncommitted:
                return
            if self._step and self._step.updated:
                raise StoreError(
                    f"{self._where}: step {self.files.finished.step + 1} is under way, "
                    "and the steps before it are not committed (the store's durability "
                    "is not every step); wait for its state first: store.wait(state)"
                )
            self._commit()

    def join(self) -> None:
        """Blocks until the last step has ended, with its commit if it has one."""
        self.files.health.check()
        self._join()
        self.files.health.check()

    def _join(self) -> None:
        with self._guard:
            if self._ending is not None:
                with span("wait"):
                    self._ending.wait()
                self._ending = None  # only now: an interrupt may end the wait

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Prevents steps from beginning and committing while the context lasts."""
        with self._guard:
            self.wait()
            yield

    def commit_at_close(self) -> None:
        """Commits finished steps, unless the store has failed."""
        with self._guard:
            self._join()
            if self.files.health.error is not None or not self.files.num_uncommitted:
                return
            if self._step and self._step.updated:
                step = self.files.finished.step + 1
                _LOG.warning("step %s is incomplete. %s", step, self._loss_note())
            else:
                self._commit()

    def metrics_of(self, step: int) -> StepMetrics | None:
        """Returns a step's metrics, or None; waits for the commit of no later step."""
        with self._guard:
            if self._ending and (not self.metrics or self.metrics[-1].step < step):
                self.join()
            # A copy, since a later step's commit may append at the same time.
            metrics = tuple(self.metrics)
            return next((each for each in metrics if each.step == step), None)

    @property
    def _where(self) -> Path:
        return self.files.options.path

    def _loss_note(self) -> str | None:
        files, at = self.files, self.files.commit.step
        if not (files.options.rewrites_steps and files.num_uncommitted):
            return None
        return (
            f"{self._where}: {files.num_uncommitted} finished steps since the "
            f"commit of step {at} are lost, as the store's durability allows; opened "
            f"again, it goes on at step {at}"
        )
