"""What a step of a run has to do on a machine, for its simulation.

    config ─► sizes, updates ──────────┐
      └─────► programs ─► operations ──┼─► `StepWork` ─► virtual clock ─► seconds
    machine (jaxinf.plan) ─► `Rates` ──┘

Invariant: nothing is written, and params are never made. Without `measures` programs of
the loss are compiled only where it takes that to know whether they fit.
"""

import contextlib
import math
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jaxinf.plan import Device, Machine, Rate
from jaxinf.schedule.simulator import Trip, Trips
from jaxinf.schedule.steps import HOST, PROCESSOR, StepWork, Update, drive_name
from jaxinf.streaming import DeviceLimit, Known, Profile, Speeds, usual_s
from jaxinf.train.config import TrainConfig
from jaxinf.train.data.loader import Batch
from jaxinf.train.opening import open_backend
from jaxinf.train.optimizers import make_optimizer
from jaxinf.train.sizes import LeafUpdate, Sizes, sizes_of, streamed_sizes
from jaxinf.train.step import loss_of
from jaxinf.train.streamed import Streamed
from jaxinf.typing import PyTree

_SHARE = 0.9  # of a device's memory, where no limit is given


class Rates:
    """The rates of a machine for a run; notes which of them are used.

    Attributes:
      used: Rates that were asked for, by their place.

    Raises:
      ValueError: By a rate: the machine has none.
    """

    def __init__(self, config: TrainConfig, machine: Machine) -> None:
        self._config, self._machine = config, machine
        self.used: dict[str, Rate] = {}

    @property
    def programs(self) -> float:
        machine, dtype = self._machine, self._config.dtype
        field = "programs" if machine.programs else "products"
        return self._rate(field, [dtype])

    @property
    def update(self) -> float:
        """Params a second that all cores of the host update."""
        config = self._config
        state = "int8" if config.state == "int8" else "fp32"
        same = ("adamw", "adam")
        names = same if config.optimizer in same else (config.optimizer,)
        one = self._rate("updates", [f"{name} {state}" for name in names])
        return one * self._machine.num_cores

    @property
    def state(self) -> Sequence[float]:
        """Bytes a second of each drive of the store for reads and writes of state.

        A store without drives of its own is on all of them.
        """
        num_drives = max(1, len(self._config.csd_root))
        return [self._drives("mixed") / num_drives] * num_drives

    @property
    def computes_on_host(self) -> bool:
        """Whether programs run on the cores that update state."""
        return self._machine.device is None

    @property
    def read(self) -> float:
        """Bytes a second of all drives for reads alone."""
        return self._drives("read")

    @property
    def write(self) -> float:
        """Bytes a second of all drives for writes alone."""
        return self._drives("write")

    @property
    def launch_s(self) -> float:
        """Seconds of a program beside its operations."""
        return self._seconds("launches")

    @property
    def move_s(self) -> float:
        """Seconds of a read or write on a drive beside its bytes."""
        return self._seconds("moves")

    def commit_s(self, updates: Sequence[Update]) -> float:
        return self._seconds("commits") + self.flush_s(updates)

    def flush_s(self, updates: Sequence[Update]) -> float:
        """Seconds in which drives make durable what they have taken.

        Their caches empty as the drives write, however slowly they are filled.
        """
        if any(drive.flush is None for drive in self._machine.drives):
            return 0.0
        return sum(one.written_bytes for one in updates) / self._drives("flush")

    @property
    def process_bytes(self) -> int | None:
        """Memory of a process that trains; None if it is not known."""
        process = self._machine.process.get(self._config.mode)
        return None if process is None else int(process.value)

    def profile(self, seconds: Mapping[str, float]) -> Profile:
        """Returns times of programs with bandwidths for params and values."""
        device, link = self._machine.device, (math.inf, math.inf)
        if device is not None:
            link = device.to_host.value, device.to_device.value
        return Profile(
            seconds,
            self.write,
            self.read,
            self.read,
            out=link[0],
            back=link[1],
        )

    def speeds(self, seconds: Mapping[str, float]) -> Speeds:
        return Speeds(
            self.profile(seconds),
            self.state,
            self.update,
            self._seconds("commits"),
            self._seconds("calls"),
            self.move_s,
        )

    @property
    def _num_drives(self) -> int:
        return sum(drive.count for drive in self._machine.drives)

    def _drives(self, field: str) -> float:
        """Bytes a second of all drives; the slowest sets the pace, as all share."""
        machine = self._machine
        if not machine.drives:
            raise ValueError(f"machine {machine.name}: expected a drive, found none")
        rates = {
            f"drives[{number}].{field}": getattr(drive, field)
            for number, drive in enumerate(machine.drives)
        }
        self.used |= rates
        pace = self._num_drives * min(rate.value for rate in rates.values())
        if machine.link is None:
            return pace
        return min(pace, machine.link.value * (2 if field == "mixed" else 1))

    def _rate(self, field: str, names: Sequence[str]) -> float:
        """Returns a rate with one of the names; another in its place is a guess."""
        rates: Mapping[str, Rate] = getattr(self._machine, field)
        if not rates:
            raise ValueError(
                f"machine {self._machine.name}: expected a rate for {names[0]}, found "
                f"no {field}"
            )
        for name in names:
            if name in rates:
                self.used[f"{field}[{name!r}]"] = rates[name]
                return rates[name].value
        other, rate = next(iter(rates.items()))
        self.used[f"{field}[{other!r}] for {names[0]}"] = rate._replace(basis="guessed")
        return rate.value

    def _seconds(self, field: str) -> float:
        rate: Rate | None = getattr(self._machine, field)
        if rate is None:
            return 0.0
        self.used[field] = rate
        return 1 / rate.value


