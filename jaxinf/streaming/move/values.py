"""The values of a step between the calls that make and read them.

    call a makes v ─► … ─► leaves ─► … ─► gone ─► … ─► comes back ─► call b reads v
                                     memory is free in between

    device's memory is the host's     v ─► drive ─► buffer, which the device reads
    device with memory of its own     v ─► pinned ─► drive ─► buffer ─► (pinned ─►) v

Invariant: a value that was away has the bits that it left with. What is in memory at
any time is what the plan says, however slow the drives are: what still has to be
written is waited for, or comes back from the host's memory and is not read.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import jax

from jaxinf.streaming.move.host_buffers import HostBuffers
from jaxinf.streaming.move.scratch import Scratch, ScratchRun, array_in, place_bytes
from jaxinf.streaming.move.work_queues import Queue, WorkQueues
from jaxinf.streaming.plan.calls import Plan, ValueSlot
from jaxinf.streaming.plan.leaving import NUM_COPIES
from jaxinf.streaming.program.units import PINNED
from jaxinf.transfer import Buffer, ByteMeters, span
from jaxinf.typing import Array

_IN, _OUT = Queue("values in"), Queue("values out")


@dataclass(eq=False)
class _Away:
    """A value that is leaving, away, or on its way back.

    Attributes:
      form: Shape, dtype and sharding.
      parts: Place on drives; none if it stays on the host.
      value: On the device, until it is on the host, and when it is back.
      host: On the host, until it is written, and back if it comes from there.
      memory: The buffer that it is read into.
      is_written: Whether drives have it, or will not.
      is_here: Whether it comes back from `memory`, or from `host`, where it still is.
      is_due: Whether there is memory for it where programs read it.
      is_back: Whether it is there.
    """

    form: jax.ShapeDtypeStruct
    parts: Sequence[ScratchRun]
    value: jax.Array | None
    host: jax.Array | None = None
    memory: Buffer | None = None
    is_written: bool = False
    is_here: bool = False
    is_due: bool = False
    is_back: bool = False

    @property
    def num_bytes(self) -> int:
        """Memory that it takes on its way, in whole pages."""
        return place_bytes(self.parts)

    @property
    def array(self) -> Array:
        """The value in the memory that it was read into."""
        assert self.memory is not None, "it was read"
        return array_in(self.memory.array, self.form)


class Values:
    """Holds values, those in memory and those elsewhere. Used from one thread.

    Args:
      plan: The calls of a step, which say when values are absent, and where they wait.
      scratch: Files for values on drives, closed with this; without folders if no
        value goes there.
      jobs: Move values; when a step is given up, they are reset before this is.

    Attributes:
      moved: Bytes on drives, and over the link from a device with memory of its own.
      waited_s: Time that the caller has waited for values to be written or read.
    """

    def __init__(
        self,
        plan: Plan,
        scratch: Scratch | None = None,
        jobs: WorkQueues | None = None,
    ) -> None:
        self._scratch = Scratch(()) if scratch is None else scratch
        self._jobs = WorkQueues() if jobs is None else jobs
        self._changed = self._jobs.changed
        evictions, lives, waiting = plan.evictions, plan.lives, plan.waiting
        sizes = {slot: lives[slot].num_bytes for slot in waiting.on_drive}
        self._places = self._scratch.allocate(sizes)
        self._waiting, self._has_link = waiting, waiting.has_link
        self._way_bytes = waiting.leaving_bytes  # that are free, of values going out
        self._buffers = HostBuffers(
            self._jobs,
            "values",
            waiting.read_bytes,
            has_link=waiting.has_link,
            pinned_bytes=0,  # one at a time
        )
        in_order = sorted(evictions.items(), key=lambda item: item[1].needed)
        first_gone = sorted(in_order, key=lambda item: item[1].gone)
        self._leaving = _by_call((slot, one.written) for slot, one in first_gone)
        self._gone = _by_call((slot, one.gone) for slot, one in in_order)
        self._back = _by_call((slot, one.back) for slot, one in in_order)
        self._ends = _by_call((s, lives[s].takers[-1]) for s in evictions)
        self._held: dict[ValueSlot, jax.Array] = {}
        self._away: dict[ValueSlot, _Away] = {}
        self.moved, self.waited_s = ByteMeters(), 0.0

    # --- a step, call by call ------------------------------------------------------

    def __getitem__(self, slot: ValueSlot) -> jax.Array:
        """Returns a value; blocks until it is back.

        Raises:
          StoreIOError: The drive failed.
        """
        if slot not in self._held:
            away = self._away[slot]
            self._wait_for(lambda: away.is_back)
            if away.value is None:  # the device reads it in place
                put = jax.device_put(away.array, away.form.sharding)
                away.value = jax.block_until_ready(put)
            assert away.value is not None
            self._held[slot] = away.value
        return self._held[slot]

    def before(self, number: int) -> None:
        """Makes ready what the call of that number needs; may block.

        It waits for values that must be gone, and lets others come back.
        """
        for slot in () if number else self._waiting.on_drive:
            self._jobs.submit(partial(self._read, slot, self._away), _IN)
        for slot in self._gone.get(number, ()):
            self._wait_for(partial(self._is_gone, self._away[slot]))
            del self._held[slot]
        with self._changed:
            for slot in self._back.get(number, ()):
                away = self._away[slot]
                away.is_due, away.is_here = True, away.is_here or away.host is not None
                self._bring_back(away)

    def put(
        self, slots: Sequence[ValueSlot | None], outputs: Sequence[jax.Array]
    ) -> None:
        """Takes a call's outputs, those that have a slot."""
        for slot, output in zip(slots, outputs, strict=True):
            if slot is not None:
                self._held[slot] = output

    def after(self, number: int, drops: Sequence[ValueSlot]) -> None:
        """Drops what no call after that of this number reads; lets others leave."""
        for slot in drops:
            del self._held[slot]
        for slot in self._leaving.get(number, ()):
            self._leave(slot, self._held[slot])

    def done(self, number: int) -> None:
        """Frees memory that the call of that number was the last to read; may block."""
        for slot in self._ends.get(number, ()):
            away = self._away[slot]
            self._wait_for(lambda one=away: one.is_written)
            with self._changed:
                away.value = None
                self._free(away)

    def reset(self) -> None:
        """Drops everything; no call and no job of values may be under way."""
        self._held.clear()
        with self._changed:
            for away in self._away.values():
                away.value = away.host = None
                self._free(away)
            self._away = {}  # a late job of `_read` still looks at this step's
            self._way_bytes = self._waiting.leaving_bytes
        self._buffers.free_idle()  # it goes back to the system between steps

    def close(self) -> None:
        """Frees memory and files; idempotent."""
        self.reset()
        self._scratch.close()
        self._buffers.close()

    # --- out -----------------------------------------------------------------------

    def _leave(self, slot: ValueSlot, value: jax.Array) -> None:
        form = jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=value.sharding)
        away = _Away(form, self._places.get(slot, ()), value)
        with self._changed:
            self._away[slot] = away
        if self._has_link:
            self._jobs.submit(partial(self._copy_out, away), _OUT)
        else:
            self._write(away, value)

    def _is_gone(self, away: _Away) -> bool:
        """Whether this does not hold it in the device's memory."""
        return away.value is None and (away.host is None or self._has_link)

    def _copy_out(self, away: _Away) -> None:
        """Copies a value to the host, for which it waits for memory; on a thread."""
        num_bytes = NUM_COPIES * away.num_bytes
        with self._changed:
            self._jobs.wait_for(lambda: num_bytes <= self._way_bytes)
            self._way_bytes -= num_bytes
        value = jax.block_until_ready(away.value)
        pinned = away.form.sharding.with_memory_kind(PINNED)
        with span("out"):
            host = jax.block_until_ready(jax.device_put(value, pinned))
        del value
        self.moved.add(link_up_bytes=host.nbytes)
        self._write(away, host)

    def _write(self, away: _Away, host: jax.Array) -> None:
        """Starts to write a value, in place of which the host has it."""
        num_bytes = host.nbytes

        def written() -> None:
            self.moved.add(drive_write_bytes=num_bytes)
            away.is_written = True
            self._settle(away)

        with self._changed:
            away.host, away.value = host, None
            away.is_written = not away.parts
            self._changed.notify_all()
        write = self._scratch.write
        self._scratch.start(self._jobs, write, away.parts, host, written)

    def _settle(self, away: _Away) -> None:
        """Frees a value's memory on its way to drives once nothing needs it there.

        The caller has the lock, as of all that follows.
        """
        is_source = not away.is_back and (away.is_here or not away.parts)
        if away.host is not None and away.is_written and not is_source:
            away.host = None
            self._way_bytes += NUM_COPIES * away.num_bytes
        self._changed.notify_all()

    # --- back ----------------------------------------------------------------------

    def _read(self, slot: ValueSlot, of_step: Mapping[ValueSlot, _Away]) -> None:
        """Starts to read a value, once drives have it and there is room; on a thread.

        One that comes back from `host` is not read; its step may be over by now.
        """

        def is_next() -> bool:
            away = of_step.get(slot)
            if away is None or away.is_here:
                return away is not None
            if away.is_written and (away.is_due or self._has_link):
                away.memory = self._buffers.try_acquire(away.num_bytes)
            return away.memory is not None

        def read() -> None:
            self.moved.add(drive_read_bytes=away.array.nbytes)
            away.is_here = True
            self._bring_back(away)

        self._jobs.wait_for(is_next)
        away = of_step[slot]
        if away.memory is not None:
            move, memory = self._scratch.read, away.memory.array
            self._scratch.start(self._jobs, move, away.parts, memory, read)

    def _bring_back(self, away: _Away) -> None:
        """Has programs read a value that is on the host, if it is due."""
        if away.is_due and away.is_here:
            away.is_due, away.is_back = False, not self._has_link
            if self._has_link:
                source = away.array if away.host is None else away.host
                ended = partial(self._copied, away)
                self._buffers.start_copy([(source, away.form.sharding)], ended)
        self._changed.notify_all()

    def _copied(self, away: _Away, copies: Sequence[jax.Array]) -> None:
        with self._changed:
            away.value, away.is_back = copies[0], True
            self._free(away)
            self._settle(away)

    def _free(self, away: _Away) -> None:
        """Frees the memory that a value was read into."""
        if away.memory is not None:
            away.memory.release()
            away.memory = None
        self._changed.notify_all()

    def _wait_for(self, is_done: Callable[[], bool]) -> None:
        with span("wait"):
            self.waited_s += self._jobs.wait_for(is_done)


def _by_call(pairs: Iterable[tuple[ValueSlot, int]]) -> Mapping[int, list[ValueSlot]]:
    found: defaultdict[int, list[ValueSlot]] = defaultdict(list)
    for slot, number in pairs:
        found[number].append(slot)
    return found
