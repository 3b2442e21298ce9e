"""What a run will take, before it begins: memory, disk, bytes, and time.

    config ─► layout of its store ─► bytes ──┐
      └─────► lowered loss ─► operations ────┼─► tasks ─► virtual clock ─► seconds
    machine (jaxinf.plan) ─► rates ──────────┘

Invariant: nothing is compiled or written but an empty store in a temporary directory,
  and params are never made.
"""

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import jax
from flax import nnx
from jaxinf_models import abstract_params, num_params, task_loss
from rich.console import Console

from jaxinf.command_line import UsageError
from jaxinf.engine import (
    StoreDescription,
    can_take,
    check_compressed,
    describe,
    gradient_forms,
    keeps_feedback,
    moved_states,
    open_store,
)
from jaxinf.plan import Machine, Rate, read_machine
from jaxinf.program import averaged, trace_init
from jaxinf.schedule.clock import Task, run
from jaxinf.store import required_bytes
from jaxinf.streaming import trace_optimizer
from jaxinf.streaming.update.traffic import moved_bytes, written_bytes
from jaxinf.terminal import format_bytes, printable
from jaxinf.train.config import TrainConfig
from jaxinf.train.data.loader import Batch
from jaxinf.train.optimizers import make_optimizer
from jaxinf.typing import JsonValue, PyTree

__all__ = ["Forecast", "RunPlan", "Sizes", "plan", "sizes_of"]

_DAY_S = 86_400


@dataclass(frozen=True)
class Sizes:
    """What a run takes.

    Attributes:
      num_params: Params of the model.
      memory_bytes: Of a streamed step; else of buffers, or of plain optax's state, and
        of JAX's params, gradients, updates and new params. Activations and the process
        are not in it.
      disk_bytes: Both slots, and gradients that wait.
      params_bytes: Params that a streamed step reads for its programs.
      read_bytes, written_bytes: Of the drives, in a step, those params included. A
        streamed step's are at most so many: what memory saves is not counted.
    """

    num_params: int
    memory_bytes: int
    disk_bytes: int
    params_bytes: int
    read_bytes: int
    written_bytes: int


@dataclass(frozen=True)
class Forecast:
    """What a run will take on a machine.

    Attributes:
      sizes: Memory, disk, and bytes of a step.
      operations: Operations of forward and backward, in a step.
      phases: Seconds of a step's parts; some of them overlap.
      step_s: Seconds of a step.
      bottleneck: What is busy for the largest part of it.
      guesses: Places of rates that rest on a guess.
      years: Until the drives are worn out, if it trains without a pause; None if their
        endurance is not known, or nothing is written.
    """

    sizes: Sizes
    operations: float
    phases: Mapping[str, float]
    step_s: float
    bottleneck: str
    guesses: tuple[str, ...]
    years: float | None


