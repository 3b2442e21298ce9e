"""A call of the host that every JAX device of a process makes, and that runs once.

    device 0 ─► call ─► waits ┐
    device 1 ─► call ─► waits ├─► host function ─► its results, to all
    device 2 ─► call ─────────┘

Devices that wait on the host wait as long as it takes. Those that wait for another one
in a collective are given up by XLA after some time. Invariant: no device goes on before
the function has ended.
"""

import threading
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np

from jaxinf.optimizer.callback import GuardedHost
from jaxinf.typing import PyTree


def once_for_all(host: GuardedHost, num_devices: int) -> GuardedHost:
    """Returns a host function that the last of the devices to call it runs.

    It gets the greatest of the arguments of all devices, element by element, and all
    get its results. It runs beside other devices, so it reports what it raises.

    Args:
      num_devices: number of devices of this process, each of which calls it.
    """
    return replace(host, host=_Meeting(host, num_devices))


@dataclass(eq=False)
class _Group:
    """The calls that meet: results to fill, and arguments."""

    calls: list[tuple[PyTree, PyTree]] = field(default_factory=list)
    is_over: bool = False


class _Meeting:
    """See `once_for_all`. Thread-safe."""

    def __init__(self, host: GuardedHost, num_devices: int) -> None:
        self._host, self._num_devices = host, num_devices
        self._changed = threading.Condition()
        self._group = _Group()

    def __call__(self, outs: PyTree, arguments: PyTree) -> None:
        with self._changed:
            group = self._group
            group.calls.append((outs, arguments))
            if len(group.calls) < self._num_devices:
                self._changed.wait_for(lambda: group.is_over)
                return
            self._group = _Group()
        given = [arguments for _, arguments in group.calls]
        self._host.reporting(outs, jax.tree.map(_greatest, *given))
        for others, _ in group.calls:
            jax.tree.map(np.copyto, others, outs)
        with self._changed:
            group.is_over = True
            self._changed.notify_all()


def _greatest(*arrays: Any) -> Any:
    return np.maximum.reduce(arrays)
