"""A run in several processes: their group, its mesh, and arrays on it.

     batch of a process ─┐
     batch of a process ─┴─► one global array, sharded over the mesh ─► the same step

Invariant: all processes make the same calls in the same order, and end after the same
step. In a run of one process on one device every function returns its argument.
"""

import dataclasses
import functools
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from rich.console import Console

from jaxinf.command_line import UsageError
from jaxinf.processes import Group, all_processes
from jaxinf.train.config import TrainConfig
from jaxinf.train.data.loader import Batch
from jaxinf.train.metrics import JsonLines, StepLine
from jaxinf.train.options import Launch
from jaxinf.train.trackers import Trackers
from jaxinf.typing import PyTree

_AXIS = "data"
_TIMEOUT_S = 600.0  # for a process that is behind the others
_PATIENCE_S = 300.0  # for the coordinator, as JAX's own
_SUMMED = ("tokens", "drive_read_bytes", "drive_write_bytes")
_SUMMED += ("link_down_bytes", "link_up_bytes", "rss_bytes")


class Processes:
    """The processes of the run, as this one sees them.

    Args:
      group: these processes; by default this one alone.
      is_on_mesh: whether the run is on all devices, along one axis of a mesh.
      is_sharded: whether params are sharded over the mesh, not replicated.
    """

    def __init__(
        self,
        group: Group | None = None,
        *,
        is_on_mesh: bool = False,
        is_sharded: bool = False,
    ) -> None:
        self.group = group or Group("train")
        self._is_on_mesh = is_on_mesh
        self._is_sharded = is_sharded

    @property
    def is_first(self) -> bool:
        """Whether this process prints, evaluates, and writes for all."""
        return self.group.number == 0

    def console(self, console: Console) -> Console:
        """Returns the console, which prints in the first process alone."""
        if self.is_first:
            return console
        return Console(quiet=True, force_terminal=False)

    def own(self, config: TrainConfig) -> TrainConfig:
        """Returns the config with a log directory of this process's own."""
        if self.group.is_alone:
            return config
        log_dir = config.logs / f"process-{self.group.number:05d}"
        return dataclasses.replace(config, log_dir=log_dir)

    # --- arrays --------------------------------------------------------------------

    @functools.cached_property
    def mesh(self) -> Mesh:
        """All devices of all processes, along one axis."""
        return Mesh(np.array(jax.devices()), (_AXIS,))

    def _sharding(self, shape: tuple[int, ...]) -> NamedSharding:
        """A leaf's sharding: replicated, or over its longest dimension that fits."""
        spec: list[str | None] = [None] * len(shape)
        along = sharded_dimension(shape, self.mesh.size)
        if self._is_sharded and along is not None:
            spec[along] = _AXIS
        return NamedSharding(self.mesh, PartitionSpec(*spec))

    def like(self, tree: PyTree) -> PyTree:
        """Returns shapes and dtypes of params with their shardings."""
        if not self._is_on_mesh:
            return tree
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(
                x.shape, x.dtype, sharding=self._sharding(x.shape)
            ),
            tree,
        )

    def batch(self, batch: Batch) -> Any:
        """Makes the global batch of which this process has its part."""
        if not self._is_on_mesh:
            return batch
        sharding = NamedSharding(self.mesh, PartitionSpec(_AXIS))
        return {
            name: jax.make_array_from_process_local_data(sharding, np.asarray(array))
            for name, array in batch.items()
        }

    def spread(self, batch: Any) -> Any:
        """Divides a batch that all processes have over the devices, if it divides."""
        if not self._is_on_mesh:
            return batch
        rows = NamedSharding(self.mesh, PartitionSpec(_AXIS))

        def put(array: Any) -> Any:
            is_of_rows = isinstance(array, np.ndarray) and array.ndim > 0
            if not is_of_rows or len(array) % self.mesh.size:
                return array
            return jax.make_array_from_callback(array.shape, rows, array.__getitem__)

        return jax.tree.map(put, batch)

    def local(self, tree: PyTree) -> PyTree:
        """Returns whole arrays on a device of this process; all processes call it."""
        if not self._is_on_mesh:
            return tree
        if self._is_sharded:
            tree = self._gather(tree)
        return jax.tree.map(lambda x: x.addressable_data(0), tree)

    @functools.cached_property
    def _gather(self) -> Callable[[PyTree], PyTree]:
        whole = NamedSharding(self.mesh, PartitionSpec())
        return jax.jit(lambda tree: tree, out_shardings=whole)

    def stop_number(self, step: int, number: int) -> int:
        """Returns the number of the signal after which all stop now; 0 to go on.

        A process that gets a signal before a step says so, makes that step, and stops.
        The others cannot begin the step after it before they can see that, since a step
        ends in all processes together.

        Args:
          step: the number of the step that would begin.
          number: the signal that this process has got; 0 for none.
        """
        said = self.group.said("stop")
        if due := [one for first, one in said.values() if first < step]:
            return due[0]
        if self.group.is_alone:
            return number
        if number and self.group.number not in said:
            self.group.say("stop", [step, number])
        return 0