class PlannedStep(ABC):
    """A step of a run, before the run.

    Args:
      batch: A batch of it; only its shapes count.

    Attributes:
      seconds: Measured times of programs by key; None if they are not measured.
    """

    sizes: Sizes
    seconds: Mapping[str, float] | None = None

    def __init__(self, config: TrainConfig, batch: Batch) -> None:
        self._config, self._batch = config, batch

    @cached_property
    @abstractmethod
    def operations(self) -> Mapping[str, float]:
        """Operations of each program by its key, and ``""`` of all in a step."""

    @property
    @abstractmethod
    def used_bytes(self) -> int:
        """Memory of a step at its peak, beside the process."""

    @property
    def known(self) -> Known:
        """What another step need not trace again."""
        return Known()

    def work(self, rates: Rates) -> StepWork:
        """Returns what a step has to do on a machine.

        Raises:
          ValueError: The machine has no rate that the run needs.
        """
        seconds: Mapping[str, float] = self.seconds or {}
        if not self.operations.keys() <= seconds.keys():
            speed, launch_s = rates.programs, rates.launch_s
            counted = {
                key: count / speed + launch_s for key, count in self.operations.items()
            }
            seconds = {**counted, **seconds}
        return self._work(rates, seconds)

    @abstractmethod
    def _work(self, rates: Rates, seconds: Mapping[str, float]) -> StepWork: ...


def planned_step(
    config: TrainConfig,
    batch: Batch,
    machine: Machine | None = None,
    *,
    measures: bool = False,
    is_tried: bool = False,
    known: Known | None = None,
) -> PlannedStep:
    """Plans a step; takes some seconds.

    Args:
      batch: A batch of it; only its shapes count.
      machine: Where it shall run; by default one that computes in the host's memory.
      measures: Whether programs are compiled and run, and their times used.
      is_tried: Whether it is refused at once if by estimates it does not fit.
      known: What was traced for a run with the same model, task, optimizer and
        precision; see `PlannedStep.known`.

    Raises:
      JaxinfError: As `jaxinf.open_store`, `jaxinf.smart_update` and `jaxinf.stream`.
    """
    if config.mode == "stream":
        device = None if machine is None else machine.device
        known = known or Known()
        return _StreamedStep(
            config, batch, device, known, measures=measures, is_tried=is_tried
        )
    return _WholeStep(config, batch, measures=measures)


