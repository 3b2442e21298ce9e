"""Divides the memory of host and JAX device; returns freed memory to the system.

Invariant: the shares never exceed the whole. What a device says of itself is looked at
before anything is planned; nothing is written, and no memory is taken.
"""

import contextlib
import ctypes
import gc
import os
from collections.abc import Sequence, Set
from dataclasses import dataclass, field, replace
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
"""The share of what a device has free that a step takes by default."""

_M_MMAP_THRESHOLD = -3
_MMAP_THRESHOLD_BYTES = 256 << 10
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
    """What a step may take: the user's limits, and what the device has."""

    memory_bytes: int
    device_memory_bytes: int | None = None  # in place of the limit of `device`
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
      reusable: Units whose updates can take what was read for a program.
      state_bytes: The store's least buffers for updates; None if there are none.
      gradient_bytes: Size of the largest unit whose gradient is handed out.
      writing_bytes: What writing values to drives takes, if they may leave.
    """

    unit_of: UnitOf | None = None
    frozen: Set[int] = frozenset()
    reusable: Set[ParamUnit] = frozenset()
    state_bytes: int | None = None
    gradient_bytes: int = 0
    export_bytes: int = 0
    others: Sequence[MemoryNeed] = ()
    writing_bytes: int = 0


@dataclass(frozen=True)
class StepMemory:
    """The memory of a step.

    Attributes:
      state_bytes: The store's buffers for the optimizer's state, at least.
      gradient_bytes: Gradients on the host that wait for their update, without what a
        pool of pinned memory takes for them beside that.
      program_bytes: Params, values and temporaries of a step's programs.
      staged_bytes: Host memory for params that are on their way to the device, or wait
        for their update; 0 if the device's memory is the host's.
      leaving_bytes: Gradients that leave the device or wait for their update.
      limit: The argument that bounds `program_bytes`.
    """

    state_bytes: int = 0
    gradient_bytes: int = 0
    program_bytes: int = 0
    staged_bytes: int = 0
    leaving_bytes: int = 0
    limit: str = "memory_bytes"
    pool_factor: int = 1


def divide_memory(budget: Budget, needs: StepNeeds) -> StepMemory:
    """Returns what a step has for its programs, and for all else.

    A share is an eighth of `memory_bytes` without the memory of exports.

    state        a share, at most 512 MiB, at least what the store needs
    gradients    a share, at least the largest one, as a pool of pinned memory rounds up
    reading      a share, at most 16 MiB
    programs     the rest; or params on their way, if the device has memory of its own

    Such a device has up to an eighth, at least the largest, for gradients, and the rest
    for programs. `others` come off programs, or off params on their way.
    """
    memory_bytes = budget.memory_bytes - needs.export_bytes
    share, gradient_bytes = memory_bytes // _SHARE, needs.gradient_bytes
    device, factor = budget.device, budget.device.pool_factor
    state_bytes = pooled_bytes = 0
    if needs.state_bytes is not None:
        state_bytes = max(needs.state_bytes, min(share, _MAX_STATE_BYTES))
        pooled_bytes = max(factor * gradient_bytes, share)
    reading_bytes = 0 if needs.unit_of is None else min(READER_BYTES, share)
    left_bytes = memory_bytes - state_bytes - pooled_bytes - reading_bytes
    if left_bytes < 1:
        raise BudgetError(
            "memory_bytes",
            "expected room for the store's buffers "
            f"({format_bytes(needs.state_bytes or 0)}), for the largest gradient "
            f"({format_bytes(factor * gradient_bytes)}) and for the program's params, "
            f"found {format_bytes(memory_bytes)}",
            1 - left_bytes,
        )
    leaving_bytes, device_bytes = pooled_bytes // factor, budget.device_memory_bytes
    device_bytes = device.num_bytes if device_bytes is None else device_bytes
    program_bytes, staged_bytes, limit = left_bytes, 0, "memory_bytes"
    if device_bytes is not None and not device.is_host:
        leaving_bytes = min(leaving_bytes, max(gradient_bytes, device_bytes // _SHARE))
        program_bytes, staged_bytes = device_bytes - leaving_bytes, left_bytes
        limit = "device_memory_bytes"
    elif device_bytes is not None and device_bytes < left_bytes:
        program_bytes, limit = device_bytes, "device_memory_bytes"
    memory = StepMemory(
        state_bytes=state_bytes,
        gradient_bytes=pooled_bytes // factor,
        program_bytes=program_bytes,
        staged_bytes=staged_bytes,
        leaving_bytes=leaving_bytes,
        limit=limit,
        pool_factor=factor,
    )
    for need in needs.others:
        memory = _without(memory, need)
    return memory


def _without(memory: StepMemory, need: MemoryNeed) -> StepMemory:
    """Returns the memory that a need leaves; raises BudgetError if that is nothing."""
    is_staged = memory.staged_bytes > 0 and not need.is_on_device
    name = "staged_bytes" if is_staged else "program_bytes"
    left_bytes = getattr(memory, name) - need.num_bytes
    if left_bytes < 1:
        raise BudgetError(
            "memory_bytes" if is_staged else memory.limit,
            f"it leaves {format_bytes(max(0, getattr(memory, name)))} for the program, "
            f"and {need.purpose} takes {format_bytes(need.num_bytes)}",
            1 - left_bytes,
        )
    return replace(memory, **{name: left_bytes})


def store_memory_bytes(memory_bytes: int) -> int:
    """Returns `memory_bytes` to open a store with, which decide how chunks divide."""
    return max(_MIN_STORE_BYTES, memory_bytes // _SHARE)


def device_is_host(device: Any) -> bool:
    """Whether a JAX device computes in the host's memory."""
    return device.platform == "cpu"


def limit_of(mesh: Mesh | None, num_bytes: int | None) -> DeviceLimit:
    """Returns the limit for the JAX device, or for each of a mesh.

    Args:
      num_bytes: `device_memory_bytes`; None for most of what is free, on the smallest
        of devices with memory of their own.
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
    """Refuses more pinned memory, as XLA's pool rounds it, than the pool can have."""
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
