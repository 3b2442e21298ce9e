"""Calls of the host from a JAX computation; no other module makes them.

   one JAX device:   callback(arguments) ─────────────────────► results
   a mesh:           shard_map( owner of the shard: callback ─► psum of bits )
   several processes:           an owner in each; each fills its part of the results

The backend decides in which of three forms, all with the same bits:

    buffer    a callback that waits for the update, with XLA's own buffers: on a CPU
    io        the same, with copies: on a CPU whose JAX has no `buffer_callback`
    start     a callback takes the gradient, another one fetches the result: elsewhere

Copied arguments that are short travel as the words of one array, since a transfer of
four bytes costs as much as one of a page. Words are integers, which no device flushes
to zero.

Arguments and results are pytrees. Invariant: a host function called from here uses
NumPy alone, runs once for each distinct shard, and, beside other JAX devices, never
raises: an exception next to a waiting collective would abort the process.
"""

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from jaxinf import compat
from jaxinf.engine import callers, sum_bits
from jaxinf.errors import DeviceConfigurationError
from jaxinf.interrupts import run_whole
from jaxinf.typing import Array, PyTree


def by_backend() -> str:
    """Returns the form on JAX's default backend."""
    if jax.default_backend() != "cpu":
        return "start"
    return "buffer" if compat.has_buffer_callback() else "io"


def waits_for_updates() -> bool:
    """Whether the call that brings a gradient also returns its result.

    On accelerators this would block the thread that enqueues their work.
    """
    return by_backend() != "start"


def shares_memory(*, is_local: bool) -> bool:
    """Whether a call hands over XLA's own buffers, so that arguments cost no copy.

    Args:
      is_local: whether the call is under ``shard_map``, so that XLA does not partition
        its computation.
    """
    return by_backend() == "buffer" and (is_local or jax.device_count() == 1)


PACKED_BYTES = 1024
"""Shorter arrays are packed."""

_WORD_BYTES = 4