def sizes_of(config: TrainConfig, description: StoreDescription | None = None) -> Sizes:
    """Computes the sizes of a run from its store's layout.

    Args:
      config: A run that `check` has returned.
      description: What `describe_store` returns for it, or for a run with the same
        model and optimizer; by default it is computed.

    Raises:
      JaxinfError: As `jaxinf.open_store` and `jaxinf.smart_update`.
    """
    params = abstract_params(config.model_config)[1]
    leaves = jax.tree.leaves(params)
    count = num_params(config.model_config)
    arrays = 4 * sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
    if config.mode == "memory":
        slots = jax.eval_shape(make_optimizer(config).init, params)
        held = [x.size * x.dtype.itemsize for x in jax.tree.leaves(slots)]
        return Sizes(count, arrays + sum(held), 0, 0, 0, 0)
    is_streamed, stays = config.mode == "stream", config.resident == "params"
    num_runs = config.micro_batches if config.order == "parts" else 1
    description = description or describe_store(config)
    with (
        tempfile.TemporaryDirectory() as place,
        open_store(Path(place, "store"), **_store_options(config)) as store,
    ):
        shape = store._training.shape(description)
        disk = sum(required_bytes(shape.directory).values())
        read = written = programs = by_commits = 0
        for number, leaf in enumerate(leaves):
            kernel = description.leaves[number].kernel
            has_params = stays if is_streamed else can_take(shape, number, leaf.dtype)
            for layout in shape.layouts(number, (0,) * leaf.ndim, leaf.shape):
                loads, stores = moved_states(kernel, layout)
                if layout.subgroup in shape.host_tier:
                    at_once = {0} if is_streamed else ()
                    now, later = written_bytes(shape, layout, stores, at_once)
                    written, by_commits = written + now, by_commits + later
                else:
                    loads -= {0} if has_params else set()
                    read += moved_bytes(shape, layout, loads)
                    written += moved_bytes(shape, layout, stores)
                if is_streamed and not stays:  # forward and backward
                    programs += 2 * num_runs * moved_bytes(shape, layout, [0])
        every = shape.options.mean_steps_per_commit(config.checkpoint_every)
        written += round(by_commits / (every or config.steps))
    if is_streamed:
        waiting = 4 * count if config.clip_norm or num_runs > 1 else 0
        # A sum is read and written by each run.
        disk, read = disk + waiting, read + num_runs * waiting
        written += num_runs * waiting
    memory = config.buffer_bytes + (0 if is_streamed else arrays)
    return Sizes(count, memory, disk, programs, read + programs, written)


def _store_options(config: TrainConfig) -> dict[str, Any]:
    """Options of `open_store` on which the layout and the traffic of a run depend."""
    options: dict[str, Any] = {"csd": config.csd, "durability": config.durability}
    options |= {"state": config.state, "master": config.master}
    if tier := config.state_tier:
        beside = tier if config.mode == "stream" else 0
        options |= {"memory_bytes": config.buffer_bytes + beside}
        options |= {"tiers": {"host": tier}}
    return options


def num_operations(config: TrainConfig, batch: Batch) -> float:
    """Counts the operations of loss and gradient from what JAX lowers; some seconds.

    Args:
      config: A run that `check` has returned.
      batch: A batch of the run; only its shapes count.
    """
    graphdef, params = abstract_params(config.model_config)

    def loss_fn(params: PyTree, batch: Any) -> jax.Array:
        return task_loss(nnx.merge(graphdef, params), config.task_name, batch)

    shapes = jax.eval_shape(lambda: batch)
    lowered = jax.jit(jax.value_and_grad(loss_fn)).lower(params, shapes)
    costs: Any = lowered.cost_analysis()
    return float(costs["flops"])


def forecast(
    config: TrainConfig,
    machine: Machine,
    operations: float,
    description: StoreDescription | None = None,
) -> Forecast:
    """Forecasts a step of a run on a machine.

    Args:
      config: A run that `check` has returned.
      machine: Where it shall run.
      operations: Of loss and gradient.
      description: As for `sizes_of`.

    Raises:
      JaxinfError: As `sizes_of`.
      ValueError: The machine has no rate that the run needs.
    """
    sizes = sizes_of(config, description)
    tasks, used = _tasks(config, machine, sizes, operations)
    spans = run(tasks)
    step_s = max(span.end_s for span in spans)
    busy: dict[str, float] = {}
    for task in tasks:
        busy[task.server] = busy.get(task.server, 0.0) + task.seconds
    written = sizes.written_bytes
    endurance = [d.endurance.value * d.count for d in machine.drives if d.endurance]
    years = None
    if endurance and written and len(endurance) == len(machine.drives):
        years = sum(endurance) / written * step_s / (365 * _DAY_S)
    return Forecast(
        sizes,
        operations,
        {task.name: task.seconds for task in tasks if task.seconds},
        step_s,
        max(busy, key=lambda server: busy[server]),
        tuple(name for name, rate in used.items() if rate.basis == "guessed"),
        years,
    )


