"""A run before it begins: what it needs, what there is, and what helps if it lacks.

Invariant: nothing is trained or written; advice is counted, not guessed.
"""

import contextlib
import shlex
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeAlias

from jaxinf.command_line import UsageError
from jaxinf.errors import JaxinfError
from jaxinf.streaming import Count as StepCount
from jaxinf.terminal import exact_bytes, format_bytes
from jaxinf.train.checks import check
from jaxinf.train.config import TrainConfig
from jaxinf.train.count import RunNeeds, count
from jaxinf.train.data.loader import Batch
from jaxinf.train.machine import (
    Machine,
    StepTime,
    read_machine,
    step_time,
    this_machine,
)
from jaxinf.typing import JsonValue

_Changes: TypeAlias = dict[str, Any]
_DAY_S = 86_400.0
_MOST_S = 1e6 * _DAY_S
_SHARE = 0.9  # of memory, where no limit is given
_MIB = 1 << 20


@dataclass(frozen=True)
class Plan:
    """A run, what it takes, and what there is.

    Attributes:
      changes: what differs from the run that was given, by field.
      tiers: bytes needed and there, of what the run uses; None if unknown.
      time: None if a number of the machine is missing.
      missing: says which.
      like: what the plan of another way of the run need not trace again.
    """

    config: TrainConfig
    changes: _Changes
    needs: RunNeeds
    tiers: Mapping[str, tuple[int, float | None]]
    time: StepTime | None = None
    missing: str = ""
    like: StepCount | None = field(default=None, repr=False)

    @property
    def excess(self) -> float:
        """By how much the tightest tier is too small: at most 1 fits."""
        known = [(n, there) for n, there in self.tiers.values() if there is not None]
        return max((needed / max(there, 1) for needed, there in known), default=0.0)

    def to_json(self) -> Mapping[str, JsonValue]:
        """For ``--json``."""
        document: dict[str, Any] = {"fits": self.excess <= 1}
        document["tiers"] = {
            name: {"needed_bytes": needed, "there_bytes": there}
            for name, (needed, there) in self.tiers.items()
        }
        document["step"] = asdict(self.needs)
        return document | ({"time": asdict(self.time)} if self.time else {})


def machine_of(config: TrainConfig) -> Machine:
    """Returns the machine of ``--machine``, or this one without rates."""
    return this_machine() if config.machine is None else read_machine(config.machine)


def plan_run(
    config: TrainConfig,
    batch: Batch,
    changes: _Changes | None = None,
    like: StepCount | None = None,
) -> Plan:
    """Plans a run; takes some seconds.

    Args:
      config: a run that `check` has returned, and whose data is loaded.
      batch: a batch of one process; only its shapes count.
      changes: of the run, by field.
      like: that of the plan of another way of the same run.

    Raises:
      UsageError: the changes are refused.
      JaxinfError: as `count`.
    """
    if changes:
        config = check(replace(config, **changes))
    machine = machine_of(config)
    apart = machine.device_bytes
    needs, made = count(config, batch, None if apart is None else int(apart), like)
    needed = needs.host_bytes, needs.device_bytes, needs.disk_bytes
    there = machine.host_bytes, machine.device_bytes, _free_bytes(config)
    names = ("host", "device", "disk")
    found = zip(names, needed, there, strict=True)
    tiers = {name: (need, has) for name, need, has in found if need}
    plan = Plan(config, changes or {}, needs, tiers, like=made)
    try:
        return replace(plan, time=step_time(config, needs, machine))
    except ValueError as error:
        return replace(plan, missing=str(error))


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


def plan_text(plan: Plan, batch: Batch) -> str:
    """Returns a plan for a terminal, with what helps most if it does not fit."""
    lines = _table([*_rows(plan)])
    for name, (needed, there) in plan.tiers.items():
        if there is not None and needed > there:
            pair = f"{format_bytes(needed)}, has {format_bytes(int(there))}"
            lines.append(f"does not fit: the {name} needs {pair}")
    if plan.excess > 1:
        lines.append(_advice(plan, batch))
    return "\n".join([*lines, "nothing was trained or written"])


def _rows(plan: Plan) -> Iterator[tuple[str, str]]:
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


def _advice(plan: Plan, batch: Batch) -> str:
    """Names the setting after which the tightest tier is the least tight."""
    best = plan
    for changes in _smaller(plan.config, machine_of(plan.config)):
        with contextlib.suppress(JaxinfError, UsageError):
            one = plan_run(plan.config, batch, changes, plan.like)
            best = min(best, one, key=lambda plan: plan.excess)
    if best is plan:
        return "no setting helps: take a smaller model, or a larger machine"
    words = []
    for name, value in best.changes.items():
        text = exact_bytes(value) if name == "memory" else f"{value}"
        words += [f"--{name.replace('_', '-')}", text]
    tiers = best.tiers.items()
    found = ", ".join(f"{name} {format_bytes(needed)}" for name, (needed, _) in tiers)
    fits = "still does not fit" if best.excess > 1 else "fits"
    return f"what helps most: {shlex.join(words)}, which {fits}: {found}"


def _smaller(config: TrainConfig, machine: Machine) -> Iterator[_Changes]:
    """Yields changes that may take less: of mode, of what stays, of parts, of state."""
    if config.mode != "stream":
        host_bytes = int((machine.host_bytes or 0) * _SHARE)
        stream: _Changes = {"mode": "stream"}
        if not config.memory:
            stream["memory"] = host_bytes // _MIB * _MIB
        if config.store is None:
            stream["store"] = Path("STORE")
        yield stream
    elif config.policy != "offload":
        yield {"policy": "offload"}
    if config.batch_size % (parts := 4 * config.micro_batches) == 0:
        yield {"micro_batches": parts}
    if config.state is None:
        yield {"state": "int8"}
