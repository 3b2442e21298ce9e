"""An open store: its files, CSDs and workers, and the steps that they run.

      update(leaf 0) … update(leaf n) ──► finish ──► [drain, sync, publish] ──► prefetch
       blocks until the leaf's result is there        in the background

Invariant: the committed slot is only read; a step becomes visible as a whole or not at
all, and no write of the next step starts before this one's commit has returned. Steps
between two commits rewrite the other slot in place. After the first failure nothing
more is written.
"""

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np

from jaxinf.csd import Csd, CsdFleet
from jaxinf.engine.binding import stale_state
from jaxinf.engine.carry import carry_fields, carry_form
from jaxinf.engine.chunks import ChunkMoves, ChunkTable
from jaxinf.engine.shape import StoreShape
from jaxinf.engine.updates import (
    Assignment,
    RequestedUpdate,
    StateRequest,
    UpdateRequest,
    nan_scalar_error,
    nan_scalars,
    recall_tasks,
)
from jaxinf.errors import StoreError
from jaxinf.layout import Subgroup
from jaxinf.processes import Ending, Work
from jaxinf.store import (
    CarriedArray,
    CommitAction,
    CommitRecord,
    KeptPlan,
    ScalarState,
    Slot,
    StoreDirectory,
    make_carry,
    other_slot,
    save_checkpoint,
    write_carry,
)
from jaxinf.transfer import ByteCounts, Limits, Mover, Queues, Task, idle, span
from jaxinf.typing import Array

if TYPE_CHECKING:
    from jaxinf.engine.engine import Engine

_LOG = logging.getLogger("jaxinf")

LAST_STEP = 2**31 - 1
"""The last step that a state's int32 counts."""


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


@dataclass
class _Step:
    """A step under way.

    Attributes:
      updated: by subgroup in order, what its updates have read and written; tasks that
        compute nothing, since those of the updates hold arrays.
      nan_scalars: scalars that are NaN and that it computed with.
      is_finite: whether every gradient so far is.
      recalls: whether it has read slots before its updates, as the next one may.
    """

    started_s: float
    updated: dict[Subgroup, Task] = field(default_factory=dict)
    nan_scalars: tuple[str, ...] = ()
    is_finite: bool = True
    recalls: bool = False