def _tasks(
    config: TrainConfig, machine: Machine, sizes: Sizes, operations: float
) -> tuple[list[Task], Mapping[str, Rate]]:
    """A step as tasks for the processor, the host's cores, and the drives.

    A device of its own computes beside the host's cores; a CPU does one after the
    other. Updates begin with the backward pass, or where all gradients have to be
    there first, after it.
    """
    state = "int8" if config.state == "int8" else "fp32"
    names = [f"{name} {state}" for name in _same_updates(config.optimizer)]
    used: dict[str, Rate] = {}
    product = _rate(machine, "products", [config.dtype], used)
    update = _rate(machine, "updates", names, used)
    forward_s = operations / 3 / product.value
    again_s = forward_s if config.mode == "stream" and _recomputes(config) else 0.0
    kernels_s = sizes.num_params / update.value / machine.num_cores
    host = "processor" if machine.device is None else "host"
    tasks = [
        Task("forward", "processor", forward_s),
        Task("backward", "processor", 2 * forward_s + again_s, (0,)),
    ]
    begins = (1,) if config.clip_norm or machine.device is None else (0,)
    tasks.append(Task("update", host, kernels_s, begins))
    if config.mode == "memory":
        return tasks, used
    if not machine.drives:
        raise ValueError(f"machine {machine.name}: expected a drive, found none")
    used |= {f"drives[{n}].mixed": d.mixed for n, d in enumerate(machine.drives)}
    # Each drive gets the same share, so the slowest sets the pace.
    count = sum(drive.count for drive in machine.drives)
    pace = count * min(drive.mixed.value for drive in machine.drives)
    pace = min(pace, 2 * machine.link.value) if machine.link else pace
    moved = sizes.read_bytes - sizes.params_bytes + sizes.written_bytes
    tasks += [
        Task("params for programs", "drives", sizes.params_bytes / pace),
        Task("state", "drives", moved / pace, begins if config.clip_norm else (0,)),
    ]
    return tasks, used


def _same_updates(optimizer: str) -> tuple[str, ...]:
    """Names of optimizers whose updates take the same time."""
    return ("adamw", "adam") if optimizer in ("adam", "adamw") else (optimizer,)


def _rate(
    machine: Machine, field: str, names: Sequence[str], used: dict[str, Rate]
) -> Rate:
    """Returns a rate with one of the names; another one in its place is a guess."""
    rates: Mapping[str, Rate] = getattr(machine, field)
    if not rates:
        raise ValueError(
            f"machine {machine.name}: expected a rate for {names[0]}, found no {field}"
        )
    for name in names:
        if name in rates:
            used[f"{field}[{name!r}]"] = rates[name]
            return rates[name]
    other, rate = next(iter(rates.items()))
    used[f"{field}[{other!r}] for {names[0]}"] = rate._replace(basis="guessed")
    return rate


def _recomputes(config: TrainConfig) -> bool:
    return config.policy in ("recompute", "plan")


@dataclass(frozen=True)
class RunPlan:
    """A run, what it takes, and what a change of it would.

    Attributes:
      config: The run.
      sizes: Memory, disk, and bytes of a step.
      machine: Where it shall run; None if that is not said, and times are unknown.
      found: Its forecast there.
      changed: The same after one change, by the change.
    """

    config: TrainConfig
    sizes: Sizes
    machine: Machine | None = None
    found: Forecast | None = None
    changed: Mapping[str, Forecast] = field(default_factory=dict)

    def to_json(self) -> dict[str, JsonValue]:
        """For ``--json``."""
        document: dict[str, JsonValue] = {"sizes": asdict(self.sizes)}
        if self.machine is not None and self.found is not None:
            document["machine"] = self.machine.name
            document["forecast"] = asdict(self.found)
            document["changes"] = {k: f.step_s for k, f in self.changed.items()}
        return document

    def print(self, console: Console) -> None:
        """Prints it."""
        sizes, lines = self.sizes, []
        most = "at most " if self.config.mode == "stream" else ""
        what = (
            "of a step"
            if most
            else "of state or buffers, params, gradients, and updates"
        )
        lines.append(f"memory  {format_bytes(sizes.memory_bytes)} {what}")
        if self.config.mode != "memory":
            lines.append(f"disk    {format_bytes(sizes.disk_bytes)}")
            lines.append(
                f"drives  {most}{format_bytes(sizes.read_bytes)} read and "
                f"{format_bytes(sizes.written_bytes)} written a step"
            )
        if self.found is None or self.machine is None:
            lines.append(
                "time    unknown: give --machine FILE, which 'jaxinf doctor --machine "
                "FILE' writes, or --machine workstation"
            )
        else:
            lines += _time_lines(self.config, self.machine, self.found, self.changed)
        lines.append("nothing was trained or written")
        console.print("\n".join(lines), markup=False, highlight=False)


