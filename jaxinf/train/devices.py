"""The devices that a run computes on: one, or a mesh of those of all processes.

     batch of a process ─┐
     batch of a process ─┴─► one global array, sharded over the mesh ─► the same step

Invariant: on one device every method returns its argument.
"""

import dataclasses
import re
import socket
import time
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxinf.command_line import UsageError
from jaxinf.engine import shard_whole
from jaxinf.train.config import TrainConfig
from jaxinf.train.data.loader import Batch
from jaxinf.typing import PyTree

_AXIS = "data"
_PATIENCE_S = 300.0  # for the coordinator, as JAX's own


@dataclasses.dataclass(frozen=True)
class Devices:
    """The placement of a run's arrays.

    Attributes:
      mesh: All devices of all processes, along one axis; None for one device.
      is_sharded: Whether params are sharded over the mesh, not replicated.
    """

    mesh: Mesh | None = None
    is_sharded: bool = False

    def add_shardings(self, params: PyTree) -> PyTree:
        """Returns shapes and dtypes of params with their shardings on the mesh."""
        mesh = self.mesh
        if mesh is None:
            return params

        def add_sharding(leaf: Any) -> jax.ShapeDtypeStruct:
            spec: list[str | None] = [None] * len(leaf.shape)
            divisible = [n for n, d in enumerate(leaf.shape) if d and not d % mesh.size]
            if self.is_sharded and divisible:  # on the longest
                spec[max(divisible, key=lambda n: leaf.shape[n])] = _AXIS
            sharding = NamedSharding(mesh, PartitionSpec(*spec))
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

        return jax.tree.map(add_sharding, params)

    def join_batch(self, batch: Batch) -> Any:
        """Makes the global batch of which this process has its part."""
        if self.mesh is None:
            return batch
        rows = NamedSharding(self.mesh, PartitionSpec(_AXIS))
        return {
            name: jax.make_array_from_process_local_data(rows, np.asarray(array))
            for name, array in batch.items()
        }

    def shard_batch(self, batch: Any) -> Any:
        """Shards a batch that all processes have over the devices, if it divides."""
        mesh = self.mesh
        if mesh is None:
            return batch
        rows = NamedSharding(mesh, PartitionSpec(_AXIS))

        def shard(leaf: Any) -> Any:
            is_divisible = np.ndim(leaf) and not len(leaf) % mesh.size
            return shard_whole(leaf, rows) if is_divisible else leaf

        return jax.tree.map(shard, batch)


def find_devices(config: TrainConfig) -> Devices:
    if config.distributed is None or jax.device_count() == 1:
        return Devices()
    return Devices(Mesh(np.array(jax.devices()), (_AXIS,)), config.fsdp)


def place_arrays(tree: PyTree, like: PyTree) -> PyTree:
    """Shards arrays that all processes have like those of `like`."""
    return jax.tree.map(
        lambda x, like: x if like.sharding is None else shard_whole(x, like.sharding),
        tree,
        like,
    )


def connect_processes(launch: str) -> None:
    """Connects the processes of a run; blocks until all are there, or as long as JAX.

    The launch is ``HOST:PORT,N,I``, or empty if the environment has these.
    """
    match = re.fullmatch(r"(.+:\d+),(\d+),(\d+)", launch)
    if launch and not match:
        raise UsageError(
            f"--distributed {launch!r}: expected HOST:PORT of process 0, the number of "
            "processes and that of this one, such as 10.0.0.1:1234,4,0"
        )
    try:
        if match:
            address, num_processes, number = match[1], int(match[2]), int(match[3])
            if number:
                _await_coordinator(address)
            jax.distributed.initialize(address, num_processes, number)
        else:
            jax.distributed.initialize()
    except (OSError, RuntimeError, ValueError) as error:
        raise UsageError(
            f"--distributed {launch}: expected a coordinator that all processes reach, "
            f"found: {str(error).splitlines()[0]}; process 0 is the coordinator. Start "
            "it, and give --distributed HOST:PORT,N,I with its host's name as the "
            "others reach it"
        ) from error


def _await_coordinator(address: str) -> None:
    """Waits until the coordinator listens: JAX would abort the process meanwhile."""
    host, _, port = address.rpartition(":")
    until_s = time.monotonic() + _PATIENCE_S
    while True:
        try:
            with socket.create_connection((host.strip("[]"), int(port)), _PATIENCE_S):
                return
        except OSError:
            if time.monotonic() > until_s:
                raise
        time.sleep(0.2)
