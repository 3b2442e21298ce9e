"""The one seam through which a JAX computation calls the host.

   one JAX device:   callback(leaf) ─────────────────────────► result, status
   a mesh:           shard_map( owner of the shard: callback ─► psum of bits )

Invariant: a host function called from here uses NumPy alone, runs once for each
distinct shard, and, beside other JAX devices, never raises: an exception next to a
waiting collective would abort the process.
"""

import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxinf import compat
from jaxinf.errors import DeviceConfigurationError
from jaxinf.typing import Array

__all__ = [
    "Host",
    "Prepare",
    "call_on_shards",
    "call_once",
    "check_device_configuration",
    "shares_memory",
    "waits_for_updates",
]

Host = Callable[..., None]
"""``host(outs, *arguments)`` fills the NumPy arrays `outs`, and keeps none of them.

Arguments it may keep only where calls do not share memory.
"""

Prepare = Callable[[Sequence[jax.Array]], tuple[Sequence[jax.Array], list[jax.Array]]]
"""``prepare(arrays)`` → what the host is given, what is kept."""


def check_device_configuration() -> None:
    """Refuses a process whose CPU client is known to deadlock with callbacks.

    With several CPU devices the callback's own argument copy needs a thread of the
    client's pool; when all of them wait in callbacks, it hangs (jax 0.10, 0.12).

    Raises:
      DeviceConfigurationError: with the line to set.
    """
    num_devices = jax.local_device_count("cpu")
    if num_devices < 2:
        return
    threads, variable = compat.cpu_client_threads(), compat.CPU_THREADS_VARIABLE
    if threads < 2 * num_devices:
        raise DeviceConfigurationError(
            f"this process has {num_devices} CPU devices, and {variable} is "
            f"{threads or 'not set'}; host callbacks then deadlock in JAX. Start "
            f"Python with {variable}={max(8, 2 * num_devices)} in the environment"
        )


def call_on_shards(
    host: Host,
    sharding: NamedSharding | None,
    shared: Sequence[jax.Array],
    arrays: Sequence[jax.Array],
    out: jax.ShapeDtypeStruct | None,
    prepare: Prepare | None = None,
) -> tuple[jax.Array | None, jax.Array, list[jax.Array]]:
    """Calls the host with a leaf, shard by shard.

    Args:
      host: ``host((out, status), coordinates, *shared, *arrays)``; without a result
        ``host((status,), …)``. `coordinates` (int32, one a dimension) say which shard.
      sharding: of the arrays; None for one JAX device.
      shared: the same for all shards: scalars.
      arrays: of the leaf's shape; at least one where there is no result.
      out: the result, which has the leaf's shape; None for no result.
      prepare: makes of a JAX device's own part of `arrays` what the host is given in
        their place, and arrays of that part's shape to keep.

    Returns:
      The result, sharded like the arrays, the greatest status (int32), and what was
      kept, sharded alike.
    """
    prepare = prepare or _as_they_are
    ndim = (arrays[0] if out is None else out).ndim
    avals = _leaf_avals(out, sharding)
    if sharding is None:
        origin = jnp.zeros(ndim, jnp.int32)
        given, kept = prepare(arrays)
        *found, status = _call(host, avals, (origin, *shared, *given), is_local=False)
        return (found[0] if found else None), status, kept
    mesh, spec = sharding.mesh, sharding.spec
    assert isinstance(mesh, Mesh)

    def on_device(shared: Any, arrays: Any) -> tuple[list[jax.Array], Any, Any]:
        coordinates, used = _coordinates(mesh, spec, ndim)
        others = tuple(name for name in mesh.axis_names if name not in used)
        given, kept = prepare(arrays)
        arguments = (coordinates, *shared, *given)
        *found, status = _owner_calls(host, avals, arguments, mesh, others)
        return found, lax.pmax(status, mesh.axis_names), kept

    whole = PartitionSpec()
    found, status, kept = compat.shard_map(
        on_device,
        mesh=mesh,
        in_specs=([whole] * len(shared), [spec] * len(arrays)),
        out_specs=(spec, whole, spec),
    )(list(shared), list(arrays))
    return (found[0] if found else None), status, kept


def call_once(
    host: Host,
    mesh: Mesh | None,
    arguments: Sequence[jax.Array],
    avals: Sequence[jax.ShapeDtypeStruct],
) -> tuple[jax.Array, ...]:
    """Calls the host once a process, with replicated arguments, for replicated results.

    Args:
      host: ``host(outs, *arguments)``.
      mesh: the run's mesh; None for one JAX device.
      arguments: small arrays.
      avals: shapes and dtypes of the results.
    """
    if mesh is None:
        return _call(host, tuple(avals), arguments, is_local=False)

    def on_device(*arguments: Any) -> tuple[jax.Array, ...]:
        return _owner_calls(host, tuple(avals), arguments, mesh, mesh.axis_names)

    whole = PartitionSpec()
    return compat.shard_map(
        on_device,
        mesh=mesh,
        in_specs=whole,
        out_specs=whole,
    )(*arguments)


