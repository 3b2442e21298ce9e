"""Divides the memory of host and JAX device; returns freed memory to the system.

Invariant: the sum of the parts never exceeds the whole.
"""

import contextlib
import ctypes
import gc
from collections.abc import Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from jaxinf.errors import BudgetError
from jaxinf.streaming.program.units import Unit, UnitOf
from jaxinf.transfer import page_ceil

READER_BYTES = 16 << 20
"""The most memory for reading params beside the params themselves."""

NUM_STAGED = 3
"""The host has room for so many of the largest unit, if the device has memory of its
own: one is read, one is copied, and its copy is pinned."""

_M_MMAP_THRESHOLD = -3
_MMAP_THRESHOLD_BYTES = 256 << 10
# The part for buffers, for gradients that wait, and at most for reading.
_SHARE = 8
_MAX_RING_BYTES = 512 << 20
_MIN_STORE_BYTES = 64 << 20


@dataclass(frozen=True)
class DeviceLimit:
    """The limit on the JAX device's memory.

    Attributes:
      num_bytes: The limit; None for none but the host's.
      is_host: Whether the device's memory is the host's.
      spare_bytes: What was free beside it, for a plan that a store keeps.
      pool_factor: Bytes of the host's memory that a pinned one may take, as the
        platform's pool of it rounds up.
    """

    num_bytes: int | None = None
    is_host: bool = True
    spare_bytes: int = 0
    pool_factor: int = 1


@dataclass(frozen=True)
class Budget:
    """The memory of a step: its options', and the limit of the JAX device."""

    memory_bytes: int
    device_memory_bytes: int | None = None
    device: DeviceLimit = field(default_factory=DeviceLimit)

    @property
    def limit(self) -> DeviceLimit:
        if self.device_memory_bytes is None:
            return self.device
        return replace(self.device, num_bytes=self.device_memory_bytes)


class MemoryNeed(NamedTuple):
    """Bytes of the host, or of a JAX device with memory of its own, and their use."""

    num_bytes: int
    purpose: str
    is_on_device: bool = False


@dataclass(frozen=True)
class StepNeeds:
    """What a step takes beside its programs, and how its params are read.

    Attributes:
      unit_of: The units in which params are read; None if they are in memory.
      frozen: Leaves that no update changes, so that they may stay from step to step.
      handed: Units whose updates can take what was read for a program.
      ring_bytes: The store's least buffers for updates; None if there are none.
      gradient_bytes: Size of the largest unit whose gradient is handed out.
      export_bytes: Memory for exports.
      others: What else it takes.
      writing_bytes: What writing values to drives takes, if they may leave.
    """

    unit_of: UnitOf | None = None
    frozen: Set[int] = frozenset()
    handed: Set[Unit] = frozenset()
    ring_bytes: int | None = None
    gradient_bytes: int = 0
    export_bytes: int = 0
    others: Sequence[MemoryNeed] = ()
    writing_bytes: int = 0


@dataclass(frozen=True)
class Memory:
    """The memory of a step, in bytes.

    Attributes:
      ring: The store's buffers.
      gradients: Gradients on the host that wait for their update, without what a pool
        of pinned memory takes for them beside that.
      programs: Params, values and temporaries of a step's programs.
      staged: Host memory for params that are on their way to the device, or wait for
        their update; 0 if the device's memory is the host's.
      leaving: Gradients that leave the device or wait for their update.
      limit: The budget that bounds `programs`.
      spare: What a plan that a store keeps may take beyond `programs`.
    """

    ring: int = 0
    gradients: int = 0
    programs: int = 0
    staged: int = 0
    leaving: int = 0
    limit: str = "memory_bytes"
    spare: int = 0
    pool_factor: int = 1

    def without(
        self, num_bytes: int, purpose: str, is_on_device: bool = False
    ) -> "Memory":
        """Returns less of the host's memory, or the device's, for the programs.

        Raises:
          BudgetError: Nothing is left for them.
        """
        part = "staged" if self.staged and not is_on_device else "programs"
        held_bytes = getattr(self, part)
        if num_bytes >= held_bytes:
            raise BudgetError(
                "memory_bytes" if part == "staged" else self.limit,
                f"it leaves {held_bytes} bytes for the program, and {purpose} takes "
                f"{num_bytes}",
                num_bytes - held_bytes + 1,
            )
        return replace(self, **{part: held_bytes - num_bytes})


def divide(memory_bytes: int, needs: StepNeeds, device: DeviceLimit) -> Memory:
    """Returns what a step has for its programs, and for all else.

    Raises:
      BudgetError: Nothing is left for the programs.
    """
    found = _divided(memory_bytes - needs.export_bytes, needs, device)
    for need in needs.others:
        found = found.without(*need)
    return found


def _divided(memory_bytes: int, needs: StepNeeds, device: DeviceLimit) -> Memory:
    share, ring, pooled, least = memory_bytes // _SHARE, 0, 0, 1
    gradient_bytes, params = needs.gradient_bytes, "the program's params"
    if needs.ring_bytes is not None:
        ring = max(needs.ring_bytes, min(share, _MAX_RING_BYTES))
        pooled = max(device.pool_factor * gradient_bytes, share)
        if not device.is_host:
            least = NUM_STAGED * page_ceil(gradient_bytes)
            params = f"params on their way to the device ({least} bytes)"
    reading = 0 if needs.unit_of is None else min(READER_BYTES, share)
    rest = memory_bytes - ring - pooled - reading
    if rest < least:
        raise BudgetError(
            "memory_bytes",
            f"expected room for the store's buffers ({needs.ring_bytes or 0} bytes), "
            f"for the largest gradient ({device.pool_factor * gradient_bytes} bytes) "
            f"and for {params}, found {memory_bytes}",
            least - rest,
        )
    gradients = leaving = pooled // device.pool_factor
    most = device.num_bytes
    if most is None or device.is_host:
        limit = "memory_bytes"
        if most is not None and most < rest:
            limit, rest = "device_memory_bytes", most
        return Memory(ring, gradients, rest, 0, leaving, limit)
    if needs.ring_bytes is not None:
        leaving = min(gradients, max(gradient_bytes, most // _SHARE))
    if leaving >= most:
        raise BudgetError(
            "device_memory_bytes",
            f"expected room for the largest gradient ({gradient_bytes} bytes) and "
            f"for the program's params, found {most}",
            1 + leaving - most,
        )
    parts = ring, gradients, most - leaving, rest, leaving
    spare, factor = device.spare_bytes, device.pool_factor
    return Memory(*parts, "device_memory_bytes", spare, factor)


def store_memory_bytes(memory_bytes: int) -> int:
    """The `memory_bytes` to open a store with, which decide how it divides chunks."""
    return max(_MIN_STORE_BYTES, memory_bytes // _SHARE)


def device_is_host(device: Any) -> bool:
    """Whether a JAX device computes in the host's memory."""
    return device.platform == "cpu"


def return_freed_memory(*, collects: bool = True) -> None:
    """Gives freed memory back to the system, now and from now on; does so with glibc.

    Otherwise the memory that tracing, compilation and XLA's CPU client free would stay
    with the process, up to the peak. Other C libraries return it by themselves.

    Args:
      collects: Whether to look for garbage, as after planning: the nodes and values of
        a traced program refer to each other.
    """
    libc = ctypes.CDLL(None)
    if collects:
        gc.collect()
    with contextlib.suppress(AttributeError):
        libc.mallopt(_M_MMAP_THRESHOLD, _MMAP_THRESHOLD_BYTES)
        libc.malloc_trim(0)
