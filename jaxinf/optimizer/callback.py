"""Calls of the host from a JAX computation; no other module makes them.

   one JAX device:   callback(arguments) ─────────────────────► results
   a mesh:           shard_map( owner of the shard: callback ─► psum of bits )
   several processes:           an owner in each; each fills its part of the results

On a CPU a callback has XLA's own buffers; elsewhere it has copies. Arguments and
results are pytrees.

Invariant: a host function called from here uses NumPy alone, runs once for each
distinct shard, and, beside other JAX devices, never raises: an exception next to a
waiting collective would abort the process.
"""

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from jaxinf import compat
from jaxinf.engine import calling_devices, sum_bits
from jaxinf.errors import DeviceConfigurationError
from jaxinf.processes import run_uninterrupted
from jaxinf.typing import PyTree

AnyMesh: TypeAlias = Mesh | AbstractMesh

HostFunction: TypeAlias = Callable[[PyTree, PyTree], None]
"""``function(outs, arguments)`` fills the NumPy arrays of `outs`.

It keeps none of them, and its arguments only if calls do not share memory.
"""

FAILED = 2
"""Status and verdict of a call that raised."""

_WHOLE = PartitionSpec()
_LOG = logging.getLogger("jaxinf")


def shares_memory() -> bool:
    """Whether a call hands over XLA's own buffers: on a CPU, where copies cost most.

    Elsewhere a call that waits would block the thread that enqueues the device's work.
    """
    return jax.default_backend() == "cpu"


