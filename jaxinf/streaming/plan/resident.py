"""Chooses the params that stay in memory between steps.

Invariant: what stays takes no more than was asked for, and saves the most bytes on the
drive for each byte of memory.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, TypeAlias

from jaxinf.errors import BudgetError
from jaxinf.schedule.packer import Candidate, reside
from jaxinf.schedule.reads import Fetch
from jaxinf.streaming.plan.calls import Call, Slot
from jaxinf.streaming.plan.memory import Division
from jaxinf.streaming.plan.plan import Plan
from jaxinf.streaming.plan.reads import completions
from jaxinf.streaming.program.graph import Piece
from jaxinf.streaming.program.units import Places, Unit
from jaxinf.terminal import given_bytes

__all__ = [
    "AllResident",
    "Resident",
    "ResidentChooser",
    "ResidentUnits",
    "Residents",
    "beside",
    "check_resident",
    "updated_in_place",
]

Resident: TypeAlias = Literal["params"] | int | None


def check_resident(resident: int | str | None) -> Resident:
    """Returns `resident` with an amount in bytes.

    Raises:
      ValueError: It is neither ``"params"`` nor an amount.
    """
    if resident is None or resident == "params":
        return resident
    try:
        return given_bytes("resident", resident, least=0)
    except ValueError as error:
        raise ValueError(
            f'resident={resident!r}: expected "params" or bytes, such as "2GiB"'
        ) from error


@dataclass(frozen=True)
class ResidentUnits:
    """Units that stay.

    Attributes:
      units: The units.
      in_place: Those that no program reads after their update.
      num_bytes: Memory for all.
      pieces: The parts of params that they serve.
      other_bytes: Memory for what stays beside params.
    """

    units: frozenset[Unit] = frozenset()
    in_place: frozenset[Unit] = frozenset()
    num_bytes: int = 0
    pieces: frozenset[Piece] = frozenset()
    other_bytes: int = 0

    @property
    def all_bytes(self) -> int:
        """Memory for all that stays."""
        return self.num_bytes + self.other_bytes

    def applied(self, plan: Plan) -> Plan:
        """Returns the plan with these units in memory; they do not count in calls."""
        return replace(plan.beside(self.pieces), resident_bytes=self.num_bytes)


class Residents(ABC):
    """What stays in memory beside a plan's programs.

    Args:
      measure: Returns the memory of a plan's programs.
    """

    def __init__(self, measure: Callable[[Plan], int]) -> None:
        self._measure = measure

    @abstractmethod
    def choose(self, plan: Plan) -> ResidentUnits:
        """Returns what stays."""

    def peak_bytes(self, plan: Plan) -> int:
        """Returns the memory of a run's programs, with what stays."""
        units = self.choose(plan)
        return units.all_bytes + self._measure(units.applied(plan))

    def applied(self, plan: Plan) -> tuple[Plan, ResidentUnits]:
        """Returns the plan with what stays beside it, and that."""
        units = self.choose(plan)
        rest_bytes = plan.peak_bytes - units.all_bytes
        return replace(units.applied(plan), peak_bytes=rest_bytes), units


class AllResident(Residents):
    """All params stay, and what else there is.

    Args:
      num_bytes: Memory for params.
      other_bytes: Memory for the rest.
      measure: As for `Residents`.
    """

    def __init__(
        self, num_bytes: int, other_bytes: int, measure: Callable[[Plan], int]
    ) -> None:
        super().__init__(measure)
        self._num_bytes, self._other_bytes = num_bytes, other_bytes

    def choose(self, plan: Plan) -> ResidentUnits:
        """As `Residents.choose`; a part of a leaf is copied for its calls."""
        pieces = {piece for call in plan.calls.calls for piece in call.pieces}
        whole = frozenset(p for p in pieces if not p.index and not p.rows)
        return ResidentUnits(
            num_bytes=self._num_bytes, pieces=whole, other_bytes=self._other_bytes
        )


