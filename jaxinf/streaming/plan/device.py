"""What a step may take of a JAX device's memory, and what it needs of its platform.

Invariant: what a device says of itself is looked at before anything is planned; nothing
is written, and no memory is taken.
"""

import os
from typing import Any

from jax.sharding import Mesh

from jaxinf.errors import StreamError
from jaxinf.streaming.plan import memory
from jaxinf.streaming.plan.memory import DeviceLimit
from jaxinf.streaming.program.meshes import default_device
from jaxinf.streaming.program.units import PINNED
from jaxinf.terminal import format_bytes

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


def device_limit(device: Any, num_bytes: int | None) -> DeviceLimit:
    """Returns the limit for a JAX device.

    Args:
      num_bytes: `device_memory_bytes`; None for most of what is free, if the device has
        memory of its own.

    Raises:
      StreamError: The device cannot copy from the host's memory as streaming does, does
        not say what is free, or has nothing free.
    """
    if memory.device_is_host(device):
        return DeviceLimit(num_bytes)
    _check_kinds(device)
    factor = _POOL_FACTOR if device.platform in _WITH_POOL else 1
    if num_bytes is not None:
        return DeviceLimit(num_bytes, is_host=False, pool_factor=factor)
    free_bytes = _free_bytes(device)
    num_bytes = int(free_bytes * _FREE_SHARE)
    return DeviceLimit(num_bytes, False, free_bytes - num_bytes, factor)


def limit_of(mesh: Mesh | None, num_bytes: int | None) -> DeviceLimit:
    """Returns the limit for the JAX device, or for each of a mesh: of the smallest.

    Raises:
      StreamError: As `device_limit`, of any of them.
    """
    devices = [default_device()] if mesh is None else mesh.local_devices
    limits = [device_limit(device, num_bytes) for device in devices]
    return min(limits, key=lambda limit: limit.num_bytes or 0)


def check_pinned(device: Any, num_bytes: int) -> None:
    """Refuses more pinned memory of the host than XLA's pool of it can have.

    Args:
      num_bytes: What the pool may take for a step, with its rounding.

    Raises:
      StreamError: Names the variable, and what it needs.
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