def check_device_configuration() -> None:
    """Refuses a process whose CPU client is known to deadlock with callbacks.

    With several CPU devices a callback needs a thread of the client's pool to copy its
    arguments. When all threads wait in callbacks, it hangs (jax 0.10, 0.12).

    Raises:
      DeviceConfigurationError: Names the variable to set; or JAX has no CPU backend,
        which callbacks need.
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
class HostCallback:
    """A host function whose exception stops the store.

    Attributes:
      stop: Gets the exception of a call that JAX raises.
      report: Gets one that the program learns of by other means.
    """

    function: HostFunction
    stop: Callable[[BaseException], None]
    report: Callable[[BaseException], None]

    def run_or_raise(self, outs: PyTree, arguments: PyTree) -> None:
        """Runs where an exception may fail the computation, as on one JAX device."""

        def run() -> None:
            try:
                self.function(outs, arguments)
            except BaseException as error:
                self.stop(error)
                raise

        run_uninterrupted(run)

    def run_or_report(self, outs: PyTree, arguments: PyTree) -> None:
        """Runs beside other devices; an exception gives zeros, `FAILED` in int32."""
        try:
            run_uninterrupted(partial(self.function, outs, arguments))
        except BaseException as error:
            self.report(error)
            for out in jax.tree.leaves(outs):
                out[...] = FAILED if out.dtype == np.int32 else 0


def _call(function: HostFunction, arguments: PyTree, avals: PyTree) -> Any:
    if shares_memory():

        def with_buffers(_: Any, outs: PyTree, arguments: PyTree) -> None:
            function(*jax.tree.map(np.asarray, (outs, arguments)))

        callback = compat.buffer_callback(with_buffers, avals, has_side_effect=True)
        return callback(arguments)

    def with_copies(arguments: PyTree) -> PyTree:
        outs = jax.tree.map(lambda aval: np.empty(aval.shape, aval.dtype), avals)
        function(outs, jax.tree.map(np.asarray, arguments))
        return jax.tree.map(np.ravel, outs)

    # On a TPU all results of a call get the first one's sharding, with as many axes.
    flat = jax.tree.map(lambda a: jax.ShapeDtypeStruct((a.size,), a.dtype), avals)
    results = compat.io_callback(with_copies, flat, arguments)
    return jax.tree.map(lambda x, aval: x.reshape(aval.shape), results, avals)


def call_host(
    host: HostCallback, arguments: PyTree, avals: PyTree, *, is_local: bool
) -> Any:
    """Calls the host from each device, or from the only one.

    If a computation turns out to have several devices whose shardings were not known
    when it was traced, each gets all of the arguments, and the first one calls.

    Args:
      is_local: Whether the call is under ``shard_map``, so that XLA does not partition
        its computation.
    """
    if is_local:
        return _call(host.run_or_report, arguments, avals)

    # After an error XLA gives a TPU's program results that nothing has filled.
    is_tpu = jax.default_backend() == "tpu"
    function = host.run_or_report if is_tpu else host.run_or_raise

    def on_one_device(arguments: PyTree) -> Any:
        return _call(function, arguments, avals)

    def on_several(mesh: AbstractMesh) -> Callable[[PyTree], Any]:
        _warn_of_gathering(mesh.size)
        return lambda arguments: call_once(host, arguments, avals, mesh)

    if jax.device_count() == 1:
        return on_one_device(arguments)
    return compat.call_by_num_devices(on_one_device, on_several, arguments)


@cache
def _warn_of_gathering(num_devices: int) -> None:
    _LOG.warning(
        "smart_update: the shardings of the params were not known when the computation "
        "was traced, so each gradient is gathered on all %d devices, which costs "
        "nothing only if the params are replicated. Give them: smart_update(tx, store, "
        "shardings=jax.tree.map(lambda x: x.sharding, params)), or call "
        "tx.init(params) outside of jit",
        num_devices,
    )


def call_owner(
    host: HostCallback,
    arguments: PyTree,
    avals: PyTree,
    mesh: AnyMesh,
    axes: Sequence[str],
    *,
    shares: bool = True,
) -> Any:
    """Calls the host from the first device along `axes`, in a ``shard_map``.

    With several processes, the first device of each calls: results in int32 are the
    greatest of all, and each host fills its part of the others, and the rest with
    zeros. `arguments` and `avals` are as for `call_host`.

    Args:
      shares: Whether the other devices wait for the results' bits, in a collective; if
        not, they go on at once with zeros.
    """
    axes = tuple(name for name in axes if mesh.shape[name] > 1)
    if not axes:
        return call_host(host, arguments, avals, is_local=True)
    results = lax.cond(
        _is_caller(mesh, axes),
        lambda: call_host(host, arguments, avals, is_local=True),
        lambda: jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), avals),
    )
    if not shares:
        return results
    is_one_process = jax.process_count() == 1
    return jax.tree.map(
        lambda result: (
            lax.pmax(result, axes)
            if result.dtype == jnp.int32 and not is_one_process
            else sum_bits(result, axes)
        ),
        results,
    )


def _is_caller(mesh: AnyMesh, axes: tuple[str, ...]) -> jax.Array:
    """Whether a device is the first along `axes`, in its process."""
    if jax.process_count() == 1:
        is_first = jnp.bool_(True)
        for name in axes:
            is_first &= lax.axis_index(name) == 0
        return is_first
    assert isinstance(mesh, Mesh), "checked by check_processes"
    places = tuple(lax.axis_index(name) for name in mesh.axis_names)
    return jnp.asarray(calling_devices(mesh, axes))[places]


def call_once(
    host: HostCallback, arguments: PyTree, avals: PyTree, mesh: AnyMesh | None
) -> Any:
    """Calls the host once in each process, with replicated arguments and results.

    Results in int32 are the greatest of all processes, others those of the first.
    `mesh` is None for one JAX device.
    """
    if mesh is None:
        return call_host(host, arguments, avals, is_local=False)

    def fill_in_first_process(outs: PyTree, arguments: PyTree) -> None:
        host.function(outs, arguments)
        if jax.process_index():
            for out in jax.tree.leaves(outs):
                if out.dtype != np.int32:
                    out[...] = 0

    called = host
    if jax.process_count() > 1:
        called = replace(host, function=fill_in_first_process)
    return on_mesh(
        mesh,
        lambda arguments: call_owner(called, arguments, avals, mesh, mesh.axis_names),
        arguments,
    )


def call_together(
    host: HostCallback, arguments: PyTree, aval: PyTree, mesh: AnyMesh | None
) -> jax.Array:
    """Calls the host once in each process, when all of its devices have come.

    They wait on the host, not in a collective: XLA gives up a collective whose first
    device waits too long. The result, int32, is the greatest of all processes.
    """
    if mesh is None:
        return call_host(host, arguments, aval, is_local=False)
    is_one_process = jax.process_count() == 1
    num_devices = mesh.size
    if isinstance(mesh, Mesh) and not is_one_process:
        num_devices = mesh.local_mesh.size
    meeting = replace(host, function=_Meeting(host, num_devices))

    def on_device(arguments: PyTree) -> jax.Array:
        result = call_host(meeting, arguments, aval, is_local=True)
        return result if is_one_process else lax.pmax(result, mesh.axis_names)

    return on_mesh(mesh, on_device, arguments)


def on_mesh(
    mesh: AnyMesh,
    function: Callable[[PyTree], Any],
    arguments: PyTree,
    in_specs: Any = _WHOLE,
    out_specs: Any = _WHOLE,
) -> Any:
    """Computes on each device; results that count as replicated may still differ."""
    return jax.shard_map(
        function, mesh=mesh, in_specs=(in_specs,), out_specs=out_specs, check_vma=False
    )(arguments)


class _Meeting:
    """A host function that the last of a process's devices to call it runs.

    Its arguments are the greatest of all devices', element by element, and all devices
    get its results. Thread-safe.
    """

    def __init__(self, host: HostCallback, num_devices: int) -> None:
        self._host = host
        self._calls: list[tuple[PyTree, PyTree]] = []  # results to fill, and arguments
        self._barrier = threading.Barrier(num_devices, self._run)

    def __call__(self, outs: PyTree, arguments: PyTree) -> None:
        self._calls.append((outs, arguments))
        self._barrier.wait()

    def _run(self) -> None:
        calls, self._calls = self._calls, []
        outs = calls[0][0]
        greatest = jax.tree.map(lambda *x: np.maximum.reduce(x), *(a for _, a in calls))
        self._host.run_or_report(outs, greatest)
        for others, _ in calls[1:]:
            jax.tree.map(np.copyto, others, outs)
