"""Moves tensors between the device, the host and drives, on threads.

    out ─► write ─► drive ─► read ─► back     each hop has a queue of its own, and each
                                              drive one for both ways

What is next is what `move.moves` says, under one lock. Copies to a device with memory
of its own wait for each other, and one call begins all of them; what comes meanwhile
waits for the next call.

Invariant: the host's memory stays within what the caller gives, however fast the
drives are. A tensor comes back with the bits that it left with. A source's memory is
used again only after its copies have ended, also if a step is given up.
"""

import time
from collections import deque
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax

from jaxinf.streaming.move.link import copied
from jaxinf.streaming.move.moves import Kind, Moves, Tensor
from jaxinf.streaming.move.tensors import Moved
from jaxinf.streaming.move.workers import THREADS_PER_DRIVE, Job, Workers
from jaxinf.transfer import PAGE_BYTES, BufferPool, span
from jaxinf.transfer.pool import Buffer, Registry, aligned
from jaxinf.typing import Array


@dataclass
class MoverCounts:
    """Traffic and times since the previous counts.

    Attributes:
      waited_s: Time that the caller waited for any move.
      num_got, num_ready: Number of tensors that the caller got, and of those that were
        on the device already.
      num_forwarded: Number of values that came back before a drive had them.
      num_out_bytes, num_back_bytes: Bytes copied from a device with memory of its own
        to the host, and back.
    """

    num_written_bytes: int = 0
    num_read_bytes: int = 0
    waited_s: float = 0.0
    num_got: int = 0
    num_ready: int = 0
    num_forwarded: int = 0
    num_out_bytes: int = 0
    num_back_bytes: int = 0

    @property
    def hit_rate(self) -> float:
        """Share of the tensors that were on the device when the caller got them."""
        return self.num_ready / self.num_got if self.num_got else 1.0

    def add(self, other: "MoverCounts") -> None:
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)


class _NewBuffer(NamedTuple):
    """Memory that is not used again."""

    array: Array

    def release(self) -> None:
        pass


