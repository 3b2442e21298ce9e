"""What a run will take, before it begins: memory, disk, bytes, and time.

    step, as planned (train.work) ─┬─► virtual clock ─► seconds, wear
    machine (jaxinf.plan) ─────────┘

Invariant: nothing is written, and params are never made.
"""

import os
import shutil
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta

from rich.console import Console

from jaxinf.command_line import UsageError
from jaxinf.errors import JaxinfError
from jaxinf.plan import Machine, read_machine
from jaxinf.plan.device_updates import (
    UpdateRates,
    interval,
    least_drive_bytes_per_s,
)
from jaxinf.schedule.steps import PROCESSOR, StepWork
from jaxinf.terminal import format_bytes, printable
from jaxinf.train.config import TrainConfig
from jaxinf.train.data.loader import Batch
from jaxinf.train.progress import Say, unsaid
from jaxinf.train.sizes import Sizes, sizes_of
from jaxinf.train.work import PlannedStep, Rates, planned_step
from jaxinf.typing import FLOAT32, JsonValue

_DAY_S = 86_400
_MANY_FILES = 4  # written in a step, of those that a drive was measured with


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
      peak_bytes: The most memory of the host that the process takes; None if it is not
        known what it takes beside a step.
      device_updates: With streaming and a device with memory of its own, what its
        updates could save; else None.
    """

    sizes: Sizes
    operations: float
    phases: Mapping[str, float]
    step_s: float
    bottleneck: str
    guesses: tuple[str, ...]
    years: float | None
    peak_bytes: int | None = None
    device_updates: "DeviceHelp | None" = None


@dataclass(frozen=True)
class DeviceHelp:
    """Whether updates on the device would make a step faster.

    Attributes:
      every: It would compute every so many subgroups; 0 for none.
      drives: Bytes/s of all drives together, reads and writes in equal parts.
      least_drives: The least of them with which it can help.
    """

    every: int
    drives: float
    least_drives: float


def forecast(step: PlannedStep, config: TrainConfig, machine: Machine) -> Forecast:
    """Forecasts a step of a run on a machine.

    Raises:
      ValueError: The machine has no rate that the run needs.
    """
    rates = Rates(config, machine)
    work = step.work(rates)
    found = work.simulated()
    sizes, busy = step.sizes, {name: s for name, s in found.busy_s.items() if s}
    peak_bytes = rates.process_bytes
    if peak_bytes is not None and machine.device is None:
        peak_bytes += step.used_bytes
    return Forecast(
        sizes,
        sum(step.operations.values()),
        _phases(work, sizes, rates),
        found.step_s,
        max(busy, key=lambda one: busy[one], default=PROCESSOR).split()[0],
        tuple(name for name, rate in rates.used.items() if rate.basis == "guessed"),
        _years(sizes, machine, found.step_s),
        peak_bytes,
        _device_help(config, work, sizes, machine),
    )


def _device_help(
    config: TrainConfig, work: StepWork, sizes: Sizes, machine: Machine
) -> DeviceHelp | None:
    if config.mode != "stream" or machine.device is None or not work.updates:
        return None
    moved = sum(one.read_bytes + one.written_bytes for one in work.updates)
    drives, num_params = sum(work.rates), sizes.num_params
    host = sum(one.seconds for one in work.updates) / num_params
    there = moved / 2 / num_params  # state goes up, and comes back
    to_device = (there + FLOAT32.itemsize) / machine.device.to_device.value
    rates = UpdateRates(
        host,
        there / (machine.copy.value * machine.num_cores),
        max(to_device, there / machine.device.to_host.value),
        moved / num_params / drives,
    )
    least = least_drive_bytes_per_s(host, moved / num_params)
    return DeviceHelp(interval(rates), drives, least)


def _phases(work: StepWork, sizes: Sizes, rates: Rates) -> Mapping[str, float]:
    phases = {
        "programs": work.num_parts * sum(work.call_s),
        "update": sum(one.seconds for one in work.updates),
    }
    if work.updates:
        by_drive: defaultdict[int, float] = defaultdict(float)
        for one in work.updates:
            for num_bytes in filter(None, (one.read_bytes, one.written_bytes)):
                seconds = num_bytes / work.rates[one.drive] + work.move_s
                by_drive[one.drive] += seconds
        state = round(sum(one.read_bytes + one.written_bytes for one in work.updates))
        phases["state"] = max(by_drive.values(), default=0.0)
        others = sizes.read_bytes + sizes.written_bytes - state - sizes.params_bytes
        phases["params"] = sizes.params_bytes / rates.read
        phases["values and gradients"] = others / rates.read
        phases["commit"] = work.commit_s
    return {name: seconds for name, seconds in phases.items() if seconds}


def _years(sizes: Sizes, machine: Machine, step_s: float) -> float | None:
    endurance = [d.endurance.value * d.count for d in machine.drives if d.endurance]
    if not sizes.written_bytes or not 0 < len(endurance) == len(machine.drives):
        return None
    return sum(endurance) / sizes.written_bytes * step_s / (365 * _DAY_S)


@dataclass(frozen=True)
class RunPlan:
    """A run, what it takes, and what a change of it would.

    Attributes:
      machine: Where it shall run; None if that is not said, and times are unknown.
      changed: The same after one change, by the change.
    """

    config: TrainConfig
    sizes: Sizes
    machine: Machine | None = None
    found: Forecast | None = None
    changed: Mapping[str, Forecast] = field(default_factory=dict)

    @property
    def tiers(self) -> Mapping[str, tuple[int, int | None]]:
        """Bytes that are needed and that there are, None if unknown, by tier.

        Without a machine they are this one's, and the free space of the store's place.
        """
        config, sizes, found = self.config, self.sizes, self.found
        memory, disk = sizes.memory_bytes, None
        tiers: dict[str, tuple[int, int | None]] = {}
        if self.machine is None or found is None:
            there = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
            disk = _free_bytes(config)
        else:
            there = int(self.machine.memory.value)
            device = self.machine.device
            if device is not None and config.mode != "stream":
                buffers = config.buffer_bytes if config.mode == "update" else 0
                tiers["device"] = memory - buffers, int(device.memory.value)
                memory = buffers
            memory = max(memory, found.peak_bytes or 0)
        tiers["memory"] = memory, there
        if config.mode != "memory":
            tiers["disk"] = sizes.disk_bytes, disk
        return tiers

    @property
    def misfits(self) -> list[str]:
        """What does not fit, as sentences."""
        return [
            f"does not fit: {'' if tier == 'memory' else 'the '}{tier} needs "
            f"{format_bytes(needed)}, has {format_bytes(there)}"
            for tier, (needed, there) in self.tiers.items()
            if there is not None and needed > there
        ]

    @property
    def most(self) -> str:
        """What is said before bytes: a streamed step is not planned without rates."""
        is_most = self.config.mode == "stream" and self.found is None
        return "at most " if is_most else ""

    def to_json(self) -> dict[str, JsonValue]:
        """For ``--json``."""
        document: dict[str, JsonValue] = {"sizes": asdict(self.sizes)}
        document["fits"] = not self.misfits
        if self.machine is not None and self.found is not None:
            document["machine"] = self.machine.name
            document["forecast"] = asdict(self.found)
            document["changes"] = {k: f.step_s for k, f in self.changed.items()}
        return document

    def print(self, console: Console) -> None:
        sizes, lines = self.sizes, []
        what = " (state or buffers, params, gradients, and updates)"
        if self.config.mode == "stream":
            what = " (of a step at most)"
        for tier, (needed, there) in self.tiers.items():
            line = f"{tier:8}needed {format_bytes(needed)}{what}"
            if there is not None:
                line += f", there is {format_bytes(there)}"
            lines.append(line)
            what = ""
        if self.config.mode != "memory":
            lines.append(
                f"drives  {self.most}{format_bytes(sizes.read_bytes)} read and "
                f"{format_bytes(sizes.written_bytes)} written a step"
            )
        if self.found is None or self.machine is None:
            lines.append(
                "time    unknown: give --machine FILE, which 'jaxinf doctor --machine "
                "FILE' writes, or --machine workstation"
            )
        else:
            lines += _time_lines(self.config, self.machine, self.found, self.changed)
        lines += [*self.misfits, "nothing was trained or written"]
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
    if (files := _files(machine, found.sizes)) is not None:
        measured, written = map(format_bytes, files)
        lines.append(
            f"        drives were measured with {measured}, and may be slower for "
            f"{written} in a step: 'jaxinf doctor --size BYTES' measures with more"
        )
    if found.device_updates is not None:
        lines.append(_device_line(found.device_updates))
    if found.years is not None:
        life = life_text(found.years)
        lines.append(f"wear    the drives last {life} of training without a pause")
    if found.guesses:
        lines.append(f"guess   rests on guesses: {', '.join(found.guesses)}")
    return lines


def life_text(years: float) -> str:
    """Formats the life of drives: as days within a year."""
    return f"{years * 365:.3g} days" if years < 1 else f"{years:.3g} years"


def _free_bytes(config: TrainConfig) -> int | None:
    """Returns the free space where a new store would be; None if there is a store."""
    if config.store is None or config.store.expanduser().exists():
        return None
    free = {}
    for place in config.csd_root or (config.store,):
        place = place.expanduser().absolute()
        there = next(x for x in (place, *place.parents) if x.exists())
        free[there.stat().st_dev] = shutil.disk_usage(there).free
    return sum(free.values())


def _files(machine: Machine, sizes: Sizes) -> tuple[int, int] | None:
    """Returns what a drive was measured with and what a step writes, if many more."""
    written_bytes = sizes.written_bytes // max(1, sum(d.count for d in machine.drives))
    least = min((int(d.file.value) for d in machine.drives if d.file), default=0)
    is_many = 0 < _MANY_FILES * least < written_bytes
    return (least, written_bytes) if is_many else None


def _device_line(found: DeviceHelp) -> str:
    drives = f"drives of {format_bytes(round(found.least_drives))}/s together"
    if found.every:
        return f"device  --device-updates {found.every}: these are faster than {drives}"
    these = f"these have {format_bytes(round(found.drives))}/s"
    if found.drives <= found.least_drives:
        return f"device  its updates cannot help on less than {drives}; {these}"
    return "device  its updates would save less than 5 % of the host's"


def plan(
    config: TrainConfig, batch: Batch, *, measures: bool = False, say: Say = unsaid
) -> RunPlan:
    """Plans a run; takes some seconds.

    Args:
      config: A run that `check` has returned, and whose data is loaded.
      batch: A batch of it; only its shapes count.
      measures: Whether programs are compiled and run, and their times used.

    Raises:
      UsageError: ``--machine`` names none, or one that lacks a rate.
      JaxinfError: As `planned_step`.
    """
    if config.machine is None:
        return RunPlan(config, sizes_of(config)[0])
    say("planning a step")
    try:
        machine = on_drives(read_machine(config.machine), len(config.csd_root))
        step = planned_step(config, batch, machine, measures=measures)
        found = forecast(step, config, machine)
        changed = {}
        for name, (one, on) in _changes(config, machine).items():
            say(f"planning a step with {name}")
            again = step
            if one is not config:
                try:
                    again = planned_step(
                        one, batch, on, is_tried=True, known=step.known
                    )
                except JaxinfError:  # a change that is refused is no advice
                    continue
            again.seconds = step.seconds
            changed[name] = forecast(again, one, on)
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