def num_operations(config: TrainConfig, batch: Batch) -> float:
    """Counts the operations of loss and gradient from what JAX lowers; some seconds.

    Args:
      batch: A batch of the run; only its shapes count.
    """
    costs: Any = _gradients_of(config, batch).cost_analysis()
    return float(costs["flops"])


def _gradients_of(config: TrainConfig, batch: Batch) -> Any:
    graphdef, params = config.abstract
    shapes = jax.eval_shape(lambda: batch)
    gradients_of = jax.value_and_grad(
        loss_of(graphdef, config.task_name, config.frozen)
    )
    return jax.jit(gradients_of).lower(params, shapes)


class _WholeStep(PlannedStep):
    """A step whose loss and gradient are one program."""

    def __init__(self, config: TrainConfig, batch: Batch, *, measures: bool) -> None:
        super().__init__(config, batch)
        self.sizes, self._updates = sizes_of(config)
        self._compiled: Any = None
        if measures:
            self._compiled, args = self._measured()
            self.seconds = {"": usual_s(self._compiled, args)}

    @cached_property
    def operations(self) -> Mapping[str, float]:
        return {"": num_operations(self._config, self._batch)}

    @property
    def used_bytes(self) -> int:
        config, held, buffers = self._config, self.sizes.memory_bytes, 0
        leaves = jax.tree.leaves(config.abstract[1])
        if config.mode == "update":
            state = sum(one.memory_bytes for one in self._updates)
            buffers = min(config.buffer_bytes, state)
            held -= config.buffer_bytes
            if not config.clip_norm:  # a gradient lives until its update
                held -= 2 * sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
        if self._compiled is not None:
            memory = self._compiled.memory_analysis()
            program = memory.argument_size_in_bytes + memory.output_size_in_bytes
            program += memory.temp_size_in_bytes - memory.alias_size_in_bytes
            # In memory it is the whole step; else updates come after it.
            held = program if config.mode == "memory" else max(held, program)
        return held + buffers

    def _measured(self) -> tuple[Any, Any]:
        config = self._config
        shapes = jax.eval_shape(lambda: self._batch)
        graphdef, params = config.abstract
        lowered = _gradients_of(config, self._batch)
        if config.mode == "update":
            return lowered.compile(), (params, shapes)
        tx = make_optimizer(config)
        state = jax.eval_shape(tx.init, params)
        gradients_of = jax.value_and_grad(
            loss_of(graphdef, config.task_name, config.frozen)
        )

        def step(params: PyTree, state: Any, batch: Any) -> Any:
            value, gradients = gradients_of(params, batch)
            updates, state = tx.update(gradients, state, params)
            return jax.tree.map(jnp.add, params, updates), state, value

        args = (params, state, shapes)
        return jax.jit(step, donate_argnums=(0, 1)).lower(*args).compile(), args

    def _work(self, rates: Rates, seconds: Mapping[str, float]) -> StepWork:
        config, whole_s = self._config, seconds[""]
        if config.mode == "memory":
            update_s = 0.0
            if self.seconds is None:
                update_s = self.sizes.num_params / rates.update
            return StepWork(call_s=[whole_s, update_s])
        return _whole_work(config, rates, whole_s, self._updates)


def _whole_work(
    config: TrainConfig, rates: Rates, whole_s: float, moved: Sequence[LeafUpdate]
) -> StepWork:
    """Returns the work of a step whose gradients are made leaf by leaf."""
    leaves = jax.tree.leaves(config.abstract[1])
    backward = [leaf.size for leaf in reversed(leaves)]
    calls = [2 * whole_s / 3 * size / sum(backward) for size in backward]
    calls = [whole_s / 3, *calls]
    speed, waits = rates.update, bool(config.clip_norm)
    updates = [
        Update(
            len(calls) if waits else len(leaves) - one.leaf,
            one.num_elements / speed,
            one.read_bytes,
            one.written_bytes,
            one.memory_bytes,
            one.drive,
        )
        for one in sorted(moved, key=lambda one: -one.leaf)
    ]
    return StepWork(
        call_s=calls,
        updates=updates,
        kernels=PROCESSOR if rates.computes_on_host else HOST,
        rates=rates.state,
        move_s=rates.move_s,
        memory_bytes=config.buffer_bytes,
        commit_s=rates.commit_s(updates),
    )


