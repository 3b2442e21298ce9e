"""The values of a step between the calls that make and read them.

    call a makes v ─► … ─► leaves ─► … ─► gone ─► … ─► comes back ─► call b reads v
                                     memory is free in between

    device's memory is the host's     v ─► drive ─► memory, which the device reads
    device with memory of its own     v ─► pinned ─► drive ─► memory ─► pinned ─► v

Invariant: a value that was away has the bits that it left with. What is in memory at
any time is what the plan says, however slow the drives are: what still has to be
written is waited for, or comes back from the host's memory and is not read.
"""

import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np

from jaxinf import compat
from jaxinf.streaming.move.scratch import Part, Scratch, place_bytes
from jaxinf.streaming.move.uploads import Uploads
from jaxinf.streaming.move.workers import Dropped, MoveCounts, Workers
from jaxinf.streaming.plan.calls import Plan, Slot, Tiers
from jaxinf.streaming.plan.leaving import NUM_COPIES
from jaxinf.streaming.program.lifetimes import Stay, occupancy
from jaxinf.streaming.program.meshes import default_device
from jaxinf.streaming.program.shards import PINNED
from jaxinf.transfer import PAGE_BYTES, Buffer, BufferPool, span
from jaxinf.typing import Array

_OUT, _AHEAD = range(2)  # queues of a device with memory of its own


@dataclass(eq=False)
class _Away:
    """A value that is leaving, away, or on its way back.

    Attributes:
      parts: Its place on drives; none if it stays on the host.
      value: On the device, until it is on the host, and when it is back.
      host: On the host, until it is written, and back if it comes from there.
      num_to_write, num_to_read: Parts that drives have not written, or read.
      memory: Memory of the host that it is read into.
      is_due: Whether the device has memory for it, and its way back has not begun.
      is_forwarded: Whether it comes back from `host`, although a drive will have it.
    """

    slot: Slot
    parts: Sequence[Part]
    value: jax.Array | None
    shape: tuple[int, ...]
    dtype: Any
    sharding: Any
    num_to_write: int
    num_to_read: int
    has_link: bool
    host: jax.Array | None = None
    memory: Buffer | None = None
    is_due: bool = False
    is_forwarded: bool = False
    is_back: bool = False
    error: BaseException | None = None

    @property
    def is_read(self) -> bool:
        return self.memory is not None and not self.num_to_read

    @property
    def is_on_device(self) -> bool:
        """Whether this holds it in the device's memory, which may be the host's."""
        is_leaving = self.host is not None and not self.has_link
        return self.value is not None or is_leaving

    @property
    def is_moving(self) -> bool:
        is_reading = self.memory is not None and self.num_to_read > 0
        return is_reading or self.num_to_write > 0

    @property
    def array(self) -> Array:
        """The array in the memory that it was read into."""
        assert self.memory is not None, "it was read"
        flat = np.frombuffer(self.memory.array, self.dtype, math.prod(self.shape))
        return flat.reshape(self.shape)


