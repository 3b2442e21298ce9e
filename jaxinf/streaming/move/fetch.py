"""Reads params before the programs need them, into memory of a fixed size.

    thread: read unit ► put on the JAX device          runner: get ► call ► done
              waits for room in the window  ◄───── memory of units no longer needed
                                            ◄───── update: take ► free

Invariant: units are read in the order in which calls need them, so those that a call
waits for always get room (windows.py).
"""

import threading
import time
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import jax

from jaxinf.streaming.move.windows import Brought, Lease, Window
from jaxinf.streaming.plan.reads import Fetch
from jaxinf.streaming.program.units import Unit
from jaxinf.typing import Array

__all__ = ["FetchCounts", "Fetcher", "Source"]


class Source(Protocol):
    """The source of units."""

    def begin(self) -> None:
        """Prepares for the reads of a step."""
        ...

    def read(self, unit: Unit, shards: Sequence[Array]) -> None:
        """Fills arrays with the unit's shards; blocks."""
        ...

    def read_again(self, unit: Unit, shards: Sequence[Array]) -> None:
        """Fills arrays with a unit's shards beside the reads of a step; blocks."""
        ...

    def close(self) -> None:
        """Ends the reads of a step."""
        ...


@dataclass
class FetchCounts:
    """Traffic and waiting time since the previous counts.

    Attributes:
      num_bytes: Bytes of params read.
      num_fetches, num_ready: Number of units that calls requested, and of those that
        were already there.
      waited_s: Time that calls waited.
      read_s: Time in which units were read.
    """

    num_bytes: int = 0
    num_fetches: int = 0
    num_ready: int = 0
    waited_s: float = 0.0
    read_s: float = 0.0

    @property
    def hit_rate(self) -> float:
        """Share of the requests that were already there."""
        return self.num_ready / self.num_fetches if self.num_fetches else 1.0


class Fetcher:
    """Reads a step's units ahead, on a thread of its own.

    Args:
      source: The source of units.
      fetches: The reads of each step, in order.
      window: Memory for units; at least `window_bytes`.

    Attributes:
      fetches: The reads of each step.
    """

    def __init__(
        self, source: Source, fetches: Sequence[Fetch], window: Window
    ) -> None:
        self._source = source
        self.fetches = fetches
        self._window = window
        self._changed = threading.Condition()
        self._ready: dict[tuple[Unit, int], Brought] = {}
        self._for_update: dict[Unit, tuple[Sequence[Array], Lease]] = {}
        self._lasts = _lasts(fetches)
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None
        self._is_stopped = False
        self.counts = FetchCounts()

    def begin(self) -> None:
        """Starts reading for a step; the previous step and its updates have ended."""
        self.stop()
        self.free_updates()
        self._is_stopped, self._error = False, None
        if not self.fetches:
            return
        self._source.begin()
        self._thread = threading.Thread(
            target=self._run, name="jaxinf-fetch", daemon=True
        )
        self._thread.start()

    def get(self, number: int, unit: Unit) -> jax.Array:
        """Returns the unit for the call of that number; blocks until it has been read.

        Raises:
          BaseException: The exception that stopped the reads.
        """
        lasts = self._lasts[unit]
        key = (unit, lasts[bisect_left(lasts, number)])
        counts = self.counts
        with self._changed:
            counts.num_fetches += 1
            counts.num_ready += key in self._ready
            began_s = time.perf_counter()
            self._changed.wait_for(lambda: key in self._ready or self._error)
            counts.waited_s += time.perf_counter() - began_s
            if self._error is not None:
                raise self._error
            return self._ready[key].on_device

    def done(self, number: int) -> None:
        """Notes that a call has run; frees units that no later call needs."""
        with self._changed:
            gone = [key for key in self._ready if key[1] <= number]
            held = [self._ready.pop(key) for key in gone]
        for one in held:
            one.calls.release()

    def take(self, unit: Unit) -> Sequence[Array] | None:
        """Returns the params of a unit whose gradient is complete, for its update.

        They are its shards, and stay until `free`. None if the update has to read them.
        """
        with self._changed:
            shards, _ = self._for_update.get(unit, (None, None))
        return shards

    def free(self, unit: Unit) -> None:
        """Frees what `take` returned."""
        with self._changed:
            _, held = self._for_update.pop(unit, (None, None))
        if held is not None:
            held.release()

    def stop(self) -> None:
        """Ends the reads, and frees the units; no program may be in flight.

        Units that updates take stay until these have freed them.
        """
        self._is_stopped = True
        if self._thread is not None:
            self._thread.join()  # it looks at the flag while it waits for room
            self._thread = None
        self._free_all()
        self._source.close()

    @property
    def held_bytes(self) -> int:
        """Memory of the host that reads have now."""
        return self._window.held_bytes

    def rest(self) -> None:
        """Frees the memory until the next step; no step is under way."""
        self.free_updates()
        self._window.rest()

    def close(self) -> None:
        """Stops, and frees the memory."""
        self.stop()
        self.free_updates()
        self._window.close()

    def _free_all(self) -> None:
        with self._changed:
            held, self._ready = self._ready, {}
        for one in held.values():
            one.calls.release()

    def free_updates(self) -> None:
        """Frees units that updates of a step have left, which was given up."""
        with self._changed:
            held, self._for_update = self._for_update, {}
        for _, one in held.values():
            one.release()

    def _run(self) -> None:
        try:
            for fetch in self.fetches:
                if not self._bring(fetch):
                    break
            self._window.settle()
        except BaseException as error:
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _bring(self, fetch: Fetch) -> bool:
        """Reads a unit; returns whether the step goes on."""
        unit = fetch.unit
        brought = self._window.bring(
            unit,
            lambda shards: self._read(unit, shards),
            lambda: self._is_stopped,
            is_for_update=fetch.gradient is not None,
        )
        if brought is None:
            return False
        with self._changed:
            self.counts.num_bytes += unit.num_bytes
            self._ready[unit, fetch.last] = brought
            if brought.update is not None:
                self._for_update[unit] = brought.shards, brought.update
            self._changed.notify_all()
        return True

    def _read(self, unit: Unit, shards: Sequence[Array]) -> None:
        began_s = time.perf_counter()
        self._source.read(unit, shards)
        self.counts.read_s += time.perf_counter() - began_s


def _lasts(fetches: Sequence[Fetch]) -> Mapping[Unit, Sequence[int]]:
    """Maps each unit to the last calls of its fetches, in order."""
    found: dict[Unit, list[int]] = {}
    for fetch in fetches:
        found.setdefault(fetch.unit, []).append(fetch.last)
    return found
