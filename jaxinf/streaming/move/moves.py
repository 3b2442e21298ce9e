"""Which moves are next: tensors on their way from the device to drives, and back.

    evict ─► out ─► write ─► away: their memory is free   … read ahead if there is room
    value ◄─ back ◄─ read ◄──┘ or from the host           … to `prefetch` or `load`

Whoever has the `Moves` runs what they start, on threads (`move.mover`).
Where the device's memory is the host's, the hop between them is left out: no tensor
goes `"out"`, and what has been read is there.

Invariant: the memory of each tier stays within its room, however slow the moves are.
"""

from collections import deque
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

Kind: TypeAlias = Literal["out", "write", "read", "back"]
"""A hop: device to host, host to drive, drive to host, host to device."""


@dataclass(eq=False, slots=True)
class Tensor:
    """A tensor that is leaving, away, or on its way back.

    Attributes:
      num_parts: Number of moves that write it to drives, or read it; 0 if it stays on
        the host.
      host_bytes: Memory of the host for it when it has been read.
      way_bytes: Memory of the host that it takes on its way to drives.
      device_bytes: Memory of the device that counts when it comes back; 0 for a tensor
        that only comes when the caller has the memory.
      value: On the device, until it is on the host and when it is back.
      host: On the host, until it is written, and back if it is kept.
      num_written: Number of its parts that are on drives.
      num_moves: Number of its moves that have not ended.
      is_forwarded: Whether it comes back from `host`, although a drive will have it.
      is_due: Whether the device has memory for it, and its way back has not begun.
      is_held: Whether someone uses it on the host, until `free`.
      stays: Whether it is kept when all others are forgotten.
      has_room: Whether it has taken room on the device for itself.
    """

    key: Hashable
    num_parts: int = 0
    host_bytes: int = 0
    way_bytes: int = 0
    device_bytes: int = 0
    value: Any = None
    host: Any = None
    memory: Any = None
    num_written: int = 0
    num_moves: int = 0
    is_forwarded: bool = False
    is_due: bool = False
    is_back: bool = False
    is_held: bool = False
    stays: bool = False
    is_over: bool = False
    has_room: bool = False
    error: BaseException | None = None

    @property
    def is_written(self) -> bool:
        """Whether all of it that goes to drives is there."""
        return self.num_written == self.num_parts

    @property
    def is_ready(self) -> bool:
        """Whether it is on the device, or where the device reads it."""
        return self.is_back or self.error is not None


