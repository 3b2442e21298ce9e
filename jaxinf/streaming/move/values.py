"""The values of a step between the calls that make and read them.

    call a makes v ─► … ─► leaves ─► … ─► gone ─► … ─► comes back ─► call b reads v
                                     memory is free in between

    device's memory is the host's     v ─► drive ─► buffer, which the device reads
    device with memory of its own     v ─► pinned ─► drive ─► buffer ─► (pinned ─►) v

Invariant: a value comes back with the bits that it left with. What is in memory at any
time is what the plan says, however slow the drives are: a call waits for writes that
free its memory, and a value that is still being written comes back from the host's
memory and is not read.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import jax

from jaxinf.streaming.move.host_buffers import HostBuffers
from jaxinf.streaming.move.scratch import (
    ScratchFiles,
    ScratchRun,
    array_in,
    padded_bytes,
)
from jaxinf.streaming.move.work_queues import Queue, WorkQueues
from jaxinf.streaming.plan.calls import Plan, StepValue
from jaxinf.streaming.plan.offload import NUM_COPIES
from jaxinf.streaming.program.units import PINNED
from jaxinf.transfer import Buffer, ByteMeters, span
from jaxinf.typing import Array

_IN, _OUT = Queue("values in"), Queue("values out")


@dataclass(eq=False)
class _Offloaded:
    """A value that is leaving, away, or on its way back.

    Attributes:
      runs: Its place on drives; none if it stays on the host.
      value: The array on the device, until the host has it, and once it is back.
      host: The array on the host, until drives have it or it is back.
      buffer: The memory that it is read into from drives.
      is_written: Whether drives have it, or will not.
      has_source: Whether `buffer` or `host` has it to come back from.
      is_due: Whether programs' memory has room for it, and its return has not begun.
      is_back: Whether programs can read it.
    """

    aval: jax.ShapeDtypeStruct
    runs: Sequence[ScratchRun]
    value: jax.Array | None
    host: jax.Array | None = None
    buffer: Buffer | None = None
    is_written: bool = False
    has_source: bool = False
    is_due: bool = False
    is_back: bool = False

    @property
    def num_bytes(self) -> int:
        return padded_bytes(self.runs)

    @property
    def read_array(self) -> Array:
        assert self.buffer is not None, "it was read"
        return array_in(self.buffer.array, self.aval)


class Values:
    """Holds values, those in memory and those elsewhere. Used from one thread.

    The plan says when values are away, and where they wait. Closes its files.

    Attributes:
      moved: Bytes on drives, and over the link from a device with memory of its own.
      waited_s: Time that the caller has waited for values to be written or read.
    """

    def __init__(
        self,
        plan: Plan,
        scratch: ScratchFiles | None = None,
        jobs: WorkQueues | None = None,
    ) -> None:
        self._scratch = ScratchFiles(()) if scratch is None else scratch
        self._jobs = WorkQueues() if jobs is None else jobs
        self._changed = self._jobs.changed
        evictions, lives, offload = plan.evictions, plan.lives, plan.offload
        sizes = {value: lives[value].num_bytes for value in offload.on_drive}
        self._places = self._scratch.allocate(sizes)
        self._offload, self._has_link = offload, offload.has_link
        self._free_leaving_bytes = offload.leaving_bytes
        self._buffers = HostBuffers(
            self._jobs,
            "values",
            offload.read_bytes,
            has_link=offload.has_link,
            pinned_bytes=0,  # one at a time
        )
        by_need = sorted(evictions.items(), key=lambda item: item[1].use_call)
        by_departure = sorted(by_need, key=lambda item: item[1].free_call)
        self._leaving = _by_call((value, x.leave_call) for value, x in by_departure)
        self._gone = _by_call((value, x.free_call) for value, x in by_need)
        self._back = _by_call((value, x.return_call) for value, x in by_need)
        self._last_use = _by_call((v, lives[v].takers[-1]) for v in evictions)
        self._held: dict[StepValue, jax.Array] = {}
        self._offloaded: dict[StepValue, _Offloaded] = {}
        self.moved, self.waited_s = ByteMeters(), 0.0

    # --- a step, call by call ------------------------------------------------------

    def __getitem__(self, value: StepValue) -> jax.Array:
        """Returns a value; blocks until it is back."""
        if value not in self._held:
            offloaded = self._offloaded[value]
            self._wait_for(lambda: offloaded.is_back)
            if offloaded.value is None:  # the device reads it in place
                put = jax.device_put(offloaded.read_array, offloaded.aval.sharding)
                offloaded.value = jax.block_until_ready(put)
            assert offloaded.value is not None
            self._held[value] = offloaded.value
        return self._held[value]

    def before_call(self, number: int) -> None:
        """Waits for values that must be gone for a call; lets others come back."""
        for value in () if number else self._offload.on_drive:
            self._jobs.submit(partial(self._read, value, self._offloaded), _IN)
        for value in self._gone.get(number, ()):
            self._wait_for(partial(self._is_gone, self._offloaded[value]))
            del self._held[value]
        with self._changed:
            for value in self._back.get(number, ()):
                offloaded = self._offloaded[value]
                offloaded.is_due = True
                offloaded.has_source |= offloaded.host is not None
                self._bring_back(offloaded)

    def put(
        self, values: Sequence[StepValue | None], outputs: Sequence[jax.Array]
    ) -> None:
        for value, output in zip(values, outputs, strict=True):
            if value is not None:
                self._held[value] = output

    def after_dispatch(self, number: int, drops: Sequence[StepValue]) -> None:
        """Drops what no later call reads, and lets others leave."""
        for value in drops:
            del self._held[value]
        for value in self._leaving.get(number, ()):
            self._leave(value, self._held[value])

    def after_call(self, number: int) -> None:
        """Frees memory of offloaded values that no later call reads; may block."""
        for value in self._last_use.get(number, ()):
            offloaded = self._offloaded[value]
            self._wait_for(lambda x=offloaded: x.is_written)
            with self._changed:
                offloaded.value = None
                self._free_buffer(offloaded)

    def reset(self) -> None:
        """Drops everything; no call and no job of values may be under way."""
        self._held.clear()
        with self._changed:
            for offloaded in self._offloaded.values():
                offloaded.value = offloaded.host = None
                self._free_buffer(offloaded)
            self._offloaded = {}  # a late job of `_read` still looks at this step's
            self._free_leaving_bytes = self._offload.leaving_bytes
        self._buffers.free_idle()  # it goes back to the system between steps

    def close(self) -> None:
        """Frees memory and files; idempotent."""
        self.reset()
        self._scratch.close()
        self._buffers.close()

    # --- out -----------------------------------------------------------------------

    def _leave(self, value: StepValue, array: jax.Array) -> None:
        aval = jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding)
        offloaded = _Offloaded(aval, self._places.get(value, ()), array)
        with self._changed:
            self._offloaded[value] = offloaded
        if self._has_link:
            self._jobs.submit(partial(self._copy_out, offloaded), _OUT)
        else:
            self._write(offloaded, array)

    def _is_gone(self, offloaded: _Offloaded) -> bool:
        return offloaded.value is None and (offloaded.host is None or self._has_link)

    def _copy_out(self, offloaded: _Offloaded) -> None:
        """Copies a value to the host once it has memory; on a thread."""
        num_bytes = NUM_COPIES * offloaded.num_bytes
        with self._changed:
            self._jobs.wait_for(lambda: num_bytes <= self._free_leaving_bytes)
            self._free_leaving_bytes -= num_bytes
        value = jax.block_until_ready(offloaded.value)
        pinned = offloaded.aval.sharding.with_memory_kind(PINNED)
        with span("out"):
            host = jax.block_until_ready(jax.device_put(value, pinned))
        del value
        self.moved.add(link_up_bytes=host.nbytes)
        self._write(offloaded, host)

    def _write(self, offloaded: _Offloaded, host: jax.Array) -> None:
        """Starts to write a value; from now on the host's array stands for it."""
        num_bytes = host.nbytes

        def note_written() -> None:
            self.moved.add(drive_write_bytes=num_bytes)
            offloaded.is_written = True
            self._drop_host(offloaded)

        with self._changed:
            offloaded.host, offloaded.value = host, None
            offloaded.is_written = not offloaded.runs
            self._changed.notify_all()
        write = self._scratch.write
        self._scratch.start(self._jobs, write, offloaded.runs, host, note_written)

    # The callers of `_drop_host`, `_bring_back` and `_free_buffer` have the lock.

    def _drop_host(self, offloaded: _Offloaded) -> None:
        """Drops the host's array of a value once no write and no return needs it."""
        returns = offloaded.has_source or not offloaded.runs
        is_source = returns and not offloaded.is_back
        if offloaded.host is not None and offloaded.is_written and not is_source:
            offloaded.host = None
            self._free_leaving_bytes += NUM_COPIES * offloaded.num_bytes
        self._changed.notify_all()

    # --- back ----------------------------------------------------------------------

    def _read(self, value: StepValue, of_step: Mapping[StepValue, _Offloaded]) -> None:
        """Starts to read a value once drives have it and there is room; on a thread.

        A value that comes back from `host` is not read; its step may be over by now.
        """

        def can_begin() -> bool:
            offloaded = of_step.get(value)
            if offloaded is None or offloaded.has_source:
                return offloaded is not None
            if offloaded.is_written and (offloaded.is_due or self._has_link):
                offloaded.buffer = self._buffers.try_acquire(offloaded.num_bytes)
            return offloaded.buffer is not None

        def note_read() -> None:
            self.moved.add(drive_read_bytes=offloaded.read_array.nbytes)
            offloaded.has_source = True
            self._bring_back(offloaded)

        self._jobs.wait_for(can_begin)
        offloaded = of_step[value]
        if offloaded.buffer is not None:
            read, memory = self._scratch.read, offloaded.buffer.array
            self._scratch.start(self._jobs, read, offloaded.runs, memory, note_read)

    def _bring_back(self, offloaded: _Offloaded) -> None:
        """Has programs read a value that is on the host, if it is due."""
        if offloaded.is_due and offloaded.has_source:
            offloaded.is_due, offloaded.is_back = False, not self._has_link
            if self._has_link:
                host = offloaded.host
                source = offloaded.read_array if host is None else host
                on_copied = partial(self._note_copied, offloaded)
                self._buffers.start_copy([(source, offloaded.aval.sharding)], on_copied)
        self._changed.notify_all()

    def _note_copied(self, offloaded: _Offloaded, copies: Sequence[jax.Array]) -> None:
        with self._changed:
            offloaded.value, offloaded.is_back = copies[0], True
            self._free_buffer(offloaded)
            self._drop_host(offloaded)

    def _free_buffer(self, offloaded: _Offloaded) -> None:
        if offloaded.buffer is not None:
            offloaded.buffer.release()
            offloaded.buffer = None
        self._changed.notify_all()

    def _wait_for(self, is_done: Callable[[], bool]) -> None:
        with span("wait"):
            self.waited_s += self._jobs.wait_for(is_done)


def _by_call(pairs: Iterable[tuple[StepValue, int]]) -> Mapping[int, list[StepValue]]:
    values: defaultdict[int, list[StepValue]] = defaultdict(list)
    for value, number in pairs:
        values[number].append(value)
    return values