class Values:
    """Holds values, those in memory and those elsewhere. Used from one thread.

    Args:
      plan: The calls of a step, which say when values are absent; by default all
        values stay in memory.
      scratch: Files for values on drives, closed with this; without folders if no
        value goes there.
      tiers: Where values wait that leave a device with memory of its own; None if its
        memory is the host's, and they wait on drives.
    """

    def __init__(
        self,
        plan: Plan | None = None,
        scratch: Scratch | None = None,
        tiers: Tiers | None = None,
    ) -> None:
        self._scratch = Scratch(()) if scratch is None else scratch
        evictions = {} if plan is None else plan.evictions
        lives = {} if plan is None else plan.lives
        self._has_link = tiers is not None
        self._order = tiers.on_drive if tiers else ()
        self._places = {
            slot: self._scratch.allocate(lives[slot].num_bytes)
            for slot in (self._order if tiers else evictions)
        }
        self._scratch.reserve()
        self._room: Sequence[int] = tiers.room if tiers else ()
        self._leaving_bytes = tiers.leaving_bytes if tiers else 0
        most_bytes = max(self._room, default=0)
        if plan is not None and not tiers:
            most_bytes = _most_back(plan, self._places)
        registry = compat.memory_registry(default_device()) if tiers else None
        self._pool = BufferPool(max(most_bytes, PAGE_BYTES), registry=registry)
        self._uploads = Uploads(is_registered=registry is not None)
        self._workers = Workers([1, 1], "jaxinf-activations")
        self._changed = self._workers.changed
        in_order = sorted(evictions.items(), key=lambda item: item[1].needed)
        first_gone = sorted(in_order, key=lambda item: item[1].gone)
        self._leaving = _by_call((slot, one.written) for slot, one in first_gone)
        self._gone = _by_call((slot, one.gone) for slot, one in in_order)
        self._back = _by_call((slot, one.back) for slot, one in in_order)
        self._ends = _by_call((s, lives[s].takers[-1]) for s in evictions)
        self._held: dict[Slot, jax.Array] = {}
        self._away: dict[Slot, _Away] = {}
        self._counts = MoveCounts()
        self.reset()

    # --- a step, call by call ------------------------------------------------------

    def __getitem__(self, slot: Slot) -> jax.Array:
        """Returns a value; blocks until it is back.

        Raises:
          StoreIOError: The drive failed.
        """
        if slot not in self._held:
            away = self._away[slot]
            self._await(lambda: away.is_back or away.error is not None)
            if away.error is not None:
                raise away.error
            value = away.value
            if value is None:  # the device reads it in place
                put = jax.device_put(away.array, away.sharding)
                value = away.value = jax.block_until_ready(put)
            self._held[slot] = value
        return self._held[slot]

    def before(self, number: int) -> None:
        """Makes ready what the call of that number needs; may block.

        It waits for values that must be gone, and lets others come back.
        """
        if self._room:
            with self._changed:
                self._read_bytes = self._room[number]
                self._changed.notify_all()
        for slot in self._gone.get(number, ()):
            away = self._away[slot]
            self._await(lambda one=away: not one.is_on_device)
            del self._held[slot]
        for slot in self._back.get(number, ()):
            self._come_back(self._away[slot])

    def put(self, slots: Sequence[Slot | None], outputs: Sequence[jax.Array]) -> None:
        """Takes a call's outputs, those that have a slot."""
        for slot, output in zip(slots, outputs, strict=True):
            if slot is not None:
                self._held[slot] = output

    def after(self, number: int, drops: Sequence[Slot]) -> None:
        """Drops what no call after that of this number reads; lets others leave."""
        for slot in drops:
            del self._held[slot]
        for slot in self._leaving.get(number, ()):
            self._leave(slot, self._held[slot])

    def done(self, number: int) -> None:
        """Frees memory that the call of that number was the last to read; may block."""
        for slot in self._ends.get(number, ()):
            away = self._away[slot]
            self._await(lambda one=away: not one.is_moving)
            away.value = None
            self._free(away)
            del self._away[slot]

    def reset(self) -> None:
        """Drops everything; no call may be under way. Blocks until no value moves."""
        self._held.clear()
        self._workers.reset()
        self._scratch.drop()
        self._uploads.drop()
        for away in self._away.values():
            away.value = away.host = None
            self._free(away)
        self._away.clear()
        self._error: BaseException | None = None
        self._way_bytes = self._leaving_bytes
        self._read_bytes = self._pool.capacity_bytes
        self._is_ahead = False
        self._pool.free_idle()  # it goes back to the system between steps

    def counts(self) -> MoveCounts:
        """Returns the traffic of values since the last call."""
        with self._changed:
            counts, self._counts = self._counts, MoveCounts()
        return counts

    def close(self) -> None:
        """Frees memory and files, and ends the threads; idempotent."""
        self.reset()
        self._workers.close()
        self._uploads.close()
        self._pool.close()
        self._scratch.close()

    # --- out -----------------------------------------------------------------------

    def _leave(self, slot: Slot, value: jax.Array) -> None:
        parts = self._places.get(slot, ())
        form = value.shape, value.dtype, value.sharding
        num_parts = len(parts)
        away = _Away(slot, parts, value, *form, num_parts, num_parts, self._has_link)
        with self._changed:
            self._away[slot] = away
        if self._has_link:
            if not self._is_ahead:
                self._is_ahead = True
                self._start(_AHEAD, self._read_ahead)
            self._start(_OUT, partial(self._copy_out, away))
        else:
            self._write(away, value)

    def _copy_out(self, away: _Away) -> None:
        """Copies a value to the host as soon as there is room; on a thread."""
        with self._changed:
            num_bytes = NUM_COPIES * place_bytes(away.parts)
            self._workers.wait(lambda: num_bytes <= self._way_bytes)
            self._way_bytes -= num_bytes
        value = jax.block_until_ready(away.value)
        pinned = away.sharding.with_memory_kind(PINNED)
        with span("out", away.slot, num_bytes=value.nbytes):
            host = jax.block_until_ready(jax.device_put(value, pinned))
        del value
        with self._changed:
            self._counts.num_out_bytes += host.nbytes
        self._write(away, host)

    def _write(self, away: _Away, host: jax.Array) -> None:
        """Starts to write a value, in place of which the host has it."""

        def written(future: Future[int]) -> None:
            if future.cancelled():
                return
            if (error := future.exception()) is not None:
                self._fail(error)
                return
            with self._changed:
                self._counts.num_written_bytes += future.result()
                away.num_to_write -= 1
                self._settle(away)

        with self._changed:
            away.host, away.value = host, None
            self._changed.notify_all()
        for future in self._scratch.start_write(away.parts, host, away.slot):
            future.add_done_callback(written)

    def _settle(self, away: _Away) -> None:
        """Frees a value's memory on its way to drives once nothing needs it there."""
        is_source = not away.is_back and (away.is_forwarded or not away.parts)
        if away.host is not None and not away.num_to_write and not is_source:
            away.host = None
            if self._has_link:
                self._way_bytes += NUM_COPIES * place_bytes(away.parts)
        self._changed.notify_all()

    # --- back ----------------------------------------------------------------------

    def _come_back(self, away: _Away) -> None:
        """Lets a value come back, for which the device has memory; does not block."""
        with self._changed:
            is_on_host = self._has_link and away.host is not None
            away.is_forwarded = is_on_host and bool(away.parts)
            self._counts.num_forwarded += away.is_forwarded
            self._changed.notify_all()
            if self._has_link:
                away.is_due = True
                self._upload(away)
        if not self._has_link:
            self._read(away)

    def _read_ahead(self) -> None:
        """Reads values in the order of their use, as the host has room; on a thread."""
        for slot in self._order:
            with self._changed:
                self._workers.wait(partial(self._can_read, slot))
                away = self._away[slot]
            if not away.is_forwarded:
                self._read(away)

    def _can_read(self, slot: Slot) -> bool:
        away = self._away.get(slot)
        if away is None or away.is_forwarded:
            return away is not None
        room_bytes = self._read_bytes - self._pool.used_bytes
        return not away.num_to_write and place_bytes(away.parts) <= room_bytes

    def _read(self, away: _Away) -> None:
        def read(future: Future[int]) -> None:
            if future.cancelled():
                return
            with self._changed:
                away.num_to_read -= 1
                if (error := future.exception()) is None:
                    self._counts.num_read_bytes += future.result()
                away.error = away.error or error  # others still come back
                if away.is_read and away.error is not None:
                    self._free(away)
                elif away.is_read:
                    away.is_back = not self._has_link
                    self._upload(away)
                self._changed.notify_all()

        away.memory = self._pool.acquire(place_bytes(away.parts), block=False)
        assert away.memory is not None, "there is room for what comes back"
        memory = away.memory.array
        for future in self._scratch.start_read(away.parts, memory, away.slot):
            future.add_done_callback(read)

    def _upload(self, away: _Away) -> None:
        """Copies a value to the device, if it is due and on the host."""
        if not (away.is_due and (away.host is not None or away.is_read)):
            return
        away.is_due = False

        def ended(copies: Sequence[jax.Array], error: BaseException | None) -> None:
            with self._changed:
                away.error = error
                if error is None:
                    away.value, away.is_back = copies[0], True
                self._free(away)
                self._settle(away)

        source = away.array if away.host is None else away.host
        self._uploads.start([(source, away.sharding)], ended, away.slot)

    def _free(self, away: _Away) -> None:
        if away.memory is not None:
            away.memory.release()
            away.memory = None

    # --- jobs, and waiting for them --------------------------------------------------

    def _start(self, queue: int, job: Callable[[], None]) -> None:
        def tried() -> None:
            try:
                job()
            except Dropped:
                pass
            except BaseException as error:
                self._fail(error)

        self._workers.submit(queue, tried)

    def _fail(self, error: BaseException) -> None:
        """Notes what prevented a value from leaving; nothing goes on after it."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def _await(self, is_done: Callable[[], bool]) -> None:
        began_s = time.perf_counter()
        with span("wait", "jaxinf-activations"), self._changed:
            self._changed.wait_for(lambda: is_done() or self._error is not None)
            self._counts.waited_s += time.perf_counter() - began_s
            if self._error is not None:
                raise self._error


def _by_call(pairs: Iterable[tuple[Slot, int]]) -> Mapping[int, list[Slot]]:
    found: defaultdict[int, list[Slot]] = defaultdict(list)
    for slot, number in pairs:
        found[number].append(slot)
    return found


def _most_back(plan: Plan, places: Mapping[Slot, Sequence[Part]]) -> int:
    """The most memory, in whole pages, of values that have come back."""
    lives, evictions = plan.lives, plan.evictions
    stays = (
        Stay(evictions[slot].back, lives[slot].takers[-1] + 2, place_bytes(parts))
        for slot, parts in places.items()
    )
    return int(occupancy(len(plan.calls) + 1, stays).max(initial=0))
