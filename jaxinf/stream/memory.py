"""Divides `memory_bytes`, and returns freed memory to the system.

Invariant: the sum of the parts never exceeds the whole.
"""

import contextlib
import ctypes
from dataclasses import dataclass, replace

from jaxinf.errors import StreamError

__all__ = [
    "READER_BYTES",
    "Division",
    "divide",
    "return_freed_memory",
    "store_memory_bytes",
]

READER_BYTES = 16 << 20
"""Memory for reading params beside the params themselves."""

_M_MMAP_THRESHOLD = -3
_MMAP_THRESHOLD_BYTES = 256 << 10
_RING_SHARE = 8
_MAX_RING_BYTES = 512 << 20
_MIN_STORE_BYTES = 64 << 20


@dataclass(frozen=True)
class Division:
    """Bytes of memory.

    Attributes:
      ring: The store's own buffers.
      gradients: Gradients waiting for their update.
      programs: Params, values and temporaries of a step's programs.
    """

    ring: int
    gradients: int
    programs: int

    def without(self, num_bytes: int) -> "Division":
        """Returns the same with less for the programs.

        Raises:
          StreamError: Nothing is left for them.
        """
        if num_bytes >= self.programs:
            raise StreamError(
                f"memory_bytes: it leaves {self.programs} bytes for the program, and "
                f"writing its values to drives takes {num_bytes}; raise memory_bytes"
            )
        return replace(self, programs=self.programs - num_bytes)


def store_memory_bytes(memory_bytes: int) -> int:
    """The `memory_bytes` to open a store with, which decide how it divides chunks."""
    return max(_MIN_STORE_BYTES, memory_bytes // _RING_SHARE)


def divide(memory_bytes: int, ring_bytes: int, gradient_bytes: int) -> Division:
    """Divides the memory.

    Args:
      memory_bytes: All memory of a step.
      ring_bytes: The least size of the store's buffers.
      gradient_bytes: Size of the largest gradient that is handed out.

    Raises:
      StreamError: No memory is left for the programs.
    """
    ring = max(ring_bytes, min(memory_bytes // _RING_SHARE, _MAX_RING_BYTES))
    gradients = max(gradient_bytes, memory_bytes // _RING_SHARE)
    reader = min(READER_BYTES, memory_bytes // _RING_SHARE)
    programs = memory_bytes - ring - gradients - reader
    if programs <= 0:
        raise StreamError(
            f"memory_bytes={memory_bytes}: expected room for the store's buffers "
            f"({ring_bytes} bytes), for the largest gradient ({gradient_bytes} bytes) "
            "and for the program's params; raise memory_bytes"
        )
    return Division(ring, gradients, programs)


def return_freed_memory() -> None:
    """Lets glibc give freed arrays back to the system, for the rest of the process.

    Otherwise memory that XLA's CPU client frees would stay with the process, up to the
    peak. Other C libraries return it by themselves.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _MMAP_THRESHOLD_BYTES)
