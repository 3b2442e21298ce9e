"""A run before it begins: what it needs, what there is, and the time of its step.

    step = max(drives, link, programs, updates) + what nothing overlaps

Invariant: nothing is trained or written; without a rate that a run needs there is no
time.
"""

import math
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from jaxinf.terminal import format_bytes
from jaxinf.train.config import TrainConfig
from jaxinf.train.count import RunNeeds, count, waits
from jaxinf.train.data.loader import Batch
from jaxinf.train.machine import Machine, read_machine, this_machine
from jaxinf.typing import JsonValue

_DAY_S = 86_400.0
_MOST_S = 1e6 * _DAY_S
_REMEDIES = {
    "disk": "give --state int8, more drives (--csd-root) or a smaller model",
    "host": "give --mode stream with a --memory, or more --micro-batches",
    "device": "give --mode stream with a --memory, or more --micro-batches",
}


@dataclass(frozen=True)
class StepTime:
    """The seconds of a step.

    Attributes:
      step_s: The longest of `beside_s`, and all of `alone_s`.
      limit: The term that a step would be shorter without, by the most.
      terms_s: By resource.
      beside_s: Terms that overlap; of those on one processor, the sum.
      alone_s: What nothing overlaps.
      life_s: Training after which the drives are worn out, if known.
    """

    step_s: float
    limit: str
    terms_s: Mapping[str, float]
    beside_s: Mapping[str, float]
    alone_s: Mapping[str, float]
    life_s: float | None


@dataclass(frozen=True)
class RunPlan:
    """A run, what it takes, and what there is.

    Attributes:
      tiers: bytes needed and there, of what the run uses; None if unknown.
      time: None if a number of the machine is missing.
      missing: says which.
    """

    config: TrainConfig
    needs: RunNeeds
    tiers: Mapping[str, tuple[int, float | None]]
    time: StepTime | None = None
    missing: str = ""

    @property
    def fits(self) -> bool:
        tiers = self.tiers.values()
        return all(has is None or needed <= has for needed, has in tiers)

    def to_json(self) -> Mapping[str, JsonValue]:
        """For ``--json``."""
        document: dict[str, Any] = {"fits": self.fits}
        document["tiers"] = {
            name: {"needed_bytes": needed, "there_bytes": there}
            for name, (needed, there) in self.tiers.items()
        }
        document["step"] = asdict(self.needs)
        return document | ({"time": asdict(self.time)} if self.time else {})


def plan_run(config: TrainConfig, batch: Batch) -> RunPlan:
    """Plans a run; takes some seconds.

    Args:
      config: a run that `check` has returned, and whose data is loaded.
      batch: a batch of one process; only its shapes count.

    Raises:
      UsageError: the file of the machine is none.
      JaxinfError: as `count`.
    """
    machine = this_machine() if config.machine is None else read_machine(config.machine)
    apart = machine.device_bytes
    needs = count(config, batch, None if apart is None else int(apart))
    found = {
        "host": (needs.host_bytes, machine.host_bytes),
        "device": (needs.device_bytes, machine.device_bytes),
        "disk": (needs.disk_bytes, _free_bytes(config)),
    }
    tiers = {name: pair for name, pair in found.items() if pair[0]}
    try:
        return RunPlan(config, needs, tiers, step_time(config, needs, machine))
    except ValueError as error:
        return RunPlan(config, needs, tiers, missing=str(error))


def _free_bytes(config: TrainConfig) -> float | None:
    """Returns the space for a new store; None if it is there, or on another machine."""
    place = config.store or Path("STORE")
    is_elsewhere = config.machine is not None and place == Path("STORE")
    if is_elsewhere or config.mode == "memory" or place.expanduser().exists():
        return None
    free = {}
    for root in config.csd_root or (place,):
        root = root.expanduser().absolute()
        there = next(x for x in (root, *root.parents) if x.exists())
        free[there.stat().st_dev] = shutil.disk_usage(there).free
    return float(sum(free.values()))


