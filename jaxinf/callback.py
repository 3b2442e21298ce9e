"""The one seam through which a JAX computation calls the host.

   one JAX device:   io_callback(leaf) ─────────────────────────► result, status
   a mesh:           shard_map( owner of the shard: io_callback ─► psum of bits )

Invariant: a host function called from here uses NumPy alone, runs once for each
distinct shard, and, beside other JAX devices, never raises: an exception next to a
waiting collective would abort the process.
"""

import os
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import io_callback
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxinf.errors import DeviceConfigurationError
from jaxinf.typing import Array

__all__ = ["call_on_shards", "call_once", "check_device_configuration"]

Host = Callable[..., tuple[Array, ...]]
"""Called with the shard's coordinates (int32, one a dimension) and NumPy arguments."""


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
    setting = os.environ.get("PJRT_NPROC") or os.environ.get("NPROC") or "0"
    threads = int(setting) if setting.isdigit() else 0
    if threads < 2 * num_devices:
        raise DeviceConfigurationError(
            f"this process has {num_devices} CPU devices, and PJRT_NPROC is "
            f"{threads or 'not set'}; host callbacks then deadlock in JAX. Start "
            f"Python with PJRT_NPROC={max(8, 2 * num_devices)} in the environment"
        )


def call_on_shards(
    host: Host,
    sharding: NamedSharding | None,
    shared: Sequence[jax.Array],
    arrays: Sequence[jax.Array],
    out_dtype: Any,
) -> tuple[jax.Array, jax.Array]:
    """Calls the host with a leaf, shard by shard.

    Args:
      host: ``host(coordinates, *shared, *arrays) -> (out, status)``.
      sharding: of the arrays; None for one JAX device.
      shared: the same for all shards: scalars.
      arrays: of the leaf's shape, at least one.
      out_dtype: of the result, which has the leaf's shape.

    Returns:
      The result, sharded like the arrays, and the greatest status (int32).
    """
    shape = arrays[0].shape
    if sharding is None:
        avals = (jax.ShapeDtypeStruct(shape, out_dtype), _STATUS)
        origin = np.zeros(len(shape), np.int32)
        return io_callback(host, avals, origin, *shared, *arrays)
    mesh, spec = sharding.mesh, sharding.spec
    assert isinstance(mesh, Mesh)

    def on_device(shared: Any, arrays: Any) -> tuple[jax.Array, jax.Array]:
        avals = (jax.ShapeDtypeStruct(arrays[0].shape, out_dtype), _STATUS)
        coordinates, used = _coordinates(mesh, spec, len(shape))
        others = tuple(name for name in mesh.axis_names if name not in used)
        out, status = _owner_calls(
            host, avals, (coordinates, *shared, *arrays), mesh, others
        )
        return out, lax.pmax(status, mesh.axis_names)

    whole = PartitionSpec()
    return jax.shard_map(
        on_device,
        mesh=mesh,
        in_specs=([whole] * len(shared), [spec] * len(arrays)),
        out_specs=(spec, whole),
        check_vma=False,
    )(list(shared), list(arrays))


def call_once(
    host: Host,
    mesh: Mesh | None,
    arguments: Sequence[jax.Array],
    avals: Sequence[jax.ShapeDtypeStruct],
) -> tuple[jax.Array, ...]:
    """Calls the host once a process, with replicated arguments, for replicated results.

    Args:
      host: ``host(*arguments) -> results`` of the shapes of `avals`.
      mesh: the run's mesh; None for one JAX device.
      arguments: small arrays.
      avals: shapes and dtypes of the results.
    """
    if mesh is None:
        return io_callback(host, tuple(avals), *arguments)

    def on_device(*arguments: Any) -> tuple[jax.Array, ...]:
        return _owner_calls(host, tuple(avals), arguments, mesh, mesh.axis_names)

    whole = PartitionSpec()
    return jax.shard_map(
        on_device,
        mesh=mesh,
        in_specs=whole,
        out_specs=whole,
        check_vma=False,
    )(*arguments)


_STATUS = jax.ShapeDtypeStruct((), np.int32)


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
        return io_callback(host, avals, *arguments)
    is_owner = jnp.bool_(True)
    for name in axes:
        is_owner &= lax.axis_index(name) == 0
    results = lax.cond(
        is_owner,
        lambda: tuple(io_callback(host, avals, *arguments)),
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