def pack(tree: PyTree) -> tuple[list[jax.Array], Callable[[list[Array]], PyTree]]:
    """Packs the short arrays of a tree; traceable.

    Returns:
      The long arrays, and then the words, uint32, if any; and a function that makes the
      tree of them on the host, whose short arrays are views of the words.
    """
    leaves, treedef = jax.tree.flatten(tree)
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves]
    is_short = [_num_bytes(shape) < PACKED_BYTES for shape in shapes]
    if sum(is_short) < 2:
        is_short = [False] * len(shapes)
    words = [_words(x) for x, short in zip(leaves, is_short, strict=True) if short]
    long = [x for x, short in zip(leaves, is_short, strict=True) if not short]

    def unpack(arrays: list[Array]) -> PyTree:
        long, begin, found = iter(arrays), 0, []
        for shape, short in zip(shapes, is_short, strict=True):
            if not short:
                found.append(next(long))
                continue
            end = begin + _num_bytes(shape)
            own = arrays[-1].view(np.uint8)[begin:end]
            found.append(own.view(shape.dtype).reshape(shape.shape))
            begin = -(-end // _WORD_BYTES) * _WORD_BYTES
        return treedef.unflatten(found)

    return [*long, jnp.concatenate(words)] if words else long, unpack


def _num_bytes(shape: jax.ShapeDtypeStruct) -> int:
    return math.prod(shape.shape) * shape.dtype.itemsize


def _words(array: jax.Array) -> jax.Array:
    """Returns the bytes of an array as words; the last one is filled with zeros."""
    flat = jnp.asarray(array).reshape(-1)
    if flat.dtype == jnp.bool_:
        flat = flat.astype(jnp.uint8)
    num_in_word = _WORD_BYTES // flat.dtype.itemsize
    if num_in_word > 1:
        flat = jnp.pad(flat, (0, -flat.size % num_in_word)).reshape(-1, num_in_word)
    return lax.bitcast_convert_type(flat, jnp.uint32).reshape(-1)


AnyMesh: TypeAlias = Mesh | AbstractMesh

Host: TypeAlias = Callable[[PyTree, PyTree], None]
"""``host(outs, arguments)`` fills the NumPy arrays of `outs`, and keeps none of them.

It may keep its arguments only if calls do not share memory.
"""

FAILED = 2
"""Status and verdict of a call that raised."""


def check_device_configuration() -> None:
    """Refuses a process whose CPU client is known to deadlock with callbacks.

    With several CPU devices a callback needs a thread of the client's pool to copy its
    arguments. When all threads wait in callbacks, it hangs (jax 0.10, 0.12).

    Raises:
      DeviceConfigurationError: gives the variable to set; or JAX has no CPU backend,
        to which it hands what callbacks get.
    """
    platforms = getattr(jax.config, "jax_platforms", None) or ""
    try:
        num_devices = jax.local_device_count("cpu")
    except RuntimeError as error:
        if not platforms or "cpu" in platforms.split(","):
            raise
        raise DeviceConfigurationError(
            f"JAX_PLATFORMS={platforms}: host callbacks need JAX's CPU backend beside "
            f"the accelerator's. Set JAX_PLATFORMS={platforms},cpu, or unset it"
        ) from error
    if num_devices < 2:
        return
    threads, variable = compat.cpu_client_threads(), compat.CPU_THREADS_VARIABLE
    if threads < 2 * num_devices:
        raise DeviceConfigurationError(
            f"this process has {num_devices} CPU devices, and {variable} is "
            f"{threads or 'not set'}; host callbacks then deadlock in JAX. Start "
            f"Python with {variable}={max(8, 2 * num_devices)} in the environment"
        )


@dataclass(frozen=True, eq=False)
class GuardedHost:
    """A host function whose exception stops the store.

    Attributes:
      host: fills its first argument's arrays from the second's.
      report: gets one that the program learns of by other means.
      warn: gets the number of devices on which its whole arguments are gathered,
        because their shardings are not known.
    """

    host: Host
    stop: Callable[[BaseException], None]
    report: Callable[[BaseException], None]
    warn: Callable[[int], None]

    def raising(self, outs: PyTree, arguments: PyTree) -> None:
        """As a callback that may fail the computation, which one JAX device allows."""
        try:
            run_whole(partial(self._stopping, outs, arguments), self.stop)
            return
        except BaseException as error:
            told = copy.copy(error)
        # JAX adds its frames to a copy, and the store keeps its own error clean.
        compat.raise_in_callback(told)

    def _stopping(self, outs: PyTree, arguments: PyTree) -> None:
        try:
            self.host(outs, arguments)
        except BaseException as error:
            self.stop(error)
            raise

    def reporting(self, outs: PyTree, arguments: PyTree) -> None:
        """As a callback beside other devices: after an exception results are zeros.

        For int32 they are `FAILED`.
        """
        try:
            run_whole(partial(self.host, outs, arguments), self.report)
        except BaseException as error:
            self.report(error)
            for out in jax.tree.leaves(outs):
                out[...] = FAILED if out.dtype == np.int32 else 0


def call_host(
    host: GuardedHost, avals: PyTree, arguments: PyTree, *, is_local: bool
) -> Any:
    """Calls the host with XLA's own buffers if possible, otherwise with copies.

    ``buffer_callback`` copies nothing, but works only on a CPU, and not in a
    computation that XLA partitions. If a computation turns out to have several devices
    whose shardings were not known when it was traced, each gets all of the arguments,
    and the first one calls.

    Args:
      avals: shapes and dtypes of the results.

    Returns:
      The results, a tree like `avals`.
    """
    if is_local:
        return _call(host.reporting, avals, arguments)

    # After an error XLA gives a TPU's program results that nothing has filled.
    is_tpu = jax.default_backend() == "tpu"
    function = host.reporting if is_tpu else host.raising

    def alone(arguments: PyTree) -> Any:
        return _call(function, avals, arguments)

    def beside_others(mesh: AbstractMesh) -> Callable[[PyTree], Any]:
        host.warn(mesh.size)
        return lambda arguments: call_once(host, mesh, arguments, avals)

    if jax.device_count() == 1:
        return alone(arguments)
    return compat.call_by_num_devices(alone, beside_others, arguments)


def _call(host: Host, avals: PyTree, arguments: PyTree) -> Any:
    if shares_memory(is_local=True):
        return compat.call_with_buffers(partial(_with_buffers, host), avals, arguments)
    packed, unpack = pack(arguments)
    if jax.default_backend() != "tpu":
        function = partial(_with_copies, host, avals, unpack)
        return compat.io_callback(function, avals, packed)
    # JAX gives all results of a call the first one's sharding, with as many axes.
    flat = jax.tree.map(lambda a: jax.ShapeDtypeStruct((a.size,), a.dtype), avals)
    function = partial(_with_copies, host, avals, unpack, is_flat=True)
    found = compat.io_callback(function, flat, packed)
    return jax.tree.map(lambda x, aval: x.reshape(aval.shape), found, avals)


def call_owner(
    host: GuardedHost,
    avals: PyTree,
    arguments: PyTree,
    mesh: AnyMesh,
    axes: Sequence[str],
    *,
    shares: bool = True,
) -> Any:
    """Calls the host from the first device along `axes`, in a ``shard_map``.

    The others receive its results' bits, or go on at once with zeros if it does not
    share them. With several processes, the first device of each calls: results in int32
    are the greatest of all, and each host fills its part of the others, and the rest
    with zeros. Other arguments are as for `call_host`.
    """
    axes = tuple(name for name in axes if mesh.shape[name] > 1)
    if not axes:
        return call_host(host, avals, arguments, is_local=True)
    results = lax.cond(
        _is_caller(mesh, axes),
        lambda: call_host(host, avals, arguments, is_local=True),
        lambda: jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), avals),
    )
    if not shares:
        return results
    if jax.process_count() > 1:
        return jax.tree.map(partial(_combined, axes=axes), results)
    return jax.tree.map(lambda result: sum_bits(result, axes), results)