def _as_they_are(
    arrays: Sequence[jax.Array],
) -> tuple[Sequence[jax.Array], list[jax.Array]]:
    return arrays, []


def _leaf_avals(
    out: jax.ShapeDtypeStruct | None, sharding: NamedSharding | None
) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Of the results of one device's call."""
    status = jax.ShapeDtypeStruct((), np.int32)
    if out is None:
        return (status,)
    shape = out.shape if sharding is None else sharding.shard_shape(out.shape)
    return (jax.ShapeDtypeStruct(shape, out.dtype), status)


def waits_for_updates() -> bool:
    """Whether the call that brings a gradient also returns what comes of it.

    On accelerators it would hold up the thread that enqueues their work.
    ``JAXINF_CALLBACK=start`` overrides, as do ``buffer`` and ``io``.
    """
    by_default = "io" if jax.default_backend() == "cpu" else "start"
    return _way(by_default) != "start"


def shares_memory(*, is_local: bool) -> bool:
    """Whether a call hands over XLA's own buffers, so that arguments cost no copy.

    Args:
      is_local: whether the call is a device's own part of a computation, under
        ``shard_map``, rather than of one that XLA may partition.
    """
    is_alone = is_local or jax.device_count() == 1
    can_share = jax.default_backend() == "cpu" and is_alone
    can_share = can_share and compat.has_buffer_callback()
    return _way("buffer" if can_share else "io") == "buffer"


def _way(default: str) -> str:
    """How the host is called: what JAXINF_CALLBACK says, else the default."""
    way = os.environ.get("JAXINF_CALLBACK") or default
    known = ("buffer", "io", "start")
    if way not in known:
        raise ValueError(
            f"JAXINF_CALLBACK: expected one of {', '.join(known)}, found {way!r}"
        )
    if way == "buffer" and not compat.has_buffer_callback():
        raise ValueError(
            "JAXINF_CALLBACK: expected io or start, as this JAX "
            f"({jax.__version__}) has no buffer_callback, found 'buffer'"
        )
    return way


def _call(
    host: Host,
    avals: tuple[jax.ShapeDtypeStruct, ...],
    arguments: Sequence[Any],
    *,
    is_local: bool,
) -> tuple[jax.Array, ...]:
    """Calls the host with XLA's own buffers where that can be, else with copies.

    ``buffer_callback`` copies nothing in either direction, but reaches the host's NumPy
    on a CPU only and cannot sit in a computation that XLA partitions (`is_local`: this
    one is a device's own part). JAXINF_CALLBACK (``io``, ``start``: copies; ``buffer``)
    overrides.
    """
    if shares_memory(is_local=is_local):
        return compat.call_with_buffers(partial(_with_buffers, host), avals, *arguments)
    copying = partial(_with_copies, host, avals)
    return compat.call_with_copies(copying, avals, *arguments)


def _with_buffers(host: Host, context: Any, outs: Any, *arguments: Any) -> None:
    del context
    host([np.asarray(out) for out in outs], *map(np.asarray, arguments))


def _with_copies(
    host: Host, avals: Sequence[jax.ShapeDtypeStruct], *arguments: Any
) -> tuple[Array, ...]:
    outs = tuple(np.empty(aval.shape, aval.dtype) for aval in avals)
    host(outs, *map(np.asarray, arguments))
    return outs


def _coordinates(
    mesh: Mesh, spec: PartitionSpec, ndim: int
) -> tuple[jax.Array, set[str]]:
    """This device's shard along each dimension, and the mesh axes it comes from."""
    used: set[str] = set()
    coordinates = []
    for entry in (*spec, *[None] * (ndim - len(spec))):
        names = entry if isinstance(entry, tuple) else (entry,)
        position = jnp.int32(0)
        for name in names:
            if isinstance(name, str):
                used.add(name)
                position = position * mesh.shape[name] + lax.axis_index(name)
        coordinates.append(position)
    return jnp.array(coordinates, jnp.int32).reshape(ndim), used


def _owner_calls(
    host: Host,
    avals: tuple[jax.ShapeDtypeStruct, ...],
    arguments: Sequence[Any],
    mesh: Mesh,
    axes: tuple[str, ...],
) -> Any:
    """Along `axes` the first device calls; the others receive its results' bits."""
    axes = tuple(name for name in axes if mesh.shape[name] > 1)
    if not axes:
        return _call(host, avals, arguments, is_local=True)
    is_owner = jnp.bool_(True)
    for name in axes:
        is_owner &= lax.axis_index(name) == 0
    results = lax.cond(
        is_owner,
        lambda: _call(host, avals, arguments, is_local=True),
        lambda: tuple(jnp.zeros(a.shape, a.dtype) for a in avals),
    )
    return tuple(_sum_bits(result, axes) for result in results)


def _sum_bits(value: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Sum over devices of which all but one hold zero bits: exact, -0.0 and NaN too."""
    bits = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint64}
    if value.dtype == jnp.bool_:
        return lax.psum(value.astype(jnp.uint8), axes) > 0
    raw = lax.bitcast_convert_type(value, bits[value.dtype.itemsize])
    return lax.bitcast_convert_type(lax.psum(raw, axes), value.dtype)