def plan_text(plan: RunPlan) -> str:
    """Returns a plan for a terminal."""
    lines = _table([*_rows(plan)])
    for name, (needed, there) in plan.tiers.items():
        if there is not None and needed > there:
            pair = f"{format_bytes(needed)}, has {format_bytes(int(there))}"
            lines.append(f"does not fit: the {name} needs {pair}; {_REMEDIES[name]}")
    return "\n".join([*lines, "nothing was trained or written"])


def _rows(plan: RunPlan) -> Iterator[tuple[str, str]]:
    needs, time = plan.needs, plan.time
    for name, (needed, there) in plan.tiers.items():
        has = "" if there is None else f", there is {format_bytes(int(there))}"
        yield name, f"needed {format_bytes(needed)}{has}"
    if needs.drive_read_bytes or needs.drive_write_bytes:
        moved = needs.drive_read_bytes, needs.drive_write_bytes
        read, written = map(format_bytes, moved)
        yield "drives", f"{read} read and {written} written a step"
    if time is None:
        how = "'jaxinf doctor --json FILE' measures it, and --machine FILE takes it"
        yield "time", f"unknown without {plan.missing}: {how}"
        return
    total = timedelta(seconds=round(min(time.step_s * plan.config.steps, _MOST_S)))
    yield "time", f"{time.step_s:.3g} s a step, {total} in all; limit: {time.limit}"
    terms = ", ".join(f"{name} {s:.3g}" for name, s in time.terms_s.items())
    alone = "".join(f" + {name} {s:.3g}" for name, s in time.alone_s.items())
    longest = " or ".join(time.beside_s) or "nothing"
    yield "", f"seconds of {terms}; a step is the longest of {longest}{alone}"
    if time.life_s is not None:
        days = time.life_s / _DAY_S
        life = f"{days:.3g} days" if days < 365 else f"{days / 365:.3g} years"
        yield "wear", f"the drives last {life} without a pause"


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Returns lines in which the cells of a column are as wide as the widest."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]


def step_time(config: TrainConfig, needs: RunNeeds, machine: Machine) -> StepTime:
    """Computes the time of a step.

    With clipping or compression programs end before updates begin; on one processor
    they share it.

    Raises:
      ValueError: Names the numbers of the machine that are missing.
    """
    moved_bytes = needs.drive_read_bytes + needs.drive_write_bytes
    work = {  # and its rate
        "drives": (moved_bytes / needs.num_drives, "drive_bytes_per_s"),
        "link": (max(needs.link_up_bytes, needs.link_down_bytes), "link_bytes_per_s"),
        "programs": (needs.operations, "operations_per_s"),
        "updates": (needs.updated, "params_per_s"),
    }
    work, commits = {k: pair for k, pair in work.items() if pair[0]}, _commits(config)
    asked = {rate for _, rate in work.values()} | ({"commit_s"} if commits else set())
    if missing := sorted(name for name in asked if getattr(machine, name) is None):
        raise ValueError(", ".join(missing))
    terms = {k: amount / getattr(machine, rate) for k, (amount, rate) in work.items()}
    beside, alone = dict(terms), dict[str, float]()
    if waits(config):
        alone["programs"] = beside.pop("programs", 0.0)
    elif machine.device_bytes is None:
        own = beside.pop("programs", 0.0), beside.pop("updates", 0.0)
        beside["programs and updates"] = sum(own)
    if commits:
        alone["commit"] = commits * (machine.commit_s or 0.0)
    longest = max(beside, key=lambda name: beside[name], default="drives")
    most = {longest: beside.get(longest, 0.0), **alone}
    step_s, limit = sum(most.values()), max(most, key=lambda name: most[name])
    rated, life_s = machine.drive_rated_write_bytes, None
    if rated is not None and needs.drive_write_bytes:
        life_s = rated * needs.num_drives / needs.drive_write_bytes * step_s
    return StepTime(step_s, limit, terms, beside, alone, life_s)


def _commits(config: TrainConfig) -> float:
    """Returns the commits in a step, on average."""
    if config.mode == "memory":
        return 0.0
    if config.durability == "step":
        return 1.0
    if config.durability == "checkpoint":
        return 1 / (config.checkpoint_every or math.inf)
    return 1 / int(config.durability)
