"""The params of a step: read ahead of the programs, or in memory.

Invariant: a unit comes from one of the two, in all calls of a step and in its update.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence

import jax
from jax import lax

from jaxinf.streaming.move.fetch import Fetcher, Source
from jaxinf.streaming.move.mover import MoverCounts
from jaxinf.streaming.move.resident import Resident, Version
from jaxinf.streaming.move.scratch import aligned
from jaxinf.streaming.program.graph import Piece
from jaxinf.streaming.program.meshes import piece_sharding
from jaxinf.streaming.program.units import Places, Unit
from jaxinf.typing import Array

__all__ = ["MemoryParams", "Params", "StoreParams"]


class Params(ABC):
    """Where the params of programs come from.

    Attributes:
      counts: Traffic and waiting time of reads.
    """

    counts: MoverCounts

    @abstractmethod
    def begin(self, check: Callable[[], None], *, is_last: bool = True) -> None:
        """Gets ready for a run of programs; blocks.

        Args:
          check: Called before long reads; may raise.
          is_last: Whether updates of these params follow.
        """

    @abstractmethod
    def get(self, number: int, piece: Piece) -> jax.Array:
        """Returns a part of the params for the call of that number; blocks."""

    @abstractmethod
    def again(self, piece: Piece) -> jax.Array:
        """Returns a part of the params beside the plan; blocks while it is read."""

    @abstractmethod
    def stop(self) -> None:
        """Ends a run; no program may be in flight."""

    # What is all in memory has nothing to do for these.

    def done(self, number: int) -> None:  # noqa: B027
        """Notes that a call has run; frees what no later call needs."""

    def end(self) -> None:  # noqa: B027
        """Notes that a step has updated the params."""

    def rest(self) -> None:  # noqa: B027
        """Frees the memory for reading until the next run."""

    def close(self) -> None:  # noqa: B027
        """Stops, and frees the memory for reading; idempotent."""


class StoreParams(Params):
    """Params of a store, for programs and for updates.

    Args:
      places: The store's units.
      fetcher: Reads those units that do not stay.
      source: The source of units.
      resident: The units that stay.
      stays: Those of these programs.
      version: Returns the store and its last finished step.
      in_place: Those of `stays` that no program reads after their update.
      gives: Those of them that updates can take.
      is_shared: Whether other units stay, too, for someone else.

    Attributes:
      stays: As given.
      counts: Traffic and waiting time of the reads.
    """

    def __init__(
        self,
        places: Places,
        fetcher: Fetcher,
        source: Source,
        resident: Resident,
        *,
        stays: Collection[Unit],
        version: Callable[[], Version],
        in_place: Collection[Unit] = (),
        gives: Collection[Unit] = (),
        is_shared: bool = False,
    ) -> None:
        self._fetcher = fetcher
        self.counts = MoverCounts()
        self._places = places
        self._source = source
        self._resident = resident
        self.stays = stays
        self._is_shared = is_shared
        self._in_place = in_place
        self._gives = gives
        self._version = version

    def begin(self, check: Callable[[], None], *, is_last: bool = True) -> None:
        """Starts to read; blocks until all that stays is there."""
        self._fetcher.free_updates()
        self._fetcher.counts = self.counts
        missing = self._resident.begin(
            self._version(), self.stays, self._in_place, is_shared=self._is_shared
        )
        if missing:
            self._source.begin()
        for unit in missing:
            check()
            self._resident.bring(unit, self._source.read)
            self.counts.num_read_bytes += unit.num_bytes
        self._fetcher.begin(is_last=is_last)

    def get(self, number: int, piece: Piece) -> jax.Array:
        """As `Params.get`."""
        unit = self._places.unit(piece)
        if unit in self.stays:
            array = self._resident.get(unit)
        else:
            array = self._fetcher.get(number, unit)
        return self._part(unit, piece, array)

    def again(self, piece: Piece) -> jax.Array:
        """As `Params.again`."""
        unit = self._places.unit(piece)
        if unit in self.stays:
            return self._part(unit, piece, self._resident.get(unit))
        shards = unit.views(aligned(unit.held_bytes))
        self._source.read_again(unit, shards)
        return self._part(unit, piece, unit.on_devices(shards))

    def _part(self, unit: Unit, piece: Piece, array: jax.Array) -> jax.Array:
        part = self._places.part(unit, piece)
        if not part.index and not part.rows:
            return array
        if unit.sharding is None:
            return part.of(array)
        for number in part.index:
            array = lax.index_in_dim(array, number, keepdims=False)
        if part.rows is not None:
            array = lax.slice_in_dim(array, *part.rows)
        return jax.device_put(array, piece_sharding(unit.sharding, part))

    def done(self, number: int) -> None:
        """As `Params.done`."""
        self._fetcher.done(number)

    def stop(self) -> None:
        """As `Params.stop`."""
        self._fetcher.stop()

    def take(self, unit: Unit) -> Sequence[Array] | None:
        """Returns a unit's shards for its update; None if it has to read them."""
        if unit not in self.stays:
            return self._fetcher.take(unit)
        return self._resident.take(unit) if unit in self._gives else None

    def target(self, unit: Unit) -> Sequence[Array] | None:
        """Returns memory for a unit's new params; None if they are not needed here."""
        return self._resident.target(unit) if unit in self.stays else None

    def free(self, unit: Unit) -> None:
        """Notes that a unit is updated."""
        if unit in self.stays:
            self._resident.free(unit)
        else:
            self._fetcher.free(unit)

    def end(self) -> None:
        """As `Params.end`."""
        self._resident.end()

    @property
    def held_bytes(self) -> int:
        """Memory of the host for reading that is held now."""
        return self._fetcher.held_bytes

    def rest(self) -> None:
        """As `Params.rest`."""
        self._fetcher.rest()

    def close(self) -> None:
        """As `Params.close`; what stays may be another's, too."""
        self._fetcher.close()


class MemoryParams(Params):
    """Params that are all in memory.

    Args:
      leaves: Returns them; called when a run begins.
    """

    def __init__(self, leaves: Callable[[], Sequence[jax.Array]]) -> None:
        self._leaves = leaves
        self._held: Sequence[jax.Array] = ()
        self.counts = MoverCounts()

    def begin(self, check: Callable[[], None], *, is_last: bool = True) -> None:
        """As `Params.begin`."""
        self._held = self._leaves()

    def get(self, number: int, piece: Piece) -> jax.Array:
        """As `Params.get`."""
        return self.again(piece)

    def again(self, piece: Piece) -> jax.Array:
        """As `Params.again`."""
        leaf = self._held[piece.leaf]
        return piece.of(leaf) if piece.index or piece.rows else leaf

    def stop(self) -> None:
        """As `Params.stop`; an update may take the params' memory now."""
        self._held = ()