class OpenStore(StoreShape):
    """A store's files, its CSDs and workers, and the step that they run. Thread-safe.

    The parts of a step may come in any order.

    Args:
      engine: what the store has without files.
      directory: the store; its files exist.
      commit: the committed step's record; None for a store that was just made.
      fleet: its CSDs, if they are open; closed with this.

    Attributes:
      health, meters, group: the engine's.
      chunks: the newest version of each chunk.
      fleet, csds: the CSDs that update the chunks.
      mover: the workers.
      is_new: whether no step is committed yet; then every leaf must be initialised.
      commit: the last committed step's record; of a new store one of step 0.
      finished: the record of the last finished step, which may not be committed yet.
      assignment, elsewhere: the updates that the CSDs do not compute, and the
        subgroups of these.
      metrics: those of the last few steps of this process.
    """

    def __init__(
        self,
        engine: "Engine",
        directory: StoreDirectory,
        commit: CommitRecord | None,
        fleet: CsdFleet | None = None,
    ) -> None:
        super().__init__(engine.options, directory)
        self._engine, self.health = engine, engine.health
        self.meters, self.group = engine.meters, engine.group
        self.is_new = commit is None
        self.commit = self.finished = commit or CommitRecord(step=0, scalar_state=())
        engine.last_step = -1 if commit is None else commit.step
        self.assignment, self.elsewhere = Assignment(), frozenset[Subgroup]()
        self.health.note = self._loss_note
        self._carries: dict[Slot, tuple[CarriedArray, ...]] = {}
        target = other_slot(directory.committed_slot())
        self.chunks = ChunkTable(directory, target, self.commit.checksums)
        self._moved: frozenset[Subgroup] | None = None
        self._staying: frozenset[Subgroup] = frozenset()
        self.metrics: deque[StepMetrics] = deque(maxlen=8)
        self._guard = threading.RLock()
        self._ending: Ending | None = None  # of the last step's commit
        self._step: _Step | None = None
        self._counted = self.meters.snapshot()
        self.fleet = fleet or self.open_fleet(self.meters)
        try:
            longest = self.longest_bytes, self.longest_elements
            self.csds: list[Csd] = list(
                self.fleet.attach(directory.csd_directories, *longest)
            )
            csds = self.csds
            queues = Queues(
                [(id(csd.memory), csd.is_host) for csd in csds],
                lambda task: csds[task.piece.drive].acquire(task.piece.num_bytes),
                Limits(self._num_workers, self.fleet.num_kernels),
            )
            perform = ChunkMoves(directory, self.chunks, self.csds).perform
            self.mover = Mover(directory.path, queues, perform, self.health)
        except BaseException:
            self.fleet.close()
            raise
        if not self.is_new:
            self.keep_state()

    # --- state in memory -------------------------------------------------------------

    def limit_memory(self, num_bytes: int) -> None:
        """Sets the limit of buffers on the host, or `least_memory_bytes` if it is more.

        No step may be under way, nor a commit.
        """
        granted = max(num_bytes, self.least_memory_bytes)
        if granted != self.memory_bytes:
            self.memory_bytes = granted
            if not self.is_new:
                self.keep_state()
                self.mover.end_step()  # drops what was prefetched
        self.fleet.limit_memory(granted)

    def keep_state(self) -> None:
        """Chooses what stays in memory between steps; no task may be under way."""
        self._keep(self.staying(self.memory_bytes, self._moved))

    def _keep(self, staying: frozenset[Subgroup]) -> None:
        if staying != self._staying:
            self._flush()
            self.mover.keep(staying)
            self._staying = staying

    def _flush(self) -> None:
        if self.mover.flush():
            self.chunks.end_flush()

    def assign(self, assignment: Assignment) -> None:
        """Sets who computes updates, between steps."""
        if assignment.updater is not None:
            self.mover.compute_elsewhere(assignment.updater.num_at_once)
        self.assignment = assignment
        self.elsewhere = frozenset(assignment.subgroups)

    # --- a step ----------------------------------------------------------------------

    def update(self, step: int, *requests: UpdateRequest) -> list[bool]:
        """Updates leaves or shards; blocks until every `out` has its result.

        Args:
          step: the step of the caller's state.
          requests: the updates; short ones take less time together.

        Returns:
          For each update, whether the gradient is finite.

        Raises:
          StaleStateError: the caller's state is not of the store's step.
          DivergedParamsError: the caller's params are not the store's.
          NonFiniteScalarError: a kernel would compute with NaN, and the step overwrites
            one that is not committed; else `finish` raises it.
          StoreError: the drive failed.
        """
        bad = nan_scalars(self, requests)
        with self._guard:
            under_way = self._begin(step)
            if bad and self.num_uncommitted and not under_way.updated:
                self.wait()  # otherwise the overwritten steps would be lost
                raise nan_scalar_error(self, bad, ())
            found = [RequestedUpdate(self, one, step + 1) for one in requests]
            tasks = [task for one in found for task in one.tasks]
            if under_way.updated.keys() & {task.piece.subgroup for task in tasks}:
                # The computation failed elsewhere and is run again. Its earlier writes
                # must not come after the new ones.
                self.mover.drain()
                self._check_undoable(under_way)
            for task in tasks:
                how = task.runs_kernel, task.is_elsewhere
                noted = Task(task.piece, idle, task.loads, task.stores, *how)
                under_way.updated[task.piece.subgroup] = noted
            under_way.nan_scalars += bad
        with span("leaf"):
            self.mover.run(tasks)
        finite = [one.is_finite for one in found]
        if not all(finite):
            under_way.is_finite = False
        return finite

    def recall(self, step: int, *requests: StateRequest) -> None:
        """Reads slots before the step's first update; blocks until they are there."""
        with self._guard:
            self._begin(step).recalls = True
            tasks = [task for one in requests for task in recall_tasks(self, one)]
        with span("leaf"):
            self.mover.run(tasks)
        self.meters.add(link_up_bytes=sum([one.out.nbytes for one in requests]))

    def _begin(self, step: int) -> _Step:
        """Returns the step under way, or begins one."""
        self.health.check()
        with self._guard:
            if self._step is None:
                self.join()
            self.health.check()
            if step != self.finished.step:
                raise stale_state(self, step)
            if step == LAST_STEP:
                raise StoreError(
                    f"{self.options.path}: expected a step to follow, found step "
                    f"{step}, the last that a store counts; go on in a new store"
                )
            if self._step is None:
                if not self.num_uncommitted:
                    self.directory.unpublish(self.chunks.target)
                if not self.metrics:  # earlier traffic is of `init`, not of a step
                    self._counted = self.meters.snapshot()
                self.mover.defer_writes(not self._must_commit(step + 1))
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
        streams: Mapping[str, KeptPlan] = MappingProxyType({}),
    ) -> None:
        """Ends the step after `step` in the background, when all leaves are updated.

        It is committed if the store's durability requires it, otherwise by the next
        commit.

        Args:
          step: the step of the caller's state.
          inexact: leaves whose 16-bit params at the caller differ in bits from
            `UpdateRequest.out`, and the greatest difference. The next step does not
            use the caller's.
          kept: leaves that it leaves as they are.
          carry: further arrays by path, which are copied.
          streams: the cuts of the programs that have computed it.

        Raises:
          NonFiniteScalarError: the gradients are finite, and a kernel computed with a
            scalar that is NaN; the step is given up.
        """
        with self._guard:
            ended = self._begin(step)
            if ended.nan_scalars and ended.is_finite:
                error = nan_scalar_error(self, ended.nan_scalars, scalars)
                self.abandon()
                self.wait()  # commits the steps before
                raise error
            done = sum([one.num_elements for one in ended.updated])
            done += sum([self._left(leaf, ended) for leaf in kept])
            num = self.directory.manifest.num_held_params
            assert done == num, f"the step updated {done} of {num} params"
            before, names = self.finished, {self.leaves[n].name for n in kept}
            still = {n: bound for n, bound in before.inexact.items() if n in names}
            still |= {self.leaves[n].name: np.float32(x) for n, x in inexact.items()}
            record = CommitRecord(
                step=step + 1,
                scalar_state=tuple(scalars),
                skipped_steps=skipped_steps,
                payload=self._engine.take_payload(step + 1),
                inexact=still,
                device_updates=self.assignment.every,
                streams={**before.streams, **streams},
                **carry_fields(carry),
            )
            work = Work(partial(self._end_step, record, ended, time.monotonic()))
            # First, since an interrupt may come when the thread runs already.
            self._step, self._ending = None, work.ending
            try:
                name = "jaxinf-commit"
                threading.Thread(target=work.run, name=name, daemon=True).start()
            except BaseException as error:
                work.run()  # unless the thread does
                if not isinstance(error, RuntimeError):  # it may have no more threads
                    raise

    def _left(self, leaf: int, ended: _Step) -> int:
        """Returns the number of held elements of a leaf that a step leaves as it is."""
        own = [one.subgroup for chunk in self.chunk_layouts(leaf) for one in chunk]
        if not ended.updated.keys().isdisjoint(own):  # by a computation that failed
            raise StoreError(
                f"{self.options.path}: leaf {self.leaves[leaf].name}: step "
                f"{self.finished.step + 1} has updated it, and is now to leave it as "
                "it is; open the store again, and run the step again"
            )
        return sum([subgroup.num_elements for subgroup in own])

    def _end_step(self, record: CommitRecord, ended: _Step, updated_s: float) -> None:
        options, step = self.options, record.step
        try:
            with span("drain"):
                self.mover.drain()
            self.chunks.end_step()
            self.finished = record
            if self._must_commit(step):
                self._publish()
            if options.keeps(step):
                made = save_checkpoint(self.directory, overwrite=True)
                options.remove_surplus(self.directory, made)
            self._note_cost(ended, updated_s)
            self._read_ahead(ended)
            if options.exports(step):
                self._engine.exports.run(self.directory, step)
        except BaseException as error:
            self.health.fail(error)

    def _note_cost(self, ended: _Step, updated_s: float) -> None:
        """Adds the metrics of the step that has ended; learns what steps move."""
        tasks = ended.updated.items()
        moved = {s: task for s, task in tasks if task.loads or task.stores}
        moved_bytes = sum([task.piece.num_bytes for task in moved.values()])
        traffic = self.meters.snapshot()
        self.metrics.append(
            StepMetrics(
                step=self.finished.step,
                update_s=updated_s - ended.started_s,
                commit_s=time.monotonic() - updated_s,
                traffic=traffic - self._counted,
                is_committed=not self.num_uncommitted,
                hit_share=self.mover.take_found_bytes() / max(1, moved_bytes),
            )
        )
        self._counted = traffic
        if self._moved is None or not self._moved.issuperset(moved):
            self._moved = (self._moved or frozenset()).union(moved)
            self.keep_state()

    def _read_ahead(self, ended: _Step) -> None:
        """Reads for the next step what this one has, in the order of its gradients."""
        kept = self.mover.end_step()
        # A step that reads slots first would take what was read ahead.
        if not (ended.recalls or self.health.is_closed):
            due = [x for s, x in ended.updated.items() if x.loads and s not in kept]
            for task in due:
                states = [state for state, _ in task.loads]
                task.loads = self.chunks.sources(task.piece, states)
                task.stores = ()
            self.mover.prefetch(due)

    def abandon(self) -> None:
        """Abandons the step without a commit; it may start over."""
        with self._guard:
            if (step := self._step) is not None:
                self.mover.drain()
                self._check_undoable(step)
                self.chunks.forget_step()
                self.mover.end_step(step.updated)
                self._step = None

    def _check_undoable(self, step: _Step) -> None:
        """Stops the store if chunks of uncommitted steps were overwritten."""
        if self.num_uncommitted and step.updated:
            error = StoreError(
                f"{self.options.path}: step {self.finished.step + 1} was given up after"
                " part of it was written over the step before, which is not committed "
                "(the store's durability is not every step)"
            )
            self.health.fail(error)
            raise error

    # --- waiting ---------------------------------------------------------------------

    def wait(self) -> None:
        """Commits every finished step; blocks until all are durable."""
        with self._guard:
            self.join()
            if not self.num_uncommitted:
                return
            if self._step and self._step.updated:
                raise StoreError(
                    f"{self.options.path}: step {self.finished.step + 1} is under way, "
                    "and the steps before it are not committed (the store's durability "
                    "is not every step); wait for its state first: store.wait(state)"
                )
            self._commit()

    def join(self) -> None:
        """Blocks until the last step has ended, and its commit if it has one."""
        self.health.check()
        self._join()
        self.health.check()

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

    def end(self) -> None:
        """Commits finished steps, after the commit in flight; keeps errors."""
        with self._guard:
            self._join()
            if self.health.error is not None or not self.num_uncommitted:
                return
            if self._step and self._step.updated:
                step = self.finished.step + 1
                _LOG.warning("step %s is incomplete. %s", step, self._loss_note())
            else:
                self._commit()

    def close(self) -> None:
        """Stops the workers and frees their memory; commits nothing."""
        self.mover.close()
        self.fleet.close()

    def metrics_of(self, step: int) -> StepMetrics | None:
        """Those of a step, or None; blocks only for the commit of that step."""
        with self._guard:
            if self._ending and (not self.metrics or self.metrics[-1].step < step):
                self.join()
            # A copy, since a later step's commit may append at the same time.
            return next((m for m in tuple(self.metrics) if m.step == step), None)

    def _loss_note(self) -> str | None:
        """Says what a failure costs."""
        if not (self.options.rewrites_steps and self.num_uncommitted):
            return None
        return (
            f"{self.options.path}: {self.num_uncommitted} finished steps since the "
            f"commit of step {self.commit.step} are lost, as the store's durability "
            f"allows; opened again, it goes on at step {self.commit.step}"
        )

    # --- commits ---------------------------------------------------------------------

    @property
    def num_uncommitted(self) -> int:
        """Number of finished steps without a commit."""
        return self.finished.step - self.commit.step

    def _must_commit(self, step: int) -> bool:
        """Whether a step is committed as soon as it has finished."""
        options, every = self.options, self.options.steps_per_commit
        is_due = every is not None and step - self.commit.step >= every
        return is_due or options.keeps(step) or options.exports(step)

    def begin_whole(self) -> None:
        """Begins a step that is given as a whole in place of the last."""
        self._keep(frozenset())  # what was read is of the step before
        self.mover.end_step()
        self.directory.unpublish(self.chunks.target)
        self.mover.defer_writes(False)

    def commit_whole(self, step: int, scalars: Sequence[ScalarState]) -> None:
        """Commits step 0, or a loaded one, which tasks have written; blocks."""
        self.mover.drain()
        self.health.check()
        self.chunks.end_step()
        payload, held = self._engine.take_payload(step), tuple(scalars)
        self.finished = CommitRecord(step=step, scalar_state=held, payload=payload)
        self._commit()
        self.is_new = False
        self._engine.num_replaced += 1
        self._engine.binding.at = None if step else 0
        self.keep_state()

    def _commit(self) -> None:
        try:
            self._publish()
            if self._step is not None:
                self.directory.unpublish(self.chunks.target)
        except BaseException as error:
            self.health.fail(error)
            raise

    def _publish(self) -> None:
        """Commits the last finished step; writes what was deferred of it."""
        self._flush()
        self.chunks.share_unwritten()
        group, slot, directory = self.group, self.chunks.target, self.directory
        carry, step = self.finished.carry, directory.step_path(slot)
        if self._carries.get(slot) != carry_form(carry):
            make_carry(step, directory.manifest, carry)
            self._carries[slot] = carry_form(carry)
        write_carry(step, carry, self.finished.carried)
        record = self.finished.replace(
            checksums=self.chunks.checksums(),
            carried=(),
            commit="" if group.is_alone else f"{group.session}-{group.num_barriers}",
        )
        meet = partial(group.barrier, f"step {record.step} is not committed here")
        actions = {
            CommitAction.SYNC: directory.sync,
            CommitAction.RECORD: partial(directory.write_record, slot, record),
            CommitAction.MEET: meet,
            CommitAction.FLIP: partial(directory.flip, slot),
        }
        for action in CommitAction:
            with span(action.value):
                actions[action]()
        self.chunks.end_commit()
        self.commit = self.finished = record
