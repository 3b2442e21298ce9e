"""An open store: its files, CSDs and workers.

Invariant: files, CSDs, workers and a record exist from construction to `close`. After
the first failure nothing more is written.
"""

import threading
from collections.abc import Callable, Collection
from pathlib import Path

from jaxinf.csd import Csd, CsdFleet, open_csds
from jaxinf.documents import encode, parse_json
from jaxinf.engine.chunks import ChunkTable
from jaxinf.engine.executor import make_mover
from jaxinf.engine.exports import Exports
from jaxinf.engine.failure import StoreHealth
from jaxinf.engine.options import StoreOptions
from jaxinf.engine.requests import Assignment
from jaxinf.engine.shape import StoreShape
from jaxinf.errors import StoreMismatchError
from jaxinf.layout import Subgroup
from jaxinf.processes import Group
from jaxinf.store import (
    SCHEDULE_FREE,
    CarriedArray,
    CommitAction,
    CommitRecord,
    Slot,
    StoreDirectory,
    StoreLock,
    make_carry,
    next_slot,
    write_carry,
)
from jaxinf.transfer import ByteMeters, file_progress, span
from jaxinf.typing import AVERAGE, JsonValue

_MOST_PAYLOAD_BYTES = 16 << 20  # the record must stay within the limit of a document


class Annotations:
    """The caller's payloads for the commits of future steps. Thread-safe.

    Attributes:
      last: the last finished step; -1 before step 0.
    """

    def __init__(self, path: Path) -> None:
        self.last = -1
        self._path = path
        self._guard = threading.Lock()
        self._payloads: dict[int, JsonValue] = {}

    def set(self, step: int, payload: JsonValue) -> None:
        """Keeps a payload for the commit of a step that has not finished.

        Raises:
          ValueError: the step is finished already, or the payload holds NaN or Inf.
          TypeError: the payload has no form in JSON.
        """
        raw = encode({"payload": payload})  # nested as it will be in the record
        payload = parse_json(raw, most_bytes=_MOST_PAYLOAD_BYTES)["payload"]
        with self._guard:
            if step <= self.last:
                raise ValueError(
                    f"{self._path}: annotate(step={step}): expected a step still to be "
                    f"committed, the store is at step {self.last}; annotate before "
                    "the update"
                )
            self._payloads[step] = payload

    def take(self, step: int) -> JsonValue:
        """Returns the payload of the step that ends now."""
        with self._guard:
            self.last = step
            return self._payloads.pop(step, None)


class StoreRun:
    """What a store has before there are files, and keeps when they are replaced.

    Attributes:
      options: the options of the store.
      group: the processes that have the store together.
      health: whether it can be used, and the failure that stopped it.
      meters: the bytes that it has moved.
      exports: the exports of its steps to a URL.
      annotations: the caller's payloads for future steps.
      lock: the store's, while this process is its writer.
    """

    def __init__(self, options: StoreOptions, group: Group) -> None:
        self.options, self.group = options, group
        self.health = StoreHealth(options.path)
        self.meters = meters = ByteMeters()
        self.exports = Exports(options, group)
        self.annotations = Annotations(options.path)
        self.lock: StoreLock | None = None
        group.report(lambda: hash((meters.snapshot(), file_progress())))

    def release(self) -> None:
        """Releases the lock; idempotent. In a forked child the parent keeps it."""
        if self.lock is not None:
            self.lock.release()
            self.lock = None


def open_fleet(shape: StoreShape, meters: ByteMeters) -> CsdFleet:
    """Opens the CSDs of an existing or future store; writes nothing."""
    path = shape.directory.path
    here = next(p for p in (path, *path.parents) if p.exists())
    fleet = open_csds(
        shape.options.csd,
        [Path(root) for root in shape.directory.manifest.csds] or [here],
        memory_bytes=max(shape.memory_bytes, shape.longest_bytes),
        meters=meters,
    )
    try:
        fleet.check_buffer(shape.longest_bytes, shape.longest_elements)
    except BaseException:
        fleet.close()
        raise
    return fleet


