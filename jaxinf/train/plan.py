"""A run before it begins: what it needs, what there is, and settings that are better.

Invariant: nothing is compiled, trained or written; advice is counted, not guessed.
"""

import contextlib
import math
import shlex
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from itertools import chain
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
_LEAST_KEPT_BYTES = 64 * _MIB
_TIERS = ("host", "device", "disk")


@dataclass(frozen=True)
class Plan:
    """A run, what it takes, and what there is.

    Attributes:
      changes: What differs from the run that was given, by field.
      tiers: Bytes needed and there, of what the run uses; None if unknown.
      time: None if a number of the machine is missing.
      missing: Says which.
      cost: What `changes` cost, such as bits.
      like: What the plan of another way of the run need not trace again.
    """

    config: TrainConfig
    changes: _Changes
    needs: RunNeeds
    tiers: Mapping[str, tuple[int, float | None]]
    time: StepTime | None = None
    missing: str = ""
    cost: str = ""
    like: StepCount | None = field(default=None, repr=False)

    @property
    def words(self) -> list[str]:
        """The changes on a command line."""
        return _words(self.changes)

    @property
    def excess(self) -> float:
        """By how much the tightest tier is too small: at most 1 fits."""
        known = [(n, there) for n, there in self.tiers.values() if there is not None]
        return max((needed / max(there, 1) for needed, there in known), default=0.0)

    @property
    def misfits(self) -> list[str]:
        """Tiers that are too small."""
        tiers = self.tiers.items()
        return [name for name, (n, there) in tiers if there is not None and n > there]

    def to_json(self) -> Mapping[str, JsonValue]:
        """For ``--json``."""
        document: dict[str, Any] = {"fits": not self.misfits}
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
      config: A run that `check` has returned, and whose data is loaded.
      batch: A batch of one process; only its shapes count.
      changes: Of the run, by field.
      like: That of the plan of another way of the same run.

    Raises:
      UsageError: The changes are refused.
      JaxinfError: As `count`.
    """
    if changes:
        config = check(replace(config, **changes))
    machine = machine_of(config)
    apart = machine.device_bytes
    needs, made = count(config, batch, None if apart is None else int(apart), like)
    needed = needs.host_bytes, needs.device_bytes, needs.disk_bytes
    there = machine.host_bytes, machine.device_bytes, _free_bytes(config)
    pairs = zip(_TIERS, zip(needed, there, strict=True), strict=True)
    tiers = {name: pair for name, pair in pairs if pair[0]}
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
    for name in plan.misfits:
        needed, there = plan.tiers[name]
        has = format_bytes(int(there or 0))
        lines += [f"does not fit: the {name} needs {format_bytes(needed)}, has {has}"]
    if plan.misfits:
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


# --- other settings ------------------------------------------------------------------


def _words(changes: _Changes) -> list[str]:
    words = []
    for name, value in changes.items():
        text = exact_bytes(value) if name == "memory" else f"{value}"
        words += [f"--{name.replace('_', '-')}", text]
    return words


def _advice(plan: Plan, batch: Batch) -> str:
    """Names the setting after which the tightest tier is the least tight."""
    best = plan
    state: list[_Changes] = [] if plan.config.state else [{"state": "int8"}]
    for changes in chain(*_kinds(plan), state):
        with contextlib.suppress(JaxinfError, UsageError):
            one = plan_run(plan.config, batch, changes, plan.like)
            best = min(best, one, key=lambda plan: plan.excess)
    if best is plan:
        return "no setting helps: take a smaller model, or a larger machine"
    tiers = best.tiers.items()
    found = ", ".join(f"{name} {format_bytes(needed)}" for name, (needed, _) in tiers)
    fits = "still does not fit" if best.misfits else "fits"
    return f"what helps most: {shlex.join(best.words)}, which {fits}: {found}"


def _kinds(plan: Plan) -> tuple[list[_Changes], ...]:
    """Returns changes to try that cost no bits: of mode, of what stays, of parts."""
    config, host_bytes = plan.config, machine_of(plan.config).host_bytes or 0
    memory = int(host_bytes * _SHARE) // _MIB * _MIB
    parts, num_rows = 4 * config.micro_batches, config.batch_size
    smaller: list[_Changes] = [] if num_rows % parts else [{"micro_batches": parts}]
    if config.mode == "stream":
        policies = {"recompute", "keep", "offload"} - {config.policy}
        return [], [{"policy": policy} for policy in sorted(policies)], smaller
    stream: _Changes = {"mode": "stream"}
    if not config.memory:
        stream["memory"] = memory
    if config.store is None:
        stream["store"] = Path("STORE")
    left = (memory - plan.needs.host_bytes) // _MIB * _MIB
    if config.mode != "update" or config.memory or left < _LEAST_KEPT_BYTES:
        return [stream], [], smaller
    return [stream], [{"memory": config.buffer_bytes + left}], smaller


def fit(
    config: TrainConfig, batch: Batch, say: Callable[[str], object]
) -> tuple[list[Plan], list[str]]:
    """Plans a run with a list of settings, for some seconds.

    One kind of setting after another is tried on the best so far. Flags with another
    value than the default stay as they are.

    Args:
      say: takes what is counted now.

    Returns:
      Plans, the best first, at the end those that cost something; and what is refused.

    Raises:
      UsageError: A rate of the machine is missing.
    """
    default, found, refused = TrainConfig(), list[Plan](), list[str]()

    def add(changes: _Changes, cost: str = "") -> None:
        if any(getattr(config, name) != getattr(default, name) for name in changes):
            return
        words = " ".join(_words(changes)) or "the run as it is"
        say(f"counting {words}")
        like = None if "clip_norm" in changes else found[0].like if found else None
        try:
            plan = plan_run(config, batch, changes, like)
        except (JaxinfError, UsageError) as error:
            refused.append(f"refused: {words}: {str(error).partition(';')[0]}")
            return
        if plan.missing:
            raise UsageError(
                f"--fit: expected {plan.missing} of the machine; give --machine FILE "
                "that 'jaxinf doctor --json FILE' wrote"
            )
        found.append(replace(plan, cost=cost))

    add({})
    for kind in range(3):
        for best in sorted(found, key=_order)[:1]:
            for changes in _kinds(best)[kind]:
                add({**best.changes, **changes})
    found.sort(key=_order)
    for best in found[:1]:
        for state in "bf16", "int8":
            add({**best.changes, "state": state}, "rounds state")
        if config.clip_norm and not config.compress:
            add({**best.changes, "clip_norm": 0.0}, "no clipping")
    return found, refused


def _order(plan: Plan) -> tuple[float, float]:
    """Sorts what fits before what does not, the faster first."""
    return max(1.0, plan.excess), plan.time.step_s if plan.time else math.inf


def fit_table(plans: Sequence[Plan]) -> list[str]:
    """Returns the lines of a table."""
    rows: list[tuple[str, ...]] = [("settings", *_TIERS, "a step", "limit")]
    for plan in plans:
        assert plan.time is not None
        needed = [plan.tiers.get(name, (0, None))[0] for name in _TIERS]
        host, device, disk = (format_bytes(n) if n else "-" for n in needed)
        over = " and the ".join(plan.misfits)
        note = f"does not fit the {over}" if over else plan.cost
        limit = "; ".join(filter(None, (plan.time.limit, note)))
        words, time = " ".join(plan.words) or "as given", f"{plan.time.step_s:.3g} s"
        rows.append((words, host, device, disk, time, limit))
    return _table(rows)