class ResidentChooser(Residents):
    """Chooses the units of a plan that stay.

    Args:
      resident: The option.
      places: The store's units.
      updated: Units that are updated alone; others never stay.
      division: Memory.
      reads: Returns the reads of a plan's step with given memory.
      rereads: Whether an update reads the params of a unit from the drive, if no read
        for a program serves it.
      measure: As for `Residents`.
    """

    def __init__(
        self,
        resident: Resident,
        places: Places,
        updated: Collection[Unit],
        division: Division,
        reads: Callable[[Plan, Division], Sequence[Fetch]],
        rereads: Callable[[Unit], bool],
        measure: Callable[[Plan], int],
    ) -> None:
        super().__init__(measure)
        self._resident = resident
        self._places = places
        self._updated = sorted(updated, key=lambda unit: (unit.leaf, unit.index))
        self._division = division
        self._reads = reads
        self._rereads = rereads
        if self._amount > division.programs:
            raise self._refusal()

    def choose(self, plan: Plan) -> ResidentUnits:
        """As `Residents.choose`."""
        if not self._amount:
            return ResidentUnits()
        calls = plan.calls.calls
        in_place = updated_in_place(calls, self._places, _read_again(plan))
        twice = completions(calls, self._places).keys() - in_place
        sizes = {
            unit: unit.page_bytes * (2 if unit in twice else 1)
            for unit in self._updated
        }
        chosen: Sequence[Unit] = self._updated
        if self._resident != "params":
            chosen = reside(self._candidates(plan, sizes), self._amount)
        units = frozenset(chosen)
        return ResidentUnits(
            units,
            in_place & units,
            sum(sizes[unit] for unit in chosen),
            frozenset(
                piece
                for call in calls
                for piece in call.pieces
                if self._places.unit(piece) in units
            ),
        )

    @cached_property
    def _amount(self) -> int:
        all_bytes = sum(unit.page_bytes for unit in self._updated)
        match self._resident:
            case None:
                return 0
            case int(amount):
                return min(amount, all_bytes)
            case _:
                return all_bytes

    def _candidates(self, plan: Plan, sizes: Mapping[Unit, int]) -> Iterator[Candidate]:
        """Yields the units that are read for programs, and what each would save."""
        programs = self._division.programs - self._amount
        plan = replace(plan, peak_bytes=self._measure(plan))
        found: dict[Unit, list[Fetch]] = {unit: [] for unit in self._updated}
        for fetch in self._reads(plan, replace(self._division, programs=programs)):
            found.setdefault(fetch.unit, []).append(fetch)
        for unit in self._updated:
            own = found[unit]
            if not own:
                continue
            is_served = any(fetch.gradient is not None for fetch in own)
            num_reads = len(own) + (not is_served and self._rereads(unit))
            apart = own[-1].first - own[0].last
            yield Candidate(unit, sizes[unit], num_reads * unit.num_bytes, apart)

    def _refusal(self) -> BudgetError:
        division = self._division
        return BudgetError(
            division.limit,
            f"resident={self._resident!r}: expected room for {self._amount} bytes of "
            f"params that stay, found {division.programs}, which are left for the "
            "program",
            self._amount - division.programs,
            ", or let fewer bytes stay",
        )


def beside(division: Division, units: ResidentUnits) -> Division:
    """Returns the memory that is left beside params that stay.

    An update on the host takes a unit from a device with memory of its own, and makes
    the new one, in host memory.
    """
    programs = division.programs - units.all_bytes
    staged = division.staged
    if staged:
        largest = max((unit.page_bytes for unit in units.units), default=0)
        staged = max(1, staged - 2 * largest)
    return replace(division, programs=programs, staged=staged)


def _read_again(plan: Plan) -> Callable[[Call], Sequence[Piece]]:
    """The params that are read beside a call if its segment runs forward again.

    A plan may choose that, and a value that is lost on a drive is computed again.
    """
    if not plan.is_offloaded:
        return lambda call: ()
    programs = plan.programs
    found = {
        id(backward): [
            value.origin for value in forward.inputs if isinstance(value.origin, Piece)
        ]
        for forward, backward in zip(programs.forward, programs.backward, strict=True)
    }
    return lambda call: found.get(id(call.program), ())


def updated_in_place(
    calls: Sequence[Call],
    places: Places,
    read_again: Callable[[Call], Sequence[Piece]] = lambda call: (),
) -> frozenset[Unit]:
    """Returns the units whose params no program reads when their gradient is there.

    The program before the one that completes the gradient may still run, unless that
    one waits for it.

    Args:
      calls: The calls of a step.
      places: The store's units.
      read_again: Returns what may be read in addition just before a call.
    """
    readers: dict[Unit, set[int]] = {}
    for number, call in enumerate(calls):
        for piece in (*call.pieces, *read_again(call)):
            readers.setdefault(places.unit(piece), set()).add(number)

    def is_over(reader: int, last: int) -> bool:
        if reader == last - 1:
            made = {slot for slot in calls[reader].outputs if slot is not None}
            return bool(made & {r for r in calls[last].inputs if isinstance(r, Slot)})
        return reader <= last

    return frozenset(
        unit
        for unit, last in completions(calls, places).items()
        if all(is_over(reader, last) for reader in readers.get(unit, ()))
    )