class OpenStore(StoreShape):
    """The files of a store, its CSDs, and the workers between them. Thread-safe.

    Args:
      run: the run of the `Store`.
      directory: the store; its files exist.
      commit: the committed step's record; None for a store that was just made.
      fleet: its CSDs, if they are open; closed with this.

    Attributes:
      options, health, meters, group, exports, annotations: of the run.
      directory: the files.
      chunks: the newest version of each chunk.
      fleet, csds: the CSDs that update the chunks.
      mover: the workers.
      is_new: whether no step is committed yet; then every leaf must be initialised.
      commit: the last committed step's record. For a new store it says step 0, until
        `finish_initialisation` commits.
      finished: the record of the last finished step, which may not be committed yet.
      assignment: the updates that the CSDs do not compute.
      memory_bytes: the limit of buffers on the host.
    """

    def __init__(
        self,
        run: StoreRun,
        directory: StoreDirectory,
        commit: CommitRecord | None,
        fleet: CsdFleet | None = None,
    ) -> None:
        super().__init__(run.options, directory)
        self.health, self.meters, self.group = run.health, run.meters, run.group
        self.exports, self.annotations = run.exports, run.annotations
        self.is_new = commit is None
        self.commit = self.finished = commit or CommitRecord(step=0, scalar_state=())
        self.annotations.last = -1 if commit is None else commit.step
        self.assignment = Assignment()
        self.health.note = self._note
        self._carries: dict[Slot, tuple[CarriedArray, ...]] = {}
        target = next_slot(directory.committed_slot())
        self.chunks = ChunkTable(directory, target, self.commit.checksums)
        self._moved: frozenset[Subgroup] | None = None
        self._staying: frozenset[Subgroup] = frozenset()
        self.fleet = fleet or open_fleet(self, run.meters)
        longest = self.longest_bytes, self.longest_elements
        roots = [directory.csd_directory(csd) for csd in range(directory.num_csds)]
        try:
            self.csds: list[Csd] = list(self.fleet.attach(roots, *longest))
            self.mover = make_mover(
                directory,
                self.chunks,
                self.csds,
                num_workers=self.options.workers_of(len(self.csds)),
                num_kernels=self.fleet.num_kernels,
                failure=self.health,
            )
        except BaseException:
            self.fleet.close()
            raise
        if not self.is_new:
            self.keep_state()

    def averaged(self, leaf: int) -> tuple[int, ...]:
        """Returns the numbers of the states of which a leaf's average is made.

        These are the average alone, or of a schedule-free optimizer the master params
        and its z. Leaves that it does not train are their own average.

        Raises:
          StoreMismatchError: the store has no average.
        """
        states = [state.name for state in self.directory.manifest.leaves[leaf].states]
        if AVERAGE in states:
            return (states.index(AVERAGE),)
        if self.finished.schedule_free_b1 is not None:
            return (0, states.index(SCHEDULE_FREE)) if SCHEDULE_FREE in states else (0,)
        path = self.directory.path
        raise StoreMismatchError(
            f"{path}: expected an average of the params, found {', '.join(states)}; "
            "leave average=True out"
        )

    def begin_slot(self) -> None:
        """Makes the slot that is written next free of a step."""
        self.directory.unpublish(self.chunks.target)

    def close(self) -> None:
        """Stops the workers and frees their memory; commits nothing."""
        self.mover.close()
        self.fleet.close()

    # --- memory ----------------------------------------------------------------------

    def limit_memory(self, num_bytes: int) -> int:
        """Sets the limit of buffers on the host from now on, and returns it.

        No step may be under way, nor a commit.

        Args:
          num_bytes: the wanted limit. It is raised to `least_memory_bytes`.
        """
        granted = max(num_bytes, self.least_memory_bytes)
        if granted != self.memory_bytes:
            self.memory_bytes = granted
            if not self.is_new:
                self.keep_state()
        self.fleet.limit_memory(granted)
        return granted

    def keep_state(self) -> None:
        """Chooses what stays in memory between steps; no task may be under way."""
        self._keep(self.staying(self.memory_bytes, self._moved))

    def keep_moved(self, moved: Collection[Subgroup]) -> None:
        """The same if a step has moved other subgroups than those before it."""
        if self._moved is None or not self._moved.issuperset(moved):
            self._moved = (self._moved or frozenset()).union(moved)
            self.keep_state()

    def keep_nothing(self) -> None:
        """Drops all state in memory, until the next choice."""
        self._keep(frozenset())
        self.mover.end_step()

    def _keep(self, staying: frozenset[Subgroup]) -> None:
        if staying != self._staying:
            self._flush()
            self.mover.keep(staying)
            self._staying = staying

    def _flush(self) -> None:
        if self.mover.flush():
            self.chunks.end_flush()

    def assign(self, assignment: Assignment) -> None:
        """Sets who computes updates; no step may be under way, nor a commit."""
        if assignment.updater is not None:
            self.mover.compute_elsewhere(assignment.updater.num_at_once)
        self.assignment = assignment

    # --- failure -------------------------------------------------------------------

    def _note(self) -> str | None:
        is_lossy = self.options.rewrites_steps and self.num_uncommitted > 0
        return self.loss_note() if is_lossy else None

    def loss_note(self) -> str:
        """A sentence about the loss of the steps since the last commit."""
        return (
            f"{self.options.path}: {self.num_uncommitted} finished steps since the "
            f"commit of step {self.commit.step} are lost, as the store's durability "
            f"allows; opened again, it goes on at step {self.commit.step}"
        )

    # --- commits -------------------------------------------------------------------

    @property
    def num_uncommitted(self) -> int:
        """Number of finished steps without a commit."""
        return self.finished.step - self.commit.step

    def must_commit(self, step: int) -> bool:
        """Whether a step is committed as soon as it has finished."""
        options, every = self.options, self.options.steps_per_commit
        is_due = every is not None and step - self.commit.step >= every
        return is_due or options.keeps(step) or options.exports(step)

    def publish(self) -> None:
        """Commits the last finished step; writes what was deferred of it."""
        self._flush()
        self.chunks.share_unwritten()
        group, slot, directory = self.group, self.chunks.target, self.directory
        self._put_carried(slot)
        record = self.finished.replace(
            checksums=self.chunks.checksums(),
            carried=(),
            commit="" if group.is_alone else f"{group.session}-{group.num_barriers}",
        )
        meets = f"step {record.step} is not committed here", record.step
        actions: dict[CommitAction, tuple[str, Callable[[], None]]] = {
            CommitAction.SYNC: ("sync", directory.sync),
            CommitAction.RECORD: (
                "publish",
                lambda: directory.write_record(slot, record),
            ),
            CommitAction.MEET: ("meet", lambda: group.barrier(*meets)),
            CommitAction.FLIP: ("publish", lambda: directory.flip(slot)),
        }
        for name, act in (actions[action] for action in CommitAction):
            with span(name, f"step {record.step}"):
                act()
        self.chunks.end_commit()
        self.commit = self.finished = record
        if self.is_new:
            self.is_new = False
            self.keep_state()

    def _put_carried(self, slot: Slot) -> None:
        """Writes what the step carries."""
        carry, directory = self.finished.carry, self.directory
        step = directory.step_path(slot)
        form = tuple(CarriedArray(x.path, x.shape, x.dtype, "") for x in carry)
        if self._carries.get(slot) != form:
            make_carry(step, directory.manifest, carry)
            self._carries[slot] = form
        write_carry(step, carry, self.finished.carried)
