"""State that stays with an updater from step to step, such as on a JAX device.

    step:    loads what is not held ─► updater ─► new versions, held
                                          └─► buffer ─► drive: what is written at once
    commit:  held alone ─► buffer ─► drive

Invariant: there is one version, that of the last step. A step that is given up drops
what it has updated, so that the committed version is read again.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from jaxinf.csd import Csd, CsdBuffer
from jaxinf.engine.pipeline import Task
from jaxinf.engine.subgroup_layout import SubgroupLayout
from jaxinf.engine.updaters import Updater
from jaxinf.io import ByteMeters
from jaxinf.layout import Subgroup


@dataclass(eq=False)
class Held:
    """A subgroup's states with an updater.

    Attributes:
      unwritten: those whose newest version is not on the drive.
    """

    layout: SubgroupLayout
    states: dict[int, Any] = field(default_factory=dict)
    unwritten: frozenset[int] = frozenset()


class HeldStates:
    """The subgroups whose states an updater has, each for one task at a time."""

    def __init__(self, meters: ByteMeters) -> None:
        self._meters = meters
        self._held: dict[Subgroup, Held] = {}
        self._updated: set[Subgroup] = set()

    def update(self, layout: SubgroupLayout) -> Held:
        """Returns a subgroup for an update, which replaces states in it.

        One that the step has updated before, in vain, is empty again.
        """
        subgroup = layout.subgroup
        if subgroup in self._updated:
            del self._held[subgroup]
        self._updated.add(subgroup)
        return self._held.setdefault(subgroup, Held(layout))

    def states(self, subgroup: Subgroup) -> Collection[int]:
        held = self._held.get(subgroup)
        return () if held is None else held.states.keys()

    def end_step(self) -> None:
        """Notes that the step's versions count."""
        self._updated.clear()

    def give_up(self) -> None:
        """Drops what the step has updated."""
        for subgroup in self._updated:
            del self._held[subgroup]
        self._updated.clear()

    def keep(self, subgroups: Collection[Subgroup]) -> None:
        """Drops all others, of which nothing is unwritten."""
        self._held = {s: held for s, held in self._held.items() if s in subgroups}

    def writes(self, updater: Updater) -> Sequence[Task]:
        """Returns tasks that write what is not on the drive."""
        tasks = []
        for held in self._held.values():
            if held.unwritten:
                fetch = partial(self.fetch, updater, held.layout, held.unwritten)
                stores = tuple(sorted(held.unwritten))
                held.unwritten = frozenset()
                task = Task(held.layout, fetch, stores=stores, is_elsewhere=True)
                tasks.append(task)
        return tasks

    def fetch(
        self,
        updater: Updater,
        layout: SubgroupLayout,
        states: Collection[int],
        csd: Csd,
        buffer: CsdBuffer,
        tells: Collection[int] = (),
    ) -> None:
        """Copies states of a subgroup into its buffer; blocks."""
        del tells
        held = self._held[layout.subgroup].states
        updater.fetch(csd, buffer, layout.extents, {n: held[n] for n in states})
        num_bytes = sum([layout.extents[n].num_bytes for n in states])
        self._meters.add(link_down_bytes=num_bytes)
