"""Calls whose arrays are copied on the device's stream; the host does not wait for it.

    gradient ─► start ─► copies ─► engine's thread: update ─► flag ─► copies ─► result
                └── token ─────────────────────────────► finish ──┘

The form of a step is that of `started.py`, but no callback of Python is between JAX and
the store: `native/stream_calls.py` has the handlers. Invariant: every transfer that
arrives is released, and an exception is told by statuses alone, which `HostSide.commit`
raises.
"""

import itertools
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np

from jaxinf import compat
from jaxinf.engine import Store
from jaxinf.errors import DeviceConfigurationError, DeviceError
from jaxinf.native import stream_calls
from jaxinf.native.toolchain import CompilerError
from jaxinf.optimizer.callback import FAILED, Host
from jaxinf.optimizer.packing import Packing
from jaxinf.typing import Array, PyTree

__all__ = ["FINISH", "START", "OnStream", "Port"]

START, FINISH = "jaxinf_stream_start", "jaxinf_stream_finish"
"""Names of XLA's handlers."""

ResultsOf: TypeAlias = Callable[[Any], PyTree]
"""Returns shapes and dtypes of the results of a call with its arguments."""


class _Site(NamedTuple):
    """A call that sends arrays.

    Attributes:
      host: fills the results.
      packing: where its arguments are among the operands.
      operands: shapes and dtypes of the operands.
      results: shapes and dtypes of the results; int32 ones are statuses.
    """

    host: Host
    packing: Packing
    operands: Sequence[jax.ShapeDtypeStruct]
    results: PyTree


class OnStream:
    """The calls of one store; thread-safe.

    Args:
      store: the store, whose memory is the limit of gradients that wait on each device.
      threads: gives the threads that update.
    """

    def __init__(self, store: Store, threads: Callable[[], ThreadPoolExecutor]) -> None:
        self._training = store._training
        self._path = store.path
        self._get_threads = threads
        self._guard = threading.Lock()
        self._numbers = itertools.count()
        self._sites: dict[int, _Site] = {}
        self._queue: stream_calls.Queue | None = None
        self._listeners: list[threading.Thread] = []

    def port(self, results_of: ResultsOf) -> "Port":
        """Returns the two calls of an update.

        Raises:
          DeviceConfigurationError: there is no driver, or no compiler.
        """
        with self._guard:
            queue = self._queue or self._open()
            return Port(self, queue.number, next(self._numbers), results_of)

    def add(self, site: _Site) -> int:
        """Returns the number of a call that sends arrays."""
        with self._guard:
            number = next(self._numbers)
            self._sites[number] = site
            return number

    def _open(self) -> stream_calls.Queue:
        headers = compat.handler_headers()
        try:
            limit_bytes = self._training.options.memory_bytes
            queue = stream_calls.Queue(headers, limit_bytes)
            addresses = stream_calls.handlers(headers)
        except (CompilerError, OSError) as error:
            raise DeviceConfigurationError(
                "JAXINF_CALLBACK=stream: expected NVIDIA's driver and a C++ compiler, "
                f"found: {error}. Set JAXINF_CALLBACK=start, which needs neither"
            ) from error
        for name, address in zip((START, FINISH), addresses, strict=True):
            compat.register_handler(name, address, "CUDA")
        self._queue = queue
        self._listeners = [
            threading.Thread(
                target=self._listen,
                args=(queue, device),
                name=f"jaxinf-stream-{device}",
                daemon=True,
            )
            for device in range(jax.local_device_count())
        ]
        # What has arrived is updated before the threads end, and freed after that.
        self._training.on_close(self._end_listening)
        self._threads = self._get_threads()
        self._training.on_close(queue.destroy)
        for listener in self._listeners:
            listener.start()
        return queue

    def _end_listening(self) -> None:
        assert self._queue is not None
        self._queue.close()
        for listener in self._listeners:
            listener.join()

    def _listen(self, queue: stream_calls.Queue, device: int) -> None:
        while (found := queue.next(device)) is not None:
            if found.pointer is None:
                self._training.fail_computation(self._error(found))
                queue.release(found)
            else:
                self._threads.submit(self._update, queue, found)

    def _update(self, queue: stream_calls.Queue, found: stream_calls.Transfer) -> None:
        site = self._sites[found.site]
        outs: PyTree = None
        try:
            if found.results is not None:
                outs = _views(found.results, site.results)
            if found.failure:
                raise self._error(found)
            assert found.gradients is not None, "there is no failure"
            operands = _views(found.gradients, site.operands)
            site.host(outs, site.packing.unpack(operands))
        except BaseException as error:
            self._training.fail_unannounced(error)
            for out in jax.tree.leaves(outs):
                out[...] = FAILED if out.dtype == np.int32 else 0
        finally:
            queue.release(found)

    def _error(self, found: stream_calls.Transfer) -> DeviceError:
        return DeviceError(
            f"{self._path}: a copy on the device's stream failed: {found.failure}. "
            "Nothing of the step was committed. If memory is lacking, lower "
            "memory_bytes= of the store; JAXINF_CALLBACK=start needs no pinned memory"
        )


class Port:
    """The two calls of an update: one sends gradients, one brings results.

    Args:
      calls: the store's calls.
      queue: number of the store's queue.
      number: the port's own.
      results_of: shapes of the results, of the arguments that `start` gets.
    """

    def __init__(
        self, calls: OnStream, queue: int, number: int, results_of: ResultsOf
    ) -> None:
        self._calls = calls
        self._numbers = {"queue": queue, "port": number}
        self._results_of = results_of

    def start(self, host: Host, avals: PyTree, arguments: PyTree) -> PyTree:
        """Sends arguments to `host`; traceable.

        Args:
          host: fills the results that `finish` brings.
          avals: shapes and dtypes of what is returned.
          arguments: arrays.

        Returns:
          Arrays like `avals` that hold nothing, but which `finish` is to wait for.
        """
        packing = Packing.of(arguments)
        packed = packing.pack(arguments)
        operands = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in packed]
        results = self._results_of(arguments)
        site = self._calls.add(_Site(host, packing, operands, results))
        num_bytes = sum(map(_aligned_bytes, jax.tree.leaves(results)))
        return self._call(START, avals, packed, site=site, result_bytes=num_bytes)

    def finish(self, host: Host, avals: PyTree, arguments: PyTree) -> PyTree:
        """Brings the results, like `avals`, after `arguments` are ready; traceable."""
        del host
        return self._call(FINISH, avals, jax.tree.leaves(arguments))

    def _call(
        self, name: str, avals: PyTree, operands: Sequence[Any], **numbers: int
    ) -> PyTree:
        leaves, treedef = jax.tree.flatten(avals)
        given = self._numbers | numbers
        return treedef.unflatten(compat.call_handler(name, leaves, operands, **given))


def _aligned_bytes(aval: Any) -> int:
    num_bytes = aval.size * aval.dtype.itemsize
    return -(-num_bytes // stream_calls.ALIGNMENT) * stream_calls.ALIGNMENT


def _views(address: int, avals: PyTree) -> PyTree:
    """Returns arrays like `avals` that follow each other in memory."""
    leaves, treedef = jax.tree.flatten(avals)
    found: list[Array] = []
    for aval in leaves:
        found.append(stream_calls.view(address, aval.shape, aval.dtype))
        address += _aligned_bytes(aval)
    return treedef.unflatten(found)
