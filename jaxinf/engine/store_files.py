"""The files of an open store, with its CSDs and workers, and how they are committed.

     finished step, in the spare slot ─► flush ─► sync, record, meet, flip ─► committed

Invariant: the committed slot is only read. The chunks of a step become visible as a
whole or not at all, and what stays in memory is chosen between steps.
"""

from collections.abc import Collection
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from jaxinf.csd import Csd, CsdFleet, open_csds
from jaxinf.engine.carry import carry_form
from jaxinf.engine.chunks import ChunkMoves, ChunkTable
from jaxinf.engine.engine import Engine
from jaxinf.engine.subgroup_table import SubgroupTable
from jaxinf.layout import Subgroup
from jaxinf.store import (
    CarriedArray,
    CommitAction,
    CommitRecord,
    Slot,
    make_carry,
    other_slot,
    write_carry,
)
from jaxinf.transfer import ByteMeters, Limits, Mover, Queues, existing_parent, span


def open_fleet(subgroups: SubgroupTable, meters: ByteMeters) -> CsdFleet:
    """Opens the CSDs of a store, which need not be there; writes nothing."""
    directory = subgroups.directory
    roots = [Path(root) for root in directory.manifest.csds]
    longest = subgroups.longest_bytes, subgroups.longest_elements
    fleet = open_csds(
        subgroups.options.csd,
        roots or [existing_parent(directory.path)],
        memory_bytes=max(subgroups.memory_bytes, subgroups.longest_bytes),
        meters=meters,
    )
    try:
        fleet.check_buffer(*longest)
    except BaseException:
        fleet.close()
        raise
    return fleet


@dataclass(frozen=True)
class Assignment:
    """Which subgroups another processor updates in place of the host's CSDs.

    Attributes:
      updater: it has ``update(csd, buffer, update)``, which computes as `Csd.update`
        with a gradient that is not sparse, leaves `out` alone, and blocks; and
        `num_at_once`, how many run at once, each on a thread of its own. None for none.
      every: it computes every so many of the subgroups that it can; 0 for none;
        "auto" while their number is measured.
      subgroups: these.
    """

    updater: Any = None
    every: int | Literal["auto"] = 0
    subgroups: tuple[Subgroup, ...] = ()


class StoreFiles:
    """The files of an open store, and what moves and updates their chunks.

    Args:
      commit: the committed step's record; None for a store that was just made.
      fleet: CSDs of the store; closed with this.

    Attributes:
      options, health, meters, group: the engine's.
      leaves: the records of its leaves.
      subgroups: subgroups in which its chunks move.
      chunks: the newest version of each chunk.
      csds: the CSDs that update the chunks, of the fleet.
      mover: the workers.
      memory_bytes: the limit of buffers on the host.
      is_new: whether no step is committed yet; then every leaf must be initialised.
      commit: the last committed step's record; of a new store one of step 0.
      finished: the record of the last finished step, which may not be committed yet.
      assignment, elsewhere: the updates that the CSDs do not compute, and the
        subgroups of these.
    """

    def __init__(
        self,
        engine: Engine,
        subgroups: SubgroupTable,
        commit: CommitRecord | None,
        fleet: CsdFleet,
    ) -> None:
        self.options, self.group = engine.options, engine.group
        self.health, self.meters = engine.health, engine.meters
        self.subgroups, self.directory = subgroups, subgroups.directory
        self.leaves, self.memory_bytes = subgroups.leaves, subgroups.memory_bytes
        self.is_new = commit is None
        self.commit = self.finished = commit or CommitRecord(step=0, scalar_state=())
        self.assignment, self.elsewhere = Assignment(), frozenset[Subgroup]()
        self._carries: dict[Slot, tuple[CarriedArray, ...]] = {}
        self._moved: frozenset[Subgroup] | None = None
        self._staying: frozenset[Subgroup] = frozenset()
        target = other_slot(self.directory.committed_slot())
        self.chunks = ChunkTable(self.directory, target, self.commit.checksums)
        self.fleet = fleet
        try:
            folders = self.directory.csd_directories
            longest = subgroups.longest_bytes, subgroups.longest_elements
            csds = self.csds = list[Csd](fleet.attach(folders, *longest))
            queues = Queues(
                [(id(csd.memory), csd.is_host) for csd in csds],
                lambda task: csds[task.piece.drive].acquire(task.piece.num_bytes),
                Limits(subgroups.num_workers, fleet.num_parallel_updates),
            )
            perform = ChunkMoves(self.directory, self.chunks, csds).perform
            self.mover = Mover(self.directory.path, queues, perform, self.health)
        except BaseException:
            fleet.close()
            raise
        if not self.is_new:
            self.keep_state()

    @property
    def num_uncommitted(self) -> int:
        """Number of finished steps without a commit."""
        return self.finished.step - self.commit.step

    def close(self) -> None:
        """Stops the workers and frees their memory; commits nothing."""
        self.mover.close()
        self.fleet.close()

    # --- between steps ---------------------------------------------------------------

    def limit_memory(self, num_bytes: int) -> None:
        """Sets the limit of buffers on the host, or `least_memory_bytes` if it is more.

        No step may be under way, nor a commit.
        """
        granted = max(num_bytes, self.subgroups.least_memory_bytes)
        if granted != self.memory_bytes:
            self.memory_bytes = granted
            if not self.is_new:
                self.keep_state()
                self.mover.end_step()  # drops what was prefetched
        self.fleet.limit_memory(granted)

    def end_step(self, record: CommitRecord) -> None:
        """Makes what was written the last finished step; no write may be in flight."""
        self.chunks.end_step()
        self.finished = record

    def keep_state(self) -> None:
        """Chooses what stays in memory between steps; no task may be under way."""
        self.keep(self.subgroups.staying(self.memory_bytes, self._moved))

    def learn_moved(self, moved: Collection[Subgroup]) -> None:
        """Chooses it again if a step has moved subgroups that none before it has."""
        if self._moved is None or not self._moved.issuperset(moved):
            self._moved = (self._moved or frozenset()).union(moved)
            self.keep_state()

    def keep(self, staying: frozenset[Subgroup]) -> None:
        """Keeps the state of these subgroups in memory, and writes that of others."""
        if staying != self._staying:
            self._flush()
            self.mover.keep(staying)
            self._staying = staying

    def _flush(self) -> None:
        if self.mover.flush():
            self.chunks.end_flush()

    def assign(self, assignment: Assignment) -> None:
        """Sets who computes updates."""
        if assignment.updater is not None:
            self.mover.compute_elsewhere(assignment.updater.num_at_once)
        self.assignment = assignment
        self.elsewhere = frozenset(assignment.subgroups)

    # --- a commit --------------------------------------------------------------------

    def publish(self) -> None:
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
        self.is_new = False
