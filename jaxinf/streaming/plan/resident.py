"""Chooses the params that stay in memory between steps.

Invariant: what stays takes no more than was asked for, and saves the most bytes on the
drive for each byte of memory.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, TypeAlias

from jaxinf.errors import BudgetError
from jaxinf.schedule.placement import Candidate, reside
from jaxinf.schedule.reads import Fetch
from jaxinf.streaming.plan.calls import Call, Plan, Slot
from jaxinf.streaming.plan.memory import Division
from jaxinf.streaming.plan.reads import completions
from jaxinf.streaming.program.graph import Piece
from jaxinf.streaming.program.units import StoreUnits, Unit
from jaxinf.terminal import given_bytes

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
    """What stays in memory beside a plan's programs.

    Attributes:
      units: The units of a store that stay.
      in_place: Those that no program reads after their update.
      num_bytes: Memory for all params that stay.
      other_bytes: Memory for what stays beside params.
    """

    units: frozenset[Unit] = frozenset()
    in_place: frozenset[Unit] = frozenset()
    num_bytes: int = 0
    pieces: frozenset[Piece] = frozenset()
    other_bytes: int = 0

    @property
    def all_bytes(self) -> int:
        return self.num_bytes + self.other_bytes

    def applied(self, plan: Plan) -> Plan:
        """Returns the plan with these units in memory; they do not count in calls."""
        return plan.varied(resident=self.pieces, resident_bytes=self.num_bytes)

    def left(self, division: Division) -> Division:
        """Returns the memory that is left beside what stays.

        An update on the host takes a unit from a device with memory of its own, and
        makes the new one, in host memory.
        """
        programs, staged = division.programs - self.all_bytes, division.staged
        if staged:
            largest = max((unit.page_bytes for unit in self.units), default=0)
            staged = max(1, staged - 2 * largest)
        return replace(division, programs=programs, staged=staged)


@dataclass(frozen=True)
class ResidentChooser:
    """Chooses the units of a plan that stay.

    Attributes:
      updated: Units that are updated alone; others never stay.
      reads: Returns the reads of a plan's step with given memory.
      rereads: Whether an update reads the params of a unit from the drive, if no read
        for a program serves it.

    Raises:
      BudgetError: More is to stay than there is.
    """

    resident: Resident
    store_units: StoreUnits
    updated: Collection[Unit]
    division: Division
    reads: Callable[[Plan, Division], Sequence[Fetch]]
    rereads: Callable[[Unit], bool]
    measure: Callable[[Plan], int]

    def __post_init__(self) -> None:
        division = self.division
        if self._amount > division.programs:
            raise BudgetError(
                division.limit,
                f"resident={self.resident!r}: expected room for {self._amount} bytes "
                f"of params that stay, found {division.programs}, which are left for "
                "the program",
                self._amount - division.programs,
                ", or let fewer bytes stay",
            )

    def choose(self, plan: Plan) -> ResidentUnits:
        if not self._amount:
            return ResidentUnits()
        calls = plan.calls
        in_place = updated_in_place(calls, self.store_units)
        twice = completions(calls, self.store_units).keys() - in_place
        sizes = {
            unit: unit.page_bytes * (2 if unit in twice else 1)
            for unit in sorted(self.updated, key=lambda unit: unit.place)
        }
        chosen = list(sizes)
        if self.resident != "params":
            chosen = reside(self._candidates(plan, sizes), self._amount)
        units = frozenset(chosen)
        pieces = {piece for call in calls for piece in call.reads}
        return ResidentUnits(
            units,
            in_place & units,
            sum(sizes[unit] for unit in chosen),
            frozenset(
                piece for piece in pieces if self.store_units.unit(piece) in units
            ),
        )

    @cached_property
    def _amount(self) -> int:
        most = 0 if self.resident is None else sum(u.page_bytes for u in self.updated)
        return min(self.resident, most) if isinstance(self.resident, int) else most

    def _candidates(self, plan: Plan, sizes: Mapping[Unit, int]) -> Iterator[Candidate]:
        """Yields the units that are read for programs, and what each would save."""
        programs = self.division.programs - self._amount
        plan = plan.varied(peak_bytes=self.measure(plan))
        found: dict[Unit, list[Fetch]] = {}
        for fetch in self.reads(plan, replace(self.division, programs=programs)):
            found.setdefault(fetch.unit, []).append(fetch)
        for unit, num_bytes in sizes.items():
            if own := found.get(unit):
                is_served = any(fetch.gradient is not None for fetch in own)
                num_reads = len(own) + (not is_served and self.rereads(unit))
                apart = own[-1].first - own[0].last
                yield Candidate(unit, num_bytes, num_reads * unit.num_bytes, apart)


def updated_in_place(calls: Sequence[Call], store_units: StoreUnits) -> frozenset[Unit]:
    """Returns the units whose params no program reads when their gradient is there.

    The program before the one that completes the gradient may still run, unless that
    one waits for it.
    """
    readers: dict[Unit, set[int]] = {}
    for number, call in enumerate(calls):
        for piece in call.reads:
            readers.setdefault(store_units.unit(piece), set()).add(number)

    def is_over(reader: int, last: int) -> bool:
        if reader != last - 1:
            return reader <= last
        makes = calls[reader].makes
        return any(isinstance(r, Slot) and r in makes for r in calls[last].takes)

    return frozenset(
        unit
        for unit, last in completions(calls, store_units).items()
        if not unit.is_shared  # it is put together when the step has ended
        and all(is_over(reader, last) for reader in readers.get(unit, ()))
    )
