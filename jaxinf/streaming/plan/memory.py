"""Divides the memory of host and JAX device; returns freed memory to the system.

Invariant: the sum of the parts never exceeds the whole. What a device says of itself is
looked at before anything is planned; nothing is written, and no memory is taken.
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
from jaxinf.streaming.program.units import PINNED, Unit, UnitOf
from jaxinf.terminal import format_bytes
from jaxinf.transfer import page_ceil

READER_BYTES = 16 << 20
"""The most memory for reading params beside the params themselves."""

NUM_STAGED = 3
"""The host has room for so many of the largest unit, if the device has memory of its
own: one is read, one is copied, and its copy is pinned."""

PINNED_VARIABLE = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"
"""The variable that bounds the pinned memory of XLA's CUDA client."""

_PREALLOCATE_VARIABLE = "XLA_PYTHON_CLIENT_PREALLOCATE"
_DEFAULT_PINNED_GIB = 64
_WITH_POOL = ("cuda", "gpu")
# XLA's pool grows by powers of two, and lends a chunk whole if less than half is left.
_POOL_FACTOR = 2
_FREE_SHARE = 0.9
# What a pool may have of what XLA wanted for it, before something else has the rest.
_WHOLE_SHARE = 0.95

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
    memory_bytes -= needs.export_bytes
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
    most, limit = device.num_bytes, "device_memory_bytes"
    if most is None or device.is_host:
        if most is None or most >= rest:
            most, limit = rest, "memory_bytes"
        found = Memory(ring, gradients, most, 0, leaving, limit)
    else:
        if needs.ring_bytes is not None:
            leaving = min(gradients, max(gradient_bytes, most // _SHARE))
        if leaving >= most:
            raise BudgetError(
                limit,
                f"expected room for the largest gradient ({gradient_bytes} bytes) and "
                f"for the program's params, found {most}",
                1 + leaving - most,
            )
        spare, factor = device.spare_bytes, device.pool_factor
        parts = ring, gradients, most - leaving, rest, leaving
        found = Memory(*parts, limit, spare, factor)
    for need in needs.others:
        found = found.without(*need)
    return found


def store_memory_bytes(memory_bytes: int) -> int:
    """The `memory_bytes` to open a store with, which decide how it divides chunks."""
    return max(_MIN_STORE_BYTES, memory_bytes // _SHARE)


def device_is_host(device: Any) -> bool:
    """Whether a JAX device computes in the host's memory."""
    return device.platform == "cpu"


# --- what a JAX device has ------------------------------------------------------------


def device_limit(device: Any, num_bytes: int | None) -> DeviceLimit:
    """Returns the limit for a JAX device.

    Args:
      num_bytes: `device_memory_bytes`; None for most of what is free, if the device has
        memory of its own.

    Raises:
      StreamError: The device cannot copy from the host's memory as streaming does, does
        not say what is free, or has nothing free.
    """
    if device_is_host(device):
        return DeviceLimit(num_bytes)
    _check_kinds(device)
    factor = _POOL_FACTOR if device.platform in _WITH_POOL else 1
    if num_bytes is not None:
        return DeviceLimit(num_bytes, is_host=False, pool_factor=factor)
    free_bytes = _free_bytes(device)
    num_bytes = int(free_bytes * _FREE_SHARE)
    return DeviceLimit(num_bytes, False, free_bytes - num_bytes, factor)


def limit_of(mesh: Mesh | None, num_bytes: int | None) -> DeviceLimit:
    """Returns the limit for the JAX device, or for each of a mesh: of the smallest."""
    devices = [default_device()] if mesh is None else mesh.local_devices
    limits = [device_limit(device, num_bytes) for device in devices]
    return min(limits, key=lambda limit: limit.num_bytes or 0)


def check_pinned(device: Any, num_bytes: int) -> None:
    """Refuses more pinned memory of the host than XLA's pool of it can have.

    Args:
      num_bytes: What the pool may take for a step, with its rounding.
    """
    text = os.environ.get(PINNED_VARIABLE, "")
    limit_gib = int(text) if text.isdecimal() else _DEFAULT_PINNED_GIB
    if device.platform not in _WITH_POOL or num_bytes <= limit_gib << 30:
        return
    raise StreamError(
        f"memory_bytes: a step may take {format_bytes(num_bytes)} of pinned memory for "
        f"copies to and from {_name(device)}, as XLA's pool rounds up to powers of "
        f"two, and that ends at {limit_gib} GiB. Set {PINNED_VARIABLE}="
        f"{-(-num_bytes // (1 << 30))}, a whole number, before Python starts, or give "
        "less memory"
    )


def _check_kinds(device: Any) -> None:
    kinds = {memory.kind for memory in device.addressable_memories()}
    if PINNED not in kinds:
        raise StreamError(
            f"{_name(device)}: expected memory of the kind {PINNED!r}, from which "
            f"the device copies params, found {', '.join(sorted(kinds)) or 'none'}; "
            "upgrade the JAX plugin of this platform, or use JAX_PLATFORMS=cpu"
        )


def _free_bytes(device: Any) -> int:
    """What a step can have; of a pool, unless XLA could not reserve most of one."""
    stats = device.memory_stats() or {}
    if "bytes_limit" not in stats:
        raise StreamError(
            f"device_memory_bytes: {_name(device)} does not tell the size of its "
            "memory; pass the bytes that params, values and temporaries of a step may "
            "take there"
        )
    limit_bytes, used_bytes = stats["bytes_limit"], stats.get("bytes_in_use", 0)
    pool_bytes = stats.get("pool_bytes") or limit_bytes
    is_shared = os.environ.get(_PREALLOCATE_VARIABLE, "").lower() in ("false", "0")
    is_reserved = device.platform in _WITH_POOL and not is_shared
    if is_reserved and pool_bytes < _WHOLE_SHARE * limit_bytes:
        limit_bytes = pool_bytes  # another process has the rest
    if limit_bytes <= used_bytes:
        raise StreamError(
            f"device_memory_bytes: {_name(device)} has nothing free of "
            f"{format_bytes(limit_bytes)}: this process's arrays take "
            f"{format_bytes(used_bytes)}. Delete them, and end other processes on the "
            "device (nvidia-smi lists a GPU's)"
        )
    return limit_bytes - used_bytes


def _name(device: Any) -> str:
    """Its number and kind; that of a slice of a GPU says MIG."""
    return f"{device} ({device.device_kind})"


# --- what the process frees -----------------------------------------------------------


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
