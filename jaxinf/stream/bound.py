"""Binds a streamed step to batches of one shape: its plan, its memory, its threads.

Invariant: what a bound step takes stays within the memory of the options.
"""

from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import optax

from jaxinf.activations import Scratch, writing_bytes
from jaxinf.engine import ParamsReader, Store, Training
from jaxinf.io import ByteCounts
from jaxinf.program import UpdateProgram, trace_update
from jaxinf.stream.calls import Policy
from jaxinf.stream.deferred import Deferred
from jaxinf.stream.fetch import (
    Fetcher,
    reused_bytes,
)
from jaxinf.stream.kept import keep_plan, kept_plan
from jaxinf.stream.memory import (
    READER_BYTES,
    DeviceLimit,
    Division,
    device_limit,
    divide,
)
from jaxinf.stream.places import Places, Unit
from jaxinf.stream.plan import Plan, Prepared
from jaxinf.stream.reading import make_reading
from jaxinf.stream.run import (
    Executables,
    Runner,
    compiled_bytes,
    compiled_temp_bytes,
)
from jaxinf.stream.spill import Spill
from jaxinf.stream.traffic import planned_traffic, reads_params, spilled_bytes
from jaxinf.stream.updates import (
    NonFinitePolicy,
    Updates,
)
from jaxinf.stream.values import Offloaded, Values
from jaxinf.typing import Array, PyTree

__all__ = ["Binder", "Bound", "Options"]


@dataclass(frozen=True)
class Options:
    """Options of `jaxinf.stream` that a step keeps."""

    memory_bytes: int
    device_memory_bytes: int | None
    has_aux: bool
    policy: Policy
    replan: bool
    nonfinite: NonFinitePolicy


@dataclass(frozen=True)
class Bound:
    """The plan and runner for batches of one shape.

    Attributes:
      runner: Runs the plan.
      fetcher: Reads params.
      updates: Updates them.
      places: The store's units.
      reused_bytes: See `jaxinf.stream.fetch.reused_bytes`.
      traffic: Of a step, on the drive.
      store_bytes: Memory for the store's buffers.
    """

    runner: Runner
    fetcher: Fetcher
    updates: Updates
    places: Places
    reused_bytes: int
    traffic: ByteCounts
    store_bytes: int