class SumLog:
    """``metrics.jsonl`` of all processes, which the first one writes."""

    def __init__(
        self, processes: Processes, place: Path, step: int, trackers: Trackers
    ) -> None:
        self._group, self._trackers = processes.group, trackers
        path = place / "metrics.jsonl"
        self._lines = JsonLines(path, step) if processes.is_first else None
        if self._lines is not None:
            trackers.begin(path, self._lines.last_step)

    def write(self, line: StepLine) -> None:
        """Takes this process's line of a step; all processes call it."""
        topic, group = f"line-{line.step}", self._group
        group.say(topic, line.to_json())
        if self._lines is None:
            return
        found = [json.loads(group.hear(topic, n)) for n in range(group.count)]
        group.forget(topic)
        values = {name: [one[name] for one in found] for name in _SUMMED}
        sums = {name: None if None in v else sum(v) for name, v in values.items()}
        line = dataclasses.replace(line, stream=None, **sums)
        self._lines.write(line.step, line.to_json())
        self._trackers.send(dataclasses.asdict(line))

    def close(self) -> None:
        """Closes the file."""
        if self._lines is not None:
            self._lines.close()


def sharded_dimension(shape: tuple[int, ...], count: int) -> int | None:
    """Returns the dimension along which devices share a leaf; None if none fits."""
    fitting = [n for n, d in enumerate(shape) if d and d % count == 0]
    return max(fitting, key=lambda n: shape[n], default=None)


def placed(tree: PyTree, like: PyTree) -> PyTree:
    """Puts arrays that all processes have where `like` has them on a mesh."""

    def put(array: Any, like: Any) -> Any:
        if like.sharding is None:
            return array
        whole = np.asarray(array)
        return jax.make_array_from_callback(
            whole.shape, like.sharding, whole.__getitem__
        )

    return jax.tree.map(put, tree, like)


def start(config: TrainConfig) -> Processes:
    """Connects the processes of ``--distributed``; blocks until all are there.

    Raises:
      UsageError: the coordinator does not answer, or nothing says who it is.
    """
    if not config.distributed:
        return Processes()
    connect(config.distributed)
    is_on_mesh = jax.device_count() > 1
    group = all_processes("train", limit_s=_TIMEOUT_S)
    return Processes(group, is_on_mesh=is_on_mesh, is_sharded=config.fsdp)


def connect(given: Launch, timeout_s: float | None = None) -> None:
    """Connects processes; blocks until all are there.

    Args:
      timeout_s: this process ends, with status 1 and a line that says so, if not all
        are there after so long; by default after JAX's time, as JAX does.

    Raises:
      UsageError: the coordinator does not answer, or nothing says who it is.
    """
    started_s = time.monotonic()
    where = given.coordinator or "the coordinator that the environment names"
    ending = threading.Timer(timeout_s or 0, _end, [where, timeout_s])
    ending.daemon = True
    if timeout_s is not None:
        ending.start()
    if given.coordinator is not None and given.process_id:
        _await(given.coordinator)
    try:
        jax.distributed.initialize(*dataclasses.astuple(given))
    except (RuntimeError, ValueError) as error:
        raise UsageError(
            f"--distributed: {where}: expected a coordinator that all processes reach, "
            f"found after {time.monotonic() - started_s:.0f} s: "
            f"{str(error).splitlines()[0]}; process 0 is the coordinator. Give "
            "--distributed HOST:PORT,N,I"
        ) from error
    finally:
        ending.cancel()


def _end(where: str, timeout_s: float) -> None:
    """Ends this process, whose call of JAX would abort it without a word."""
    print(
        f"jaxinf: --distributed: {where}: expected all processes to be there within "
        f"{timeout_s:g} s, found that some are not; start the command in all of them",
        file=sys.stderr,
        flush=True,
    )
    os._exit(1)


def _await(address: str) -> None:
    """Waits until the coordinator listens: JAX would abort the process after a while.

    Raises:
      UsageError: says where, and after how long.
    """
    host, _, port = address.rpartition(":")
    began_s = time.monotonic()
    while True:
        try:
            with socket.create_connection((host.strip("[]"), int(port)), _PATIENCE_S):
                return
        except OSError as error:
            waited_s = time.monotonic() - began_s
            if waited_s > _PATIENCE_S:
                raise UsageError(
                    f"--distributed {address}: expected process 0 to listen there, "
                    f"found after {waited_s:.0f} s: {error}; start process 0, and give "
                    "its host's name as the others reach it"
                ) from error
        time.sleep(0.2)