def _time_lines(
    config: TrainConfig,
    machine: Machine,
    found: Forecast,
    changed: Mapping[str, Forecast],
) -> list[str]:
    total = timedelta(seconds=round(found.step_s * config.steps))
    phases = [f"{name} {seconds:.3g} s" for name, seconds in found.phases.items()]
    lines = [
        f"time    {found.step_s:.3g} s a step, {total} in all, predicted for "
        f"{printable(machine.name)}",
        f"        {', '.join(phases)}; busy for longest: {found.bottleneck}",
    ]
    for name, one in changed.items():
        lines.append(f"        {name}: {one.step_s:.3g} s a step")
    if found.years is not None:
        days = found.years * 365
        life = f"{days:.3g} days" if days < 365 else f"{found.years:.3g} years"
        lines.append(f"wear    the drives last {life} of training without a pause")
    if found.guesses:
        lines.append(f"guess   rests on guesses: {', '.join(found.guesses)}")
    return lines


def plan(config: TrainConfig, batch: Batch) -> RunPlan:
    """Plans a run; takes some seconds, most of them to lower the loss.

    Args:
      config: A run that `check` has returned, and whose data is loaded.
      batch: A batch of it; only its shapes count.

    Raises:
      UsageError: ``--machine`` names none, or one that lacks a rate.
      JaxinfError: As `sizes_of`.
    """
    if config.machine is None:
        return RunPlan(config, sizes_of(config))
    try:
        machine = on_drives(read_machine(config.machine), len(config.csd_root))
        operations = num_operations(config, batch)
        own = None if config.mode == "memory" else describe_store(config)
        found = forecast(config, machine, operations, own)
        changed = {
            name: forecast(one, on, operations, own)
            for name, (one, on) in _changes(config, machine).items()
        }
    except ValueError as error:
        raise UsageError(f"--machine {config.machine}: {error}") from error
    return RunPlan(config, found.sizes, machine, found, changed)


def on_drives(machine: Machine, count: int) -> Machine:
    """Returns a machine with its first drives alone, all of them with 0."""
    drives, left = [], count
    for drive in machine.drives:
        if left > 0:
            drives.append(replace(drive, count=min(drive.count, left)))
            left -= drive.count
    return replace(machine, drives=tuple(drives)) if count else machine


def _changes(
    config: TrainConfig, machine: Machine
) -> Mapping[str, tuple[TrainConfig, Machine]]:
    """What a user could change, each alone."""
    found: dict[str, tuple[TrainConfig, Machine]] = {}
    if config.mode == "memory":
        return found
    if config.state != "int8":
        found["--state int8"] = (replace(config, state="int8"), machine)
    if config.mode == "stream" and config.resident is None:
        found["--resident params"] = (replace(config, resident="params"), machine)
    more = replace(
        machine, drives=(*machine.drives, replace(machine.drives[0], count=1))
    )
    found["one more drive"] = (config, more)
    return found


def describe_store(config: TrainConfig) -> StoreDescription:
    """Describes the store of a run; traces its optimizer, which takes seconds."""
    params = abstract_params(config.model_config)[1]
    compress, tx = config.compression, averaged(make_optimizer(config), config.average)
    update = trace_optimizer(tx, params)
    check_compressed(compress, update)
    return describe(
        update,
        trace_init(tx, params),
        [(1,) * leaf.ndim for leaf in jax.tree.leaves(params)],
        average=config.average,
        has_feedback=keeps_feedback(compress),
        forms=partial(gradient_forms, compress),
    )
