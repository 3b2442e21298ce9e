"""Divides the memory of host and JAX device; returns freed memory to the system.

Invariant: the sum of the parts never exceeds the whole. What a device says of itself is
looked at before anything is planned; nothing is written, and no memory is taken.
"""

import contextlib
import ctypes
import gc
import os
from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from jax.sharding import Mesh

from jaxinf.errors import BudgetError, StreamError
from jaxinf.streaming.program.meshes import default_device
from jaxinf.streaming.program.units import ParamUnit, UnitOf
from jaxinf.terminal import format_bytes

READER_BYTES = 16 << 20
"""The most memory for reading params beside the params themselves."""

NUM_STAGED = 3
"""The host has room for so many of the largest unit, if the device has memory of its
own: one is read, one is copied, and its copy is pinned."""

# The variable that bounds the pinned memory of XLA's CUDA client.
_PINNED_VARIABLE = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"
_DEFAULT_PINNED_GIB = 64
_WITH_POOL = ("cuda", "gpu")
# XLA's pool grows by powers of two, and lends a chunk whole if less than half is left.
_POOL_FACTOR = 2
FREE_SHARE = 0.9
"""The part of what a device has free that a step takes by default."""

_M_MMAP_THRESHOLD = -3
_MMAP_THRESHOLD_BYTES = 256 << 10
# The part for buffers, for gradients that wait, and at most for reading.
_SHARE = 8
_MAX_STATE_BYTES = 512 << 20
_MIN_STORE_BYTES = 64 << 20


@dataclass(frozen=True)
class DeviceLimit:
    """The limit on the JAX device's memory.

    Attributes:
      num_bytes: The limit; None for none but the host's.
      is_host: Whether the device's memory is the host's.
      pool_factor: Bytes of the host's memory that a pinned one may take, as the
        platform's pool of it rounds up.
    """

    num_bytes: int | None = None
    is_host: bool = True
    pool_factor: int = 1


@dataclass(frozen=True)
class Budget:
    """The memory of a step.

    Attributes:
      device_memory_bytes: In place of the limit of `device`, if it is given.
    """

    memory_bytes: int
    device_memory_bytes: int | None = None
    device: DeviceLimit = field(default_factory=DeviceLimit)


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
      state_bytes: The store's least buffers for updates; None if there are none.
      gradient_bytes: Size of the largest unit whose gradient is handed out.
      export_bytes: Memory for exports.
      others: What else it takes.
      writing_bytes: What writing values to drives takes, if they may leave.
    """

    unit_of: UnitOf | None = None
    frozen: Set[int] = frozenset()
    handed: Set[ParamUnit] = frozenset()
    state_bytes: int | None = None
    gradient_bytes: int = 0
    export_bytes: int = 0
    others: Sequence[MemoryNeed] = ()
    writing_bytes: int = 0


@dataclass(frozen=True)
class Memory:
    """The memory of a step, in bytes.

    Attributes:
      state: The store's buffers for the optimizer's state, at least.
      gradients: Gradients on the host that wait for their update, without what a pool
        of pinned memory takes for them beside that.
      programs: Params, values and temporaries of a step's programs.
      staged: Host memory for params that are on their way to the device, or wait for
        their update; 0 if the device's memory is the host's.
      leaving: Gradients that leave the device or wait for their update.
      limit: The budget that bounds `programs`.
      pool_factor: Factor of the `DeviceLimit`.
    """

    state: int = 0
    gradients: int = 0
    programs: int = 0
    staged: int = 0
    leaving: int = 0
    limit: str = "memory_bytes"
    pool_factor: int = 1


def divide(budget: Budget, needs: StepNeeds) -> Memory:
    """Returns what a step has for its programs, and for all else.

    Raises:
      BudgetError: Nothing is left for the programs.
    """
    memory_bytes = budget.memory_bytes - needs.export_bytes
    share, gradient_bytes = memory_bytes // _SHARE, needs.gradient_bytes
    device, factor = budget.device, budget.device.pool_factor
    state = pooled = 0
    if needs.state_bytes is not None:
        state = max(needs.state_bytes, min(share, _MAX_STATE_BYTES))
        pooled = max(factor * gradient_bytes, share)
    reading = 0 if needs.unit_of is None else min(READER_BYTES, share)
    rest = memory_bytes - state - pooled - reading
    if rest < 1:
        raise BudgetError(
            "memory_bytes",
            "expected room for the store's buffers "
            f"({format_bytes(needs.state_bytes or 0)}), for the largest gradient "
            f"({format_bytes(factor * gradient_bytes)}) and for the program's params, "
            f"found {format_bytes(memory_bytes)}",
            1 - rest,
        )
    most, leaving = budget.device_memory_bytes, pooled // factor
    most = device.num_bytes if most is None else most
    programs, staged, limit = rest, 0, "memory_bytes"
    if most is not None and not device.is_host:
        leaving = min(leaving, max(gradient_bytes, most // _SHARE))
        programs, staged, limit = most - leaving, rest, "device_memory_bytes"
    elif most is not None and most < rest:
        programs, limit = most, "device_memory_bytes"
    for num_bytes, purpose, is_on_device in needs.others:
        is_staged = staged > 0 and not is_on_device
        left = (staged if is_staged else programs) - num_bytes
        if left < 1:
            raise BudgetError(
                "memory_bytes" if is_staged else limit,
                f"it leaves {format_bytes(max(0, left + num_bytes))} for the program, "
                f"and {purpose} takes {format_bytes(num_bytes)}",
                1 - left,
            )
        programs, staged = (programs, left) if is_staged else (left, staged)
    return Memory(
        state=state,
        gradients=pooled // factor,
        programs=programs,
        staged=staged,
        leaving=leaving,
        limit=limit,
        pool_factor=factor,
    )


def store_memory_bytes(memory_bytes: int) -> int:
    """The `memory_bytes` to open a store with, which decide how it divides chunks."""
    return max(_MIN_STORE_BYTES, memory_bytes // _SHARE)


def device_is_host(device: Any) -> bool:
    """Whether a JAX device computes in the host's memory."""
    return device.platform == "cpu"


