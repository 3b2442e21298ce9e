"""Divides the memory of host and JAX device; returns freed memory to the system.

Invariant: the sum of the parts never exceeds the whole.
"""

import contextlib
import ctypes
import gc
from collections.abc import Sequence, Set
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from jaxinf.errors import BudgetError
from jaxinf.streaming.program.units import StoreUnits, Unit
from jaxinf.transfer import page_ceil

READER_BYTES = 16 << 20
"""The most memory for reading params beside the params themselves."""

NUM_STAGED = 3
"""The host has room for so many of the largest unit, if the device has memory of its
own: one is read, one is copied, and its copy is pinned."""

_M_MMAP_THRESHOLD = -3
_MMAP_THRESHOLD_BYTES = 256 << 10
_RING_SHARE = 8
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


class Claim(NamedTuple):
    """Bytes of the host, or of a JAX device with memory of its own, and their use."""

    num_bytes: int
    purpose: str
    is_on_device: bool = False


@dataclass(frozen=True)
class Claims:
    """What a step takes beside its programs, and how its params are read.

    Attributes:
      units: How params are read from the store; None if they are in memory.
      frozen: Leaves that no update changes, so that they may stay from step to step.
      handed: Units whose updates can take what was read for a program.
      ring_bytes: The store's least buffers for updates; None if there are none.
      gradient_bytes: Size of the largest unit whose gradient is handed out.
      export_bytes: Memory for exports.
      held_bytes: What stays beside the programs from step to step.
      others: What else it takes.
      writing_bytes: What writing values to drives takes, if they may leave.
    """

    units: StoreUnits | None = None
    frozen: Set[int] = frozenset()
    handed: Set[Unit] = frozenset()
    ring_bytes: int | None = None
    gradient_bytes: int = 0
    export_bytes: int = 0
    held_bytes: int = 0
    others: Sequence[Claim] = ()
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


def memory_within(
    memory_bytes: int, limit: DeviceLimit, claims: Claims, *claimed: Claim
) -> Memory:
    """Returns what a step has for its programs, and for all else.

    Args:
      claimed: What is taken beside `claims`.

    Raises:
      BudgetError: Nothing is left for the programs.
    """
    own_bytes = memory_bytes - claims.export_bytes
    if claims.ring_bytes is not None:
        found = divide(own_bytes, claims.ring_bytes, claims.gradient_bytes, limit)
    else:
        reads_bytes = 0 if claims.units is None else reader_bytes(own_bytes)
        found = divide_rest(own_bytes - reads_bytes, limit)
    for claim in (*claims.others, *claimed):
        found = without(found, *claim)
    return found


def without(
    memory: Memory, num_bytes: int, purpose: str, is_on_device: bool = False
) -> Memory:
    """Returns the same with less of the host's, or the device's, for the programs.

    Raises:
      BudgetError: Nothing is left for them.
    """
    part = "staged" if memory.staged and not is_on_device else "programs"
    held_bytes = getattr(memory, part)
    if num_bytes >= held_bytes:
        raise BudgetError(
            "memory_bytes" if part == "staged" else memory.limit,
            f"it leaves {held_bytes} bytes for the program, and {purpose} takes "
            f"{num_bytes}",
            num_bytes - held_bytes + 1,
        )
    return replace(memory, **{part: held_bytes - num_bytes})


def reader_bytes(memory_bytes: int) -> int:
    """The part of all host memory for reading params beside the params themselves."""
    return min(READER_BYTES, memory_bytes // _RING_SHARE)


def store_memory_bytes(memory_bytes: int) -> int:
    """The `memory_bytes` to open a store with, which decide how it divides chunks."""
    return max(_MIN_STORE_BYTES, memory_bytes // _RING_SHARE)


def device_is_host(device: Any) -> bool:
    """Whether a JAX device computes in the host's memory."""
    return device.platform == "cpu"


def divide(
    memory_bytes: int,
    ring_bytes: int,
    gradient_bytes: int,
    device: DeviceLimit = DeviceLimit(),
) -> Memory:
    """Divides the memory.

    Args:
      gradient_bytes: Size of the largest unit, whose gradient is handed out.

    Raises:
      BudgetError: No memory is left for the programs.
    """
    ring = max(ring_bytes, min(memory_bytes // _RING_SHARE, _MAX_RING_BYTES))
    pooled_bytes = device.pool_factor * gradient_bytes
    pooled = max(pooled_bytes, memory_bytes // _RING_SHARE)
    rest = memory_bytes - ring - pooled - reader_bytes(memory_bytes)
    least, params = 1, "the program's params"
    if not device.is_host:
        least = NUM_STAGED * page_ceil(gradient_bytes)
        params = f"params on their way to the device ({least} bytes)"
    if rest < least:
        raise BudgetError(
            "memory_bytes",
            f"expected room for the store's buffers ({ring_bytes} bytes), for the "
            f"largest gradient ({pooled_bytes} bytes) and for {params}, found "
            f"{memory_bytes}",
            least - rest,
        )
    leaving = gradients = pooled // device.pool_factor
    if device.num_bytes is not None and not device.is_host:
        leaving = min(gradients, max(gradient_bytes, device.num_bytes // _RING_SHARE))
        if leaving >= device.num_bytes:
            raise BudgetError(
                "device_memory_bytes",
                f"expected room for the largest gradient ({gradient_bytes} bytes) and "
                f"for the program's params, found {device.num_bytes}",
                1 + leaving - device.num_bytes,
            )
    return divide_rest(rest, device, ring, gradients, leaving)


def divide_rest(
    rest_bytes: int,
    device: DeviceLimit,
    ring: int = 0,
    gradients: int = 0,
    leaving: int = 0,
) -> Memory:
    """Gives what is left of the memory to programs, within the device's limit.

    Args:
      ring, gradients, leaving: As for `Memory`; `leaving` is in the device's memory.
    """
    limit, most = "device_memory_bytes", device.num_bytes
    if most is not None and not device.is_host:
        spare, programs = device.spare_bytes, most - leaving
        return Memory(
            *(ring, gradients, programs, rest_bytes, leaving, limit, spare),
            pool_factor=device.pool_factor,
        )
    if most is None or most >= rest_bytes:
        limit, most = "memory_bytes", rest_bytes
    return Memory(ring, gradients, most, 0, leaving, limit)


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
