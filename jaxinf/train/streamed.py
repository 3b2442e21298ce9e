"""Training of a model that need not fit in memory, with `jaxinf.stream`.

Invariant: params and optimizer state exist in the store alone, so the loop holds
  neither.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import optax

from jaxinf.engine import Store
from jaxinf.errors import AssignmentError, BudgetError, StreamError
from jaxinf.streaming import Count, DeviceLimit, StreamedStep, stream
from jaxinf.train.config import TrainConfig
from jaxinf.train.data.loader import Batch
from jaxinf.train.metrics import NO_TRAFFIC, Costs
from jaxinf.train.on_store import KeptInStore, refused_as_usage
from jaxinf.train.optimizers import behind_clipping
from jaxinf.train.processes import Processes
from jaxinf.train.step import TrainStep, loss_of, weight_of_part
from jaxinf.typing import JsonValue, PyTree

_FLAGS = {"memory_bytes": "--memory", "device_memory_bytes": "--device-memory"}


class Streamed(KeptInStore):
    """Params and the optimizer's state are in the store.

    Functions of the params are programs of all processes, which read their members.
    """

    needs_all = True

    def __init__(
        self,
        config: TrainConfig,
        store: Store,
        optimizer: optax.GradientTransformation,
        processes: Processes,
    ) -> None:
        super().__init__(config, store)
        self._processes = processes
        self._step = _streamed_step(config, store, optimizer)
        self._number = self._num_skipped = 0

    def init(
        self,
        new_params: Callable[[], PyTree],
        like: PyTree,
        first: Mapping[str, JsonValue],
        batch: Batch,
    ) -> tuple[Any, Any]:
        shardings = _shardings(like)
        with refused_as_usage(), _named_flags():
            if self.store.exists and self.store.step > 0:
                self._step.load(like)  # only compared: the store has them
            else:
                with self._beginning(first):
                    if self._config.source is None:
                        self._step.init(new_params, batch=batch, shardings=shardings)
                    else:
                        self._step.load(new_params(), batch=batch, shardings=shardings)
        self._num_skipped, self._number = self._step.num_skipped, self.store.step
        return None, None

    def compile_step(
        self, graphdef: Any, params: PyTree, state: Any, batch: Batch
    ) -> TrainStep:
        with _named_flags():
            self._step.compile(batch)

        def run(params: PyTree, state: Any, batch: Batch) -> Any:
            loss, _ = self._step(batch)
            if self._step.num_skipped == self._num_skipped:
                self._number += 1
            self._num_skipped = self._step.num_skipped
            return params, state, (loss, None)

        return run

    def count(
        self,
        batch: Batch,
        params: PyTree,
        device: DeviceLimit | None,
        like: Count | None,
    ) -> Count:
        """Counts what a step takes; see `StreamedStep.dry_run`."""
        with _named_flags():
            return self._step.dry_run(batch, params, device=device, like=like)

    def function(
        self, fn: Callable[[PyTree, Any], Any], *, average: bool = False
    ) -> Callable[[PyTree, Any], Any]:
        made = self._step.function(fn, average=average)

        def call(params: PyTree, batch: Any) -> Any:
            with _named_flags():
                return self._processes.local(made(self._processes.spread(batch)))

        return call

    def average(self, params: PyTree, state: Any) -> PyTree:
        return None

    def costs(self, state: Any, *, is_skipped: bool) -> Costs:
        metrics = self._step.metrics
        assert metrics is not None
        waited_s = metrics.waited_params_s + metrics.waited_values_s
        streamed: dict[str, Any] = {
            "stream": dataclasses.asdict(metrics),
            "phases": {"wait": round(waited_s + metrics.waited_updates_s, 6)},
        }
        on_drives = metrics.spilled_drive_bytes + metrics.offloaded_drive_bytes
        if is_skipped:
            return lambda: NO_TRAFFIC | streamed
        number = self._number

        def costs() -> dict[str, Any]:
            found = self._costs_of(number)
            if "memory" in found:
                found["memory"]["drives"] += on_drives
            return found | streamed

        return costs

    def num_skipped(self, state: Any) -> int:
        return self._num_skipped

    def committed_step(self, state: Any) -> int:
        return self._number

    def close(self) -> None:
        """Finishes work in flight and releases all resources."""
        self._step.close()


def _shardings(like: PyTree) -> PyTree:
    """Returns the shardings of params on a mesh, or None."""
    shardings = jax.tree.map(lambda leaf: leaf.sharding, like)
    return shardings if jax.tree.leaves(shardings) else None


@contextlib.contextmanager
def _named_flags() -> Iterator[None]:
    """Makes a refusal name the flags, not the arguments of `stream`."""
    try:
        yield
    except BudgetError as error:
        raise StreamError(error._text(_FLAGS)) from error
    except AssignmentError as error:
        raise StreamError(error._text("--device-updates ", "--replan")) from error


def _streamed_step(
    config: TrainConfig, store: Store, optimizer: optax.GradientTransformation
) -> StreamedStep:
    graphdef, _ = config.abstract
    assert config.memory is not None
    if config.compress is not None:
        optimizer = behind_clipping(config, optimizer)
    has_parts = config.micro_batches > 1
    return stream(
        loss_of(config, graphdef),
        optimizer,
        store,
        memory_bytes=config.memory,
        device_memory_bytes=config.device_memory,
        policy=config.policy,
        resident=config.resident,
        micro_batches=config.micro_batches,
        weights=weight_of_part if has_parts else None,
        replan=config.replan,
        nonfinite=config.nonfinite,
        average=config.average,
        compress=config.compression,
        device_updates=config.device_updates,
    )