# --- what a JAX device has ------------------------------------------------------------


def limit_of(mesh: Mesh | None, num_bytes: int | None) -> DeviceLimit:
    """Returns the limit for the JAX device, or for each of a mesh.

    Args:
      num_bytes: `device_memory_bytes`; None for most of what is free, on the smallest
        of devices with memory of their own.

    Raises:
      StreamError: A device does not say what is free, or has nothing free.
    """
    devices = [default_device()] if mesh is None else mesh.local_devices
    if device_is_host(devices[0]):
        return DeviceLimit(num_bytes)
    if num_bytes is None:
        num_bytes = int(min(map(_free_bytes, devices)) * FREE_SHARE)
    factor = _POOL_FACTOR if devices[0].platform in _WITH_POOL else 1
    return DeviceLimit(num_bytes, is_host=False, pool_factor=factor)


def gpu_limit(num_bytes: int) -> DeviceLimit:
    """Returns the limit for a GPU with so many bytes for JAX, here or elsewhere."""
    free_bytes = int(num_bytes * FREE_SHARE)
    return DeviceLimit(free_bytes, is_host=False, pool_factor=_POOL_FACTOR)


def check_pinned(num_bytes: int) -> None:
    """Refuses more pinned memory of the host than XLA's pool of it can have.

    Args:
      num_bytes: What the pool may take for a step, with its rounding.
    """
    text = os.environ.get(_PINNED_VARIABLE, "")
    limit_gib = int(text) if text.isdecimal() else _DEFAULT_PINNED_GIB
    if num_bytes > limit_gib << 30:
        raise StreamError(
            f"memory_bytes: a step may take {format_bytes(num_bytes)} of pinned memory "
            "for copies to and from the device, as XLA's pool rounds up to powers of "
            f"two, and that ends at {limit_gib} GiB. Set {_PINNED_VARIABLE}="
            f"{-(-num_bytes // (1 << 30))}, a whole number, before Python starts, or "
            "give less memory"
        )


def _free_bytes(device: Any) -> int:
    stats = device.memory_stats() or {}
    name = f"{device} ({device.device_kind})"  # of a slice of a GPU it says MIG
    if "bytes_limit" not in stats:
        raise StreamError(
            f"device_memory_bytes: {name} does not tell the size of its "
            "memory; pass the bytes that params, values and temporaries of a step may "
            "take there"
        )
    limit_bytes, used_bytes = stats["bytes_limit"], stats.get("bytes_in_use", 0)
    if limit_bytes <= used_bytes:
        raise StreamError(
            f"device_memory_bytes: {name} has nothing free of "
            f"{format_bytes(limit_bytes)}: this process's arrays take "
            f"{format_bytes(used_bytes)}. Delete them, and end other processes on the "
            "device (nvidia-smi lists a GPU's)"
        )
    return limit_bytes - used_bytes


# --- what the process frees -----------------------------------------------------------


def return_freed_memory() -> None:
    """Gives freed memory back to the system, now and from now on; does so with glibc.

    Otherwise the memory that tracing, compilation and XLA's CPU client free would stay
    with the process, up to the peak. Other C libraries return it by themselves. The
    nodes and values of a traced program refer to each other, so garbage is collected.
    """
    gc.collect()
    libc = ctypes.CDLL(None)
    with contextlib.suppress(AttributeError):
        libc.mallopt(_M_MMAP_THRESHOLD, _MMAP_THRESHOLD_BYTES)
        libc.malloc_trim(0)
