"""The files of an open store, with its CSDs and workers, and how a step is committed.

     finished step, in the spare slot ─► flush ─► sync, record, meet, flip ─► committed

Invariant: the committed slot is only read. The chunks of a step become visible as a
whole or not at all. Which state stays in memory changes between steps only.
"""

from collections.abc import Collection
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from jaxinf.csd import Csd, CsdFleet, open_csds
from jaxinf.engine.carry import carry_form
from jaxinf.engine.chunks import ChunkTable, UnitRunner
from jaxinf.engine.health import StoreHealth
from jaxinf.engine.subgroup_table import SubgroupTable
from jaxinf.layout import Subgroup
from jaxinf.processes import Group
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
    """Opens the CSDs of a store that may still have to be made; writes nothing."""
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
    """The subgroups that another processor updates in place of the host's CSDs.

    Attributes:
      updater: The processor, if there is one: its ``update(csd, buffer, update)``
        computes as `Csd.update` for a gradient that is not sparse, leaves `out` alone,
        and blocks; `num_at_once` updates run at once, each on a thread of its own.
      interval: k if it updates each k-th of the subgroups that it can, 0 for none,
        "auto" while k is measured.
    """

    updater: Any = None
    interval: int | Literal["auto"] = 0
    subgroups: tuple[Subgroup, ...] = ()


class StoreFiles:
    """The files of an open store, and what moves and updates their chunks.

    Args:
      commit: The committed step's record; None for a store that was just made.
      fleet: The store's CSDs, which `close` closes.

    Attributes:
      is_new: Whether no step is committed yet; then every leaf must be initialised.
      commit: The last committed step's record; of a new store one of step 0.
      finished: The record of the last finished step, which may not be committed yet.
      assignment: The updates that the CSDs do not compute.
    """

    def __init__(
        self,
        subgroups: SubgroupTable,
        commit: CommitRecord | None,
        fleet: CsdFleet,
        group: Group,
        health: StoreHealth,
        meters: ByteMeters,
    ) -> None:
        self.options, self.group = subgroups.options, group
        self.health, self.meters = health, meters
        self.subgroups, self.directory = subgroups, subgroups.directory
        self.leaves, self.memory_bytes = subgroups.leaves, subgroups.memory_bytes
        self.is_new = commit is None
        self.commit = self.finished = commit or CommitRecord(step=0, scalar_state=())
        self.assignment, self.assigned = Assignment(), frozenset[Subgroup]()
        self._carries: dict[Slot, tuple[CarriedArray, ...]] = {}
        self._moved: frozenset[Subgroup] | None = None
        self._cached: frozenset[Subgroup] = frozenset()
        target = other_slot(self.directory.committed_slot())
        self.chunks = ChunkTable(self.directory, target, self.commit.checksums)
        self.fleet = fleet
        try:
            folders = self.directory.csd_directories
            longest = subgroups.longest_bytes, subgroups.longest_elements
            csds = self.csds = list[Csd](fleet.attach(folders, *longest))
            queues = Queues(
                [(id(csd.memory), csd.is_host) for csd in csds],
                lambda task: csds[task.layout.drive].acquire(task.layout.num_bytes),
                Limits(subgroups.num_workers, fleet.num_parallel_updates),
            )
            run = UnitRunner(self.directory, self.chunks, csds).run
            self.mover = Mover(self.directory.path, queues, run, self.health.failure)
        except BaseException:
            fleet.close()
            raise
        if not self.is_new:
            self.choose_cached()

    @property
    def num_uncommitted(self) -> int:
        return self.finished.step - self.commit.step

    def close(self) -> None:
        self.mover.close()
        self.fleet.close()

    # --- between steps ---------------------------------------------------------------

    def limit_memory(self, num_bytes: int) -> None:
        """Sets the limit of buffers on the host, at least `least_memory_bytes`.

        No step may be under way, nor a commit.
        """
        limit_bytes = max(num_bytes, self.subgroups.least_memory_bytes)
        if limit_bytes != self.memory_bytes:
            self.memory_bytes = limit_bytes
            if not self.is_new:
                self.choose_cached()
                self.mover.drop_prefetched()
        self.fleet.limit_memory(limit_bytes)

    def note_finished(self, record: CommitRecord) -> None:
        """Makes what was written the last finished step; no write may be in flight."""
        self.chunks.promote_stored()
        self.finished = record

    def choose_cached(self) -> None:
        """Chooses the state that stays in memory; no task may be under way."""
        self.cache_only(self.subgroups.choose_cached(self.memory_bytes, self._moved))

    def note_moved(self, moved: Collection[Subgroup]) -> None:
        """Chooses cached state anew if a step has moved subgroups that none has."""
        if self._moved is None or not self._moved.issuperset(moved):
            self._moved = (self._moved or frozenset()).union(moved)
            self.choose_cached()

    def cache_only(self, cached: frozenset[Subgroup]) -> None:
        """Keeps the state of these subgroups in memory, and writes that of others."""
        if cached != self._cached:
            self._flush()
            self.mover.cache_only(cached)
            self._cached = cached

    def _flush(self) -> None:
        if self.mover.flush():
            self.chunks.end_flush()

    def assign(self, assignment: Assignment) -> None:
        """Sets it between steps: tasks read it when they are made and computed."""
        if assignment.updater is not None:
            self.mover.set_remote_limit(assignment.updater.num_at_once)
        self.assignment = assignment
        self.assigned = frozenset(assignment.subgroups)

    # --- a commit --------------------------------------------------------------------

    def commit_finished(self) -> None:
        """Commits the last finished step, after its deferred writes."""
        self._flush()
        self.chunks.link_unwritten()
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