class Sketch(PlannedStep):
    """A step by its sizes and operations alone: what a search begins with.

    A streamed one is at most so slow, as nothing that memory saves is known.
    """

    def __init__(
        self,
        config: TrainConfig,
        batch: Batch,
        operations: float,
        sizes: tuple[Sizes, Sequence[LeafUpdate]],
    ) -> None:
        super().__init__(config, batch)
        self._operations = operations
        self.sizes, self._updates = sizes

    @cached_property
    def operations(self) -> Mapping[str, float]:
        return {"": self._operations}

    @property
    def used_bytes(self) -> int:
        return self.sizes.memory_bytes

    def _work(self, rates: Rates, seconds: Mapping[str, float]) -> StepWork:
        config, sizes, whole_s = self._config, self.sizes, seconds[""]
        work = _whole_work(config, rates, whole_s, self._updates)
        if config.mode != "stream":
            return work
        again_s = whole_s / 3 if config.policy == "recompute" else 0.0
        state = sum(one.read_bytes + one.written_bytes for one in self._updates)
        others = sizes.read_bytes + sizes.written_bytes - round(state)
        params = Trip(0, 0, others, others)
        drives = [drive_name(number) for number in range(len(rates.state))]
        moved = Trips([params], {"read": rates.read}, drives=drives)
        last = len(work.call_s) + 1
        updates = [one._replace(made=last) for one in work.updates]
        call_s = [again_s, *work.call_s]
        return replace(work, call_s=call_s, moved=[moved], updates=updates, joins=True)


class _StreamedStep(PlannedStep):
    """A step whose programs are cut from its loss and gradient."""

    def __init__(
        self,
        config: TrainConfig,
        batch: Batch,
        device: Device | None,
        known: Known,
        *,
        measures: bool,
        is_tried: bool,
    ) -> None:
        super().__init__(config, batch)
        params, limit = config.abstract[1], None
        if device is not None:
            num_bytes = config.device_memory or int(_SHARE * device.memory.value)
            limit = DeviceLimit(num_bytes, is_host=False)
        with _without_store(config) as backend:
            self._dry = backend.dry_run(
                batch,
                params,
                limit,
                compiles=measures,
                is_tried=is_tried,
                known=known,
            )
            if measures:
                self.seconds = self._dry._measured_s()
        self.sizes = streamed_sizes(config, self._dry)

    @property
    def known(self) -> Known:
        return self._dry._known

    @cached_property
    def operations(self) -> Mapping[str, float]:
        return self._dry._operations()

    @property
    def used_bytes(self) -> int:
        return self._dry.used_bytes

    def _work(self, rates: Rates, seconds: Mapping[str, float]) -> StepWork:
        speeds = rates.speeds(seconds)
        self._dry = self._dry._on(speeds)
        self.sizes = streamed_sizes(self._config, self._dry)
        work = self._dry._work(speeds)
        return replace(work, commit_s=work.commit_s + rates.flush_s(work.updates))


@contextlib.contextmanager
def _without_store(config: TrainConfig) -> Iterator[Streamed]:
    """Opens the backend of a run in a temporary directory; nothing is written."""
    with tempfile.TemporaryDirectory() as folder:
        roots = tuple(Path(folder, f"drive{n}") for n in range(len(config.csd_root)))
        for root in roots:
            root.mkdir()
        place = Path(folder, "store")
        elsewhere = replace(config, store=place, csd_root=roots, restore=None)
        backend = open_backend(elsewhere, make_optimizer(config))
        assert isinstance(backend, Streamed)
        with contextlib.closing(backend):
            yield backend