class Mover:
    """Moves tensors, of one kind or several. Thread-safe, but for `reset`.

    Args:
      threads: Number of threads of each drive's queue.
      has_link: Whether the device has memory of its own.
      read_bytes: Memory of the host for tensors that have been read.
      way_bytes: Memory of the host for tensors on their way to drives.
      device_bytes: Memory of the device for those that come by `load`.
      pinned_bytes: Memory of the host for pinned copies of tensors that cross to the
        device; one at a time always has room.
      registry: Where memory is registered, from which the device copies without these;
        None if there is none.
      reuses: Whether what was read is valid until `release` alone, and its memory is
        used again; otherwise it is valid as long as someone refers to it.
    """

    def __init__(
        self,
        threads: Iterable[int],
        *,
        has_link: bool,
        read_bytes: int,
        way_bytes: int = 0,
        device_bytes: int = 0,
        pinned_bytes: int = 0,
        registry: Registry | None = None,
        name: str = "jaxinf-activations",
        reuses: bool = True,
    ) -> None:
        self._name = name
        drives = list(threads)
        capacity_bytes = max(read_bytes, PAGE_BYTES)
        self._pool = pool = None
        if reuses:
            self._pool = pool = BufferPool(capacity_bytes, registry=registry)
        self._has_link, self._pinned_bytes = has_link, pinned_bytes
        self._is_registered = pool is not None and registry is not None
        self._crossing: deque[Any] = deque()  # what waits for its copy, in order
        # A copy to new memory of the device waits for programs that were enqueued
        # before it, so two calls are under way where nothing else limits them.
        hops = [1, 2 if self._is_registered else 1] if has_link else []
        self._hops = {"out": len(drives), "back": len(drives) + 1}
        self._workers = Workers([*drives, *hops], name)
        self._changed = self._workers.changed
        self._counts = MoverCounts()
        self._moves = Moves(
            self._start,
            self._allocate,
            has_link=has_link,
            way_bytes=way_bytes,
            read_bytes=read_bytes if pool is None else pool.capacity_bytes,
            device_bytes=device_bytes,
        )

    def evict(self, tensor: Any) -> None:
        """Starts moving a value out, which may still be computed.

        The caller drops its own reference by `wait_evicted`. The value must not change
        until then.
        """
        with self._changed:
            self._moves.evict(tensor)

    def wait_evicted(self, key: Hashable) -> None:
        """Blocks until nothing here holds a value in the device's memory.

        Raises:
          StoreSpaceError, StoreIOError: A drive is full, or failed.
        """
        tensor = self._moves.tensors[key]
        self._await(lambda: self._moves.is_evicted(tensor))

    def read_ahead(self, room_bytes: int) -> None:
        """Sets the host's memory for values read before `prefetch`; does not block.

        Args:
          room_bytes: At least the largest of them; never less than before in a step.
        """
        with self._changed:
            self._moves.read_bytes = room_bytes
            self._moves.advance()

    def prefetch(self, key: Hashable) -> None:
        """Starts moving a value back, for which the device has memory; does not block.

        What is still on the host comes from there.
        """
        with self._changed:
            self._moves.prefetch(self._moves.tensors[key])

    def load(self, tensors: Iterable[Moved]) -> None:
        """Starts to read tensors from drives, in order, as room allows."""
        with self._changed:
            self._moves.load(tensors)

    def get(self, key: Hashable) -> Any:
        """Returns a tensor, valid until `release`; blocks until it is on the device.

        Raises:
          StoreIOError: The drive failed. Other tensors still come back.
        """
        tensor = self._moves.tensors[key]
        counts = self._counts
        counts.num_got += 1
        counts.num_ready += tensor.is_ready
        self._await(lambda: tensor.is_ready)
        if tensor.error is not None:
            raise tensor.error
        if tensor.value is None:
            tensor.value = tensor.in_place(tensor.memory.array)
        tensor.value = tensor.completed(tensor.value)
        return tensor.value

    def keep(self, key: Hashable, new: Hashable, *, stays: bool) -> bool:
        """Gives a tensor that has stayed another key; returns whether it is there.

        Args:
          stays: Whether it stays on.
        """
        with self._changed:
            tensor = self._moves.tensors.pop(key, None)
            if tensor is None or not (tensor.stays and tensor.is_back):
                return False
            tensor.key, tensor.stays = new, stays
            self._moves.tensors[new] = tensor
            return True

    def drop(self, key: Hashable) -> None:
        """Ends that a tensor stays, if it does; nothing reads it."""
        with self._changed:
            tensor = self._moves.tensors.get(key)
            if tensor is not None and tensor.stays:
                tensor.stays = False
                self._moves.release(tensor)

    def held(self, key: Hashable) -> Array | None:
        """Returns the memory of a tensor that is held; None if it is not here."""
        with self._changed:
            tensor = self._moves.tensors.get(key)
            if tensor is None or not (tensor.is_held and tensor.is_back):
                return None
            return tensor.memory.array

    def free(self, key: Hashable) -> None:
        """Ends that a tensor is held, if it is."""
        with self._changed:
            tensor = self._moves.tensors.get(key)
            if tensor is not None and tensor.is_held:
                self._moves.free(tensor)
                self._changed.notify_all()

    def release(self, key: Hashable) -> None:
        """Frees the memory of a tensor that nothing reads any more.

        Blocks while a drive still writes it, or reads what is of no use.

        Raises:
          StoreSpaceError, StoreIOError: A drive is full, or failed.
        """
        tensor = self._moves.tensors[key]
        self._await(lambda: not tensor.num_moves)
        with self._changed:
            self._moves.release(tensor)

    def reset(self, order: Iterable[Hashable] = ()) -> None:
        """Drops all but what is held or stays; blocks while any is moved.

        Args:
          order: Keys of values that may be read ahead of `prefetch`, in order.
        """
        self._workers.reset()
        self._crossing.clear()
        self._moves.clear(order)

    def rest(self) -> None:
        """Gives memory that is not used back to the system."""
        if self._pool is not None:
            self._pool.free_idle()

    @property
    def held_bytes(self) -> int:
        pool = self._pool
        return 0 if pool is None else pool.held_bytes

    def close(self) -> None:
        """Drops everything and ends the threads; idempotent."""
        self.reset()
        self._workers.close()
        if self._pool is not None:
            self._pool.close()

    def take_counts(self) -> MoverCounts:
        """Returns the counts since the last call."""
        with self._changed:
            counts, self._counts = self._counts, MoverCounts()
            counts.num_forwarded = self._moves.num_forwarded
            self._moves.num_forwarded = 0
        return counts

    def _await(self, is_done: Callable[[], bool]) -> None:
        began_s = time.perf_counter()
        with span("wait", self._name), self._changed:
            self._changed.wait_for(lambda: is_done() or self._moves.error is not None)
            self._counts.waited_s += time.perf_counter() - began_s
            if self._moves.error is not None:
                raise self._moves.error

    def _allocate(self, tensor: Tensor) -> Buffer | _NewBuffer:
        if self._pool is None:
            return _NewBuffer(aligned(tensor.host_bytes))
        buffer = self._pool.acquire(tensor.host_bytes, block=False)
        assert buffer is not None, "there is room for what comes back"
        return buffer

    def _start(self, tensor: Any, kind: Kind, part: int) -> None:
        job: Job = partial(self._move, tensor, kind, part)
        if kind == "back":
            self._crossing.append(tensor)
            job = self._cross
        is_hop = kind in self._hops
        self._workers.submit(self._hops[kind] if is_hop else tensor.queue(part), job)

    def _move(self, tensor: Any, kind: Kind, part: int, bounce: Array) -> None:
        try:
            found = _moved(tensor, kind, part, bounce)
        except BaseException as error:
            self._ended(tensor, kind, None, error)
        else:
            self._ended(tensor, kind, found, None)

    def _ended(
        self, tensor: Any, kind: Kind, found: Any, error: BaseException | None
    ) -> None:
        counts = self._counts
        with self._changed:
            if error is not None:
                pass
            elif kind == "out":
                counts.num_out_bytes += found.nbytes
            elif kind == "write":
                counts.num_written_bytes += found
            elif kind == "read":
                counts.num_read_bytes += found
            else:
                counts.num_back_bytes += found.nbytes
            self._moves.ended(tensor, kind, found, error)
            self._changed.notify_all()

    # --- copies to the device ------------------------------------------------------

    def _cross(self, bounce: Array) -> None:
        """Copies what waits to the device, if another call has not; on a thread."""
        del bounce
        with self._changed:
            batch = self._next_copies()
        if not batch:
            return
        num_bytes = sum(tensor.host_bytes for tensor in batch)
        with span("back", batch[0].key, num_bytes=num_bytes):
            for tensor, found, error in copied(
                batch, through_pinned=not self._is_registered
            ):
                self._ended(tensor, "back", found, error)
                del tensor, found, error

    def _next_copies(self) -> deque[Any]:
        """Removes and returns the tensors of the next call, as pinned memory allows."""
        found: deque[Any] = deque()
        room_bytes = self._pinned_bytes
        while self._crossing:
            first = self._crossing[0]
            is_pinned = self._is_registered or first.host is not None
            room_bytes -= 0 if is_pinned else first.host_bytes
            if found and room_bytes < 0:
                break
            found.append(self._crossing.popleft())
        return found


def _moved(tensor: Any, kind: Kind, part: int, bounce: Array) -> Any:
    match kind:
        case "out":
            jax.block_until_ready(tensor.value)
            with span("out", tensor.key, num_bytes=tensor.value.nbytes):
                return tensor.copied_out()
        case "write":
            jax.block_until_ready(tensor.host)
            return tensor.write(part, bounce)
        case _:
            return tensor.read(part, tensor.memory.array)


def drive_threads(num_drives: int) -> list[int]:
    return [THREADS_PER_DRIVE] * num_drives