class Binder:
    """Binds steps of one store.

    Args:
      store: The store; its training is bound to the optimizer.
      tx: The optimizer.
      options: Memory, policy and so on.
    """

    def __init__(
        self,
        store: Store,
        tx: optax.GradientTransformationExtraArgs,
        options: Options,
    ) -> None:
        self._store = store
        self._tx = tx
        self._options = options
        self._executables: Executables = {}

    @cached_property
    def device(self) -> Any:
        """The JAX device that programs run on."""
        (device,) = jnp.zeros(()).devices()
        return device

    @cached_property
    def device_limit(self) -> DeviceLimit:
        """The limit of the JAX device's memory."""
        return device_limit(self.device, self._options.device_memory_bytes)

    def bind(self, ready: Prepared, params: PyTree) -> Bound:
        """Plans, compiles and divides the memory; blocks.

        Args:
          ready: The loss function, traced for the batch.
          params: Abstract values of the params.

        Raises:
          StreamError: The program cannot be cut to fit, or the kept plan is another's.
        """
        training, options = self._store.training, self._options
        shapes = [leaf.shape for leaf in ready.traced.params]
        dtypes = [leaf.dtype for leaf in ready.traced.params]
        places = Places(shapes, dtypes, training.can_move)
        units = {places.unit(piece) for piece in ready.gradient_pieces}
        division = divide(
            options.memory_bytes,
            training.opened.limit_memory(0),
            max((unit.num_bytes for unit in units), default=0),
            self.device_limit,
        )
        scratch = Scratch(self._drives(), training.opened.meters)
        if options.policy == "offload":
            division = division.without(writing_bytes(scratch.num_drives))
        plan = self._plan(ready, division)
        values = Values()
        if plan.is_offloaded:
            temps = compiled_temp_bytes(plan, self._executables)
            plan = plan.fitted(division.programs, temps)
            values = Offloaded(plan.calls, scratch)
        program = trace_update(self._tx, params)
        deferred = self._deferred(program, division)
        spilled = 0 if deferred is None else deferred.spill.capacity_bytes
        fetcher, unused_bytes = make_reading(
            partial(_Source, training, READER_BYTES),
            plan,
            places,
            division,
            self.device,
            lambda unit: (
                deferred is None and reads_params(training.opened, unit, program)
            ),
        )
        updates = Updates(
            training,
            program,
            places,
            min(division.gradients - spilled, division.leaving),
            fetcher,
            deferred,
            options.nonfinite,
        )
        updates.check(ready.gradient_pieces)
        calls = plan.calls.calls
        sizes = ready.lifetimes.sizes
        given = [sizes[piece] for call in calls for piece, _ in call.gradients]
        on_drive = 0 if deferred is None else spilled_bytes(given, spilled)
        record = partial(training.opened.timeline.add, "program")
        return Bound(
            Runner(plan, self._executables, record, values),
            fetcher,
            updates,
            places,
            reused_bytes(fetcher.fetches, calls, places),
            planned_traffic(
                training.opened,
                fetcher.fetches,
                units,
                program,
                values.num_bytes + on_drive,
            ),
            division.ring + unused_bytes,
        )

    def _deferred(self, program: UpdateProgram, division: Division) -> Deferred | None:
        """Makes room for gradients that wait for the last one; None if none waits."""
        training = self._store.training
        rewrites = training.options.rewrites_steps
        if not (program.reads_gradients or rewrites):
            return None
        capacity = division.gradients // 2
        spill = Spill(self._folder(), capacity, training.opened.meters)
        return Deferred(program, spill, is_checked=rewrites)

    def _folder(self) -> Path:
        folder = self._store.path / "stream"
        folder.mkdir(exist_ok=True)
        return folder

    def _drives(self) -> list[Path]:
        """A folder on each of the store's drives."""
        directory = self._store.training.opened.directory
        if not directory.manifest.csds:
            return [self._folder()]
        return [directory.csd_directory(csd) for csd in range(directory.num_csds)]

    def _plan(self, ready: Prepared, division: Division) -> Plan:
        budget, policy = division.programs, self._options.policy
        folder = self._store.path
        measure = partial(compiled_bytes, executables=self._executables)
        if not self._options.replan:
            plan = kept_plan(folder, ready, budget, policy, measure, division.limit)
            if plan is not None:
                return plan
        plan = ready.plan(budget, policy, measure, division.limit)
        keep_plan(folder, ready, plan)
        return plan


class _Source:
    """Reads units of the store's current step.

    Until the first of them are read, the store prefetches no state for updates, since
    programs wait for params first.

    Args:
      training: The store.
      memory_bytes: Memory for reads.
      num_first: Number of units that have room when a step begins.
    """

    def __init__(self, training: Training, memory_bytes: int, num_first: int) -> None:
        self._training = training
        self._memory_bytes = memory_bytes
        self._num_first = num_first
        self._num_read = 0
        self._reader: ParamsReader | None = None

    def begin(self) -> None:
        """Begins a step; there is no commit before it ends."""
        self.close()
        self._reader = self._training.params_reader(self._memory_bytes)
        self._num_read = 0
        self._training.opened.handler.hold_prefetches(self._num_first > 0)

    def read(self, unit: Unit, out: Array) -> None:
        """Fills `out` with a unit; blocks."""
        assert self._reader is not None
        opened = self._training.opened
        with opened.timeline.span("fetch"):
            self._reader.read(unit.leaf, out.reshape(unit.extent), unit.origin)
        self._num_read += 1
        if self._num_read == self._num_first:
            opened.handler.hold_prefetches(False)

    def close(self) -> None:
        """Frees its memory."""
        self._training.opened.handler.hold_prefetches(False)
        if self._reader is not None:
            self._reader.close()
            self._reader = None