class Moves:
    """The tensors that move, and the memory that they may take. Has no threads.

    Args:
      start: Puts a move of a tensor's part into its queue, and later calls `ended`.
      allocate: Returns memory of the host for a tensor, of which there is room; its
        `release` frees it.
      has_link: Whether the device has memory of its own.
      way_bytes: Memory of the host for tensors on their way to drives.
      read_bytes: Memory of the host for those read ahead.
      device_bytes: Memory of the device for those that come by `load`.

    Attributes:
      tensors: Those that are not on the device alone, by key.
      error: What prevented a tensor from leaving; nothing goes on after it.
      num_forwarded: Number of tensors that came back before a drive had them.
      read_bytes: As given; takes effect with the next event.
    """

    def __init__(
        self,
        start: Callable[[Any, Kind, int], None],
        allocate: Callable[[Any], Any],
        *,
        has_link: bool,
        way_bytes: int = 0,
        read_bytes: int = 0,
        device_bytes: int = 0,
    ) -> None:
        self._begin, self._allocate = start, allocate
        self._has_link = has_link
        self._way_bytes, self._device_bytes = way_bytes, device_bytes
        self.tensors: dict[Hashable, Any] = {}
        self.num_forwarded = self._read_used = 0
        self.read_bytes = read_bytes
        self.clear()

    def clear(self, order: Iterable[Hashable] = ()) -> None:
        """Forgets all tensors but those that are held or stay; no move is under way.

        Args:
          order: Keys of those that may be read ahead of `prefetch`, in order.
        """
        held = {
            key: tensor
            for key, tensor in self.tensors.items()
            if (tensor.is_held or tensor.stays) and tensor.is_back
        }
        for key, tensor in self.tensors.items():
            if key in held and tensor.stays:
                continue
            if key in held:
                tensor.value, tensor.is_over, tensor.has_room = None, True, False
            else:
                tensor.is_held = False
                self._free_memory(tensor)
        self.tensors = held
        self.error: BaseException | None = None
        self._leaving: deque[Any] = deque()
        self._ahead = deque(order)
        self._due: deque[Any] = deque()
        own = [tensor for tensor in held.values() if tensor.memory is not None]
        self._read_used = sum(tensor.host_bytes for tensor in own)
        there = [tensor for tensor in held.values() if tensor.has_room]
        self._device_room = self._device_bytes - sum(t.device_bytes for t in there)
        self._way_room = self._way_bytes

    def evict(self, tensor: Any) -> None:
        """Lets a tensor leave the device, when there is room for it on its way."""
        self.tensors[tensor.key] = tensor
        self._leaving.append(tensor)
        self.advance()

    def is_evicted(self, tensor: Any) -> bool:
        """Whether nothing here holds a tensor in the device's memory."""
        is_out = self._has_link or tensor.host is None
        return tensor.value is None and is_out

    def prefetch(self, tensor: Any) -> None:
        """Lets a tensor come back, for which the device has memory."""
        tensor.is_due = True
        tensor.is_forwarded = tensor.host is not None and tensor.num_parts > 0
        self.num_forwarded += tensor.is_forwarded
        if tensor.host is None and not self._has_link:
            self._read(tensor)
        self._settle(tensor)
        self.advance()

    def load(self, tensors: Iterable[Any]) -> None:
        """Lets tensors come from drives, in order, each as soon as there is room.

        They are new here, or were written and released.
        """
        for tensor in tensors:
            tensor.num_written = tensor.num_parts
            tensor.is_back = tensor.is_over = False
            self.tensors[tensor.key] = tensor
            self._ahead.append(tensor.key)
            self._due.append(tensor)
        self.advance()

    def release(self, tensor: Any) -> None:
        """Notes that nothing reads a tensor on the device any more."""
        tensor.value, tensor.is_over = None, True
        if tensor.has_room:  # also if it could not be read
            tensor.has_room = False
            self._device_room += tensor.device_bytes
        if not tensor.is_held:
            self._forget(tensor)
        self.advance()

    def free(self, tensor: Any) -> None:
        """Notes that nothing reads a tensor on the host any more."""
        tensor.is_held = False
        if tensor.is_over:
            self._forget(tensor)
        self._settle(tensor)
        self.advance()

    def ended(
        self, tensor: Any, kind: Kind, found: Any, error: BaseException | None
    ) -> None:
        """Takes what a move has made, or what prevented it."""
        tensor.num_moves -= 1
        if error is not None and kind in ("read", "back"):  # others still come back
            tensor.error = tensor.error or error
        elif error is not None:
            self.error = self.error or error
        elif kind == "out":
            self._is_out(tensor, found)
        elif kind == "write":
            tensor.num_written += 1
        elif kind == "back":
            tensor.value, tensor.is_back = found, True
        self._settle(tensor)
        self.advance()

    def advance(self) -> None:
        """Starts what has room now, in order: out, on the device, and read ahead."""
        while self._due and (
            self._due[0].is_over or self._due[0].device_bytes <= self._device_room
        ):
            tensor = self._due.popleft()
            if tensor.is_over:  # released before there was room
                continue
            self._device_room -= tensor.device_bytes
            tensor.is_due = tensor.has_room = True
            self._settle(tensor)
        while self._leaving and self._leaving[0].way_bytes <= self._way_room:
            tensor = self._leaving.popleft()
            self._way_room -= tensor.way_bytes
            if self._has_link:
                self._start(tensor, "out")
            else:
                self._is_out(tensor, tensor.value)
        while self._ahead and (tensor := self.tensors.get(self._ahead[0])):
            if not tensor.is_forwarded:
                room = self.read_bytes - self._read_used
                if not tensor.is_written or tensor.host_bytes > room:
                    break
                self._read(tensor)
            self._ahead.popleft()

    # --- inside --------------------------------------------------------------------

    def _start(self, tensor: Any, kind: Kind, part: int = 0) -> None:
        tensor.num_moves += 1
        self._begin(tensor, kind, part)

    def _is_out(self, tensor: Any, host: Any) -> None:
        tensor.value, tensor.host = None, host
        for part in range(tensor.num_parts):
            self._start(tensor, "write", part)

    def _read(self, tensor: Any) -> None:
        tensor.memory = self._allocate(tensor)
        self._read_used += tensor.host_bytes
        for part in range(tensor.num_parts):
            self._start(tensor, "read", part)

    def _settle(self, tensor: Any) -> None:
        """Frees memory of a tensor that has moved; lets it come back if it is due."""
        is_source = tensor.is_forwarded or not tensor.num_parts
        is_used = not tensor.is_written or (is_source and not tensor.is_back)
        if tensor.host is not None and not is_used:
            tensor.host = None
            self._way_room += tensor.way_bytes
        is_copied = tensor.is_back and self._has_link
        if not tensor.num_moves and (is_copied or tensor.error is not None):
            self._free_memory(tensor)
        is_read = tensor.memory is not None and not tensor.num_moves
        if tensor.is_due and (is_read or tensor.host is not None):
            tensor.is_due = False
            if self._has_link:
                self._start(tensor, "back")
            else:
                tensor.value, tensor.is_back = tensor.host, True

    def _free_memory(self, tensor: Any) -> None:
        if tensor.memory is not None and not tensor.is_held:
            tensor.memory.release()
            tensor.memory = None
            self._read_used -= tensor.host_bytes

    def _forget(self, tensor: Any) -> None:
        self._free_memory(tensor)
        del self.tensors[tensor.key]