def _is_caller(mesh: AnyMesh, axes: tuple[str, ...]) -> jax.Array:
    """Whether a device is the first along `axes`, in its process."""
    if jax.process_count() == 1:
        is_first = jnp.bool_(True)
        for name in axes:
            is_first &= lax.axis_index(name) == 0
        return is_first
    assert isinstance(mesh, Mesh), "checked by check_processes"
    places = tuple(lax.axis_index(name) for name in mesh.axis_names)
    return jnp.asarray(callers(mesh, axes))[places]


def _combined(result: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    if result.dtype == jnp.int32:
        return lax.pmax(result, axes)
    return sum_bits(result, axes)


def call_once(
    host: GuardedHost, mesh: AnyMesh | None, arguments: PyTree, avals: PyTree
) -> Any:
    """Calls the host once in each process, with replicated arguments and results.

    Results in int32 are the greatest of all processes, others those of the first.

    Args:
      mesh: the run's mesh; None for one JAX device.
      avals: shapes and dtypes of the results.
    """
    if mesh is None:
        return call_host(host, avals, arguments, is_local=False)

    def on_device(arguments: PyTree) -> Any:
        called = _only_first(host) if jax.process_count() > 1 else host
        return call_owner(called, avals, arguments, mesh, mesh.axis_names)

    whole = PartitionSpec()
    return compat.shard_map(on_device, mesh=mesh, in_specs=(whole,), out_specs=whole)(
        arguments
    )


def _with_buffers(host: Host, context: Any, outs: PyTree, arguments: PyTree) -> None:
    del context
    host(*jax.tree.map(np.asarray, (outs, arguments)))


def _with_copies(
    host: Host,
    avals: PyTree,
    unpack: Callable[[list[Array]], PyTree],
    packed: list[Any],
    *,
    is_flat: bool = False,
) -> PyTree:
    outs = jax.tree.map(lambda aval: np.empty(aval.shape, aval.dtype), avals)
    host(outs, unpack(list(map(np.asarray, packed))))
    return jax.tree.map(np.ravel, outs) if is_flat else outs


def _only_first(host: GuardedHost) -> GuardedHost:
    """Returns a host function whose results other than int32 the first process has."""

    def called(outs: PyTree, arguments: PyTree) -> None:
        host.host(outs, arguments)
        if jax.process_index():
            for out in jax.tree.leaves(outs):
                if out.dtype != np.int32:
                    out[...] = 0

    return replace(host, host=called)
