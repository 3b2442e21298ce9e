"""A model of an asynchronous accelerator on JAX's side: copies that end late.

    jax.device_put ─► an array, not ready ─► programs before it end ─► source read

A copy between the host and the device reads its source only then, so memory that is
used again too early gives other values. Copies are counted as XLA makes them on CUDA:
what is neither registered nor pinned is copied through a pinned buffer of XLA's.
"""

import contextlib
import itertools
import time
import weakref
from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback
from jax.sharding import Sharding

from jaxinf import compat
from jaxinf.transfer import PAGE_BYTES

DELAY_S = 0.002
ALIGNED_BYTES = 64
OTHER_BYTE = 0x5A
"""What memory holds before a copy has ended; finite numbers of all dtypes."""


class Copy(NamedTuple):
    """A copy of an array from one kind of memory to another."""

    source: str
    target: str
    num_bytes: int
    num_copies: int  # on the way


class LateCopies:
    """Has copies by `jax.device_put` to a sharding of one device end late.

    It is a `Registry`, too: the one of its device, unless `registers` is false.
    """

    def __init__(self, monkeypatch):
        self.copies: list[Copy] = []
        self.faults: list[str] = []  # what was done too early
        self._pinned: list[weakref.ref[jax.Array]] = []
        self.registers = True
        self.registered: dict[int, int] = {}
        self._last: jax.Array | None = None
        self._program: weakref.ref[jax.Array] | None = None
        self._put, self._call = jax.device_put, jax.stages.Compiled.__call__
        array = type(jnp.zeros(()))
        start = array.copy_to_host_async

        def called(program, *args, **kwargs):
            outputs = self._call(program, *args, **kwargs)
            for output in jax.tree.leaves(outputs)[:1]:
                self._program = weakref.ref(output)
            return outputs

        def to_host(values):
            self.copies.append(Copy("device", "pageable", values.nbytes, 2))
            start(values)

        monkeypatch.setattr(jax, "device_put", self.device_put)
        monkeypatch.setattr(jax.stages.Compiled, "__call__", called)
        monkeypatch.setattr(array, "copy_to_host_async", to_host)
        monkeypatch.setattr(compat, "memory_registry", self._registry_of)

    def _registry_of(self, device):
        del device
        return self if self.registers else None

    def device_put(self, x, device=None, **options):
        """As `jax.device_put`; does not block."""
        leaves, tree = jax.tree.flatten(x)
        targets = jax.tree.leaves(device)
        targets = targets * len(leaves) if len(targets) == 1 else targets
        begun: list[Copy] = []
        found = [
            self._copied(leaf, target, options, begun)
            for leaf, target in itertools.zip_longest(leaves, targets)
        ]
        self.copies += begun
        return tree.unflatten(found)

    def copied_bytes(self, target):
        """Returns the bytes of all copies on the way to a kind of memory."""
        found = [one for one in self.copies if one.target == target]
        return sum(one.num_copies * one.num_bytes for one in found)

    def dma_map(self, address, size):
        """As `Registry.dma_map`."""
        if address % PAGE_BYTES or size % PAGE_BYTES or address in self.registered:
            raise RuntimeError(f"{address}, {size}: expected other pages")
        self.registered[address] = size

    def dma_unmap(self, address):
        """As `Registry.dma_unmap`."""
        memory = range(address, address + self.registered.pop(address))
        sources = [source for source, *_ in _SOURCES.values()]
        if any(isinstance(x, np.ndarray) and x.ctypes.data in memory for x in sources):
            self.faults.append(f"{memory}: a copy is under way")

    def before_its_end(self, array):
        """Returns what is in the memory of a copy to the host that has not ended."""
        assert any(one() is array for one in self._pinned)
        raw = np.full(array.nbytes, OTHER_BYTE, np.uint8)
        return raw.view(array.dtype).reshape(array.shape)

    def settle(self):
        """Waits for all copies; nothing was done too early."""
        if self._last is not None:
            self._last.block_until_ready()
        assert not self.faults

    def _copied(self, source, target, options, begun):
        kind, count = self._kind(source), 1
        if not isinstance(target, Sharding) or len(target.device_set) > 1:
            return self._put(source, target, **options)
        to = target.memory_kind or "device"
        if kind == to:
            return self._put(source, target, **options)
        if isinstance(source, np.ndarray):
            flags, address = source.flags, source.ctypes.data
            is_read_there = flags.c_contiguous and address % ALIGNED_BYTES == 0
            count += not is_read_there
            count += kind == "pageable" and to == "device"
        begun.append(Copy(kind, to, source.nbytes, count))
        number = np.int32(next(_NUMBERS))
        _SOURCES[int(number)] = source, self._program
        copy = _copy(tuple(source.shape), np.dtype(source.dtype))
        array, self._last = self._call(copy, number, self._pending())
        found = self._put(array, target)
        if to == "pinned_host":
            self._pinned.append(weakref.ref(found))
        return found

    def _kind(self, source):
        if isinstance(source, jax.Array):
            return source.sharding.memory_kind or "device"
        if not isinstance(source, np.ndarray):
            return "none"
        first, end = source.ctypes.data, source.ctypes.data + source.nbytes
        known = list(self.registered.items())
        is_own = any(start <= first and end <= start + size for start, size in known)
        return "registered" if is_own else "pageable"

    def _pending(self):
        """Returns a number that is not there yet.

        XLA runs a program with a callback at once if all its inputs are there.
        """
        if self._last is not None and not self._last.is_ready():
            return self._last
        return _busy()(jnp.ones((512, 512)))


# The sources of copies that have not ended, and the programs before them.
_SOURCES: dict[int, Any] = {}
_NUMBERS = itertools.count()


@cache
def _busy():
    return jax.jit(lambda x: (x @ x @ x)[0, 0])


@cache
def _copy(shape, dtype):
    """Returns a program that copies an array of this shape when `pending` is there."""
    number = jax.ShapeDtypeStruct((), jnp.int32)
    pending = jax.ShapeDtypeStruct((), jnp.float32)
    avals = jax.ShapeDtypeStruct(shape, dtype), pending

    def copy(number, pending):
        return io_callback(_read, avals, number, pending)

    return jax.jit(copy).lower(number, pending).compile()


def _read(number, pending):
    """Reads the source of a copy; on a thread of XLA's."""
    source, program = _SOURCES[int(number)]
    output = None if program is None else program()
    if output is not None:
        with contextlib.suppress(RuntimeError):  # its memory is another's now
            output.block_until_ready()
    time.sleep(DELAY_S)
    copy = np.array(source)
    del _SOURCES[int(number)]
    return copy, np.float32(0)
