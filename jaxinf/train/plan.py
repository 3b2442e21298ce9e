"""A run before it begins: what it needs, what there is, and settings that are better.

Invariant: nothing is compiled, trained or written; advice is counted, not guessed.
"""

import contextlib
import math
import shlex
import shutil
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from jaxinf.command_line import UsageError
from jaxinf.errors import JaxinfError
from jaxinf.streaming import Count as StepCount
from jaxinf.terminal import exact_bytes, format_bytes
from jaxinf.train.checks import check
from jaxinf.train.config import TrainConfig
from jaxinf.train.count import Count, count, count_process
from jaxinf.train.data.loader import Batch
from jaxinf.train.machine import (
    Machine,
    StepTime,
    life_s,
    read_machine,
    step_time,
    this_machine,
)
from jaxinf.train.options import StateTier
from jaxinf.train.progress import Say, unsaid
from jaxinf.typing import JsonValue

_DAY_S = 86_400.0
_SHARE = 0.9  # of memory, where no limit is given
_MIB = 1 << 20
_LEAST_KEPT_BYTES = 64 * _MIB


@dataclass(frozen=True)
class Plan:
    """A run, what it takes, and what there is.

    Attributes:
      there: Bytes of the tiers ``host``, ``device`` and ``disk``; None if unknown.
      time: None if a number of the machine is missing.
      missing: Says which.
      like: What the plan of another way of the run need not trace again.
    """

    config: TrainConfig
    needs: Count
    there: Mapping[str, float | None]
    time: StepTime | None = None
    missing: str = ""
    life_s: float | None = None
    like: StepCount | None = field(default=None, repr=False)

    @property
    def tiers(self) -> dict[str, tuple[int, float | None]]:
        """Bytes needed and there, of what the run uses."""
        needs = self.needs
        used = {"host": needs.host_bytes, "device": needs.device_bytes}
        used |= {"disk": needs.disk_bytes}
        return {name: (n, self.there[name]) for name, n in used.items() if n}

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

    def to_json(self) -> dict[str, JsonValue]:
        """For ``--json``."""
        document: dict[str, Any] = {"fits": self.excess <= 1}
        document["tiers"] = {
            name: {"needed_bytes": needed, "there_bytes": there}
            for name, (needed, there) in self.tiers.items()
        }
        document["step"] = asdict(self.needs)
        if (time := self.time) is not None:
            document["time"] = {"step_s": time.step_s, "limit": time.limit}
            document["time"] |= {
                "terms_s": dict(time.terms),
                "alone_s": dict(time.alone),
            }
            document["life_s"] = self.life_s
        return document

    def lines(self) -> Iterator[str]:
        """For a terminal."""
        needs = self.needs
        for name, (needed, there) in self.tiers.items():
            line = f"{name:8}needed {format_bytes(needed)}"
            has = "" if there is None else f", there is {format_bytes(int(there))}"
            yield line + has
        if needs.read_bytes or needs.written_bytes:
            yield (
                f"drives  {format_bytes(needs.read_bytes)} read and "
                f"{format_bytes(needs.written_bytes)} written a step"
            )
        if self.time is None:
            yield (
                f"time    unknown without {self.missing}: 'jaxinf doctor --json FILE' "
                "measures it, and --machine FILE takes it"
            )
        else:
            yield from self._time_lines(self.time)
        for name in self.misfits:
            needed, there = self.tiers[name]
            yield (
                f"does not fit: the {name} needs {format_bytes(needed)}, has "
                f"{format_bytes(int(there or 0))}"
            )

    def _time_lines(self, time: StepTime) -> Iterator[str]:
        total = timedelta(seconds=round(time.step_s * self.config.steps))
        terms = ", ".join(f"{name} {s:.3g}" for name, s in time.terms.items())
        alone = "".join(f" + {name} {s:.3g}" for name, s in time.alone.items())
        longest = " or ".join(time.beside)
        yield f"time    {time.step_s:.3g} s a step, {total} in all; limit: {time.limit}"
        yield f"        seconds of {terms}; a step is the longest of {longest}{alone}"
        if self.life_s is not None:
            yield f"wear    the drives last {_life(self.life_s)} without a pause"


def _life(seconds: float) -> str:
    days = seconds / _DAY_S
    return f"{days:.3g} days" if days < 365 else f"{days / 365:.3g} years"


def machine_of(config: TrainConfig) -> Machine:
    """Returns the machine of ``--machine``, or this one without rates."""
    return this_machine() if config.machine is None else read_machine(config.machine)


def plan_run(
    config: TrainConfig,
    batch: Batch,
    machine: Machine,
    *,
    num_processes: int = 1,
    like: StepCount | None = None,
) -> Plan:
    """Plans a run; takes some seconds.

    Args:
      config: A run that `check` has returned, and whose data is loaded.
      batch: A batch of it; only its shapes count.
      num_processes: Of a run with so many, of which `config` and `batch` are one's, the
        one is planned that takes the most.
      like: That of the plan of another way of the same run.

    Raises:
      JaxinfError: As `count`.
    """
    apart = machine.device_bytes
    device_bytes = None if apart is None else int(apart)
    made: StepCount | None = None
    if num_processes > 1:
        needs = count_process(config, batch, device_bytes, num_processes)
    else:
        needs, made = count(config, batch, device_bytes, like)
    there: dict[str, float | None] = {"host": machine.host_bytes}
    there |= {"device": machine.device_bytes, "disk": _free_bytes(config)}
    plan = Plan(config, needs, there, like=made)
    try:
        time = step_time(config, needs, machine)
    except ValueError as error:
        return replace(plan, missing=str(error))
    return replace(plan, time=time, life_s=life_s(needs, machine, time.step_s))


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


def plan_text(
    plan: Plan, batch: Batch, machine: Machine, *, num_processes: int = 1
) -> str:
    """Returns a plan for a terminal, with what helps most if it does not fit."""
    lines = [*plan.lines()]
    if plan.excess > 1 and num_processes == 1:
        lines.append(_advice(plan, batch, machine))
    return "\n".join([*lines, "nothing was trained or written"])


def _advice(plan: Plan, batch: Batch, machine: Machine) -> str:
    """Names the setting after which the tightest tier is the least tight."""
    best, changes = plan, {}
    for one in _helps(plan.config, machine):
        with contextlib.suppress(JaxinfError, UsageError):
            ready = check(replace(plan.config, **one))
            other = plan_run(ready, batch, machine, like=plan.like)
            if other.excess < best.excess:
                best, changes = other, one
    if best is plan:
        return "no setting helps: take a smaller model, or a larger machine"
    found = ", ".join(f"{n} {format_bytes(b)}" for n, (b, _) in best.tiers.items())
    fits = "fits" if best.excess <= 1 else "still does not fit"
    return f"what helps most: {shlex.join(_words(changes))}, which {fits}: {found}"


def _helps(config: TrainConfig, machine: Machine) -> Iterator[dict[str, Any]]:
    """Yields changes that make memory or disk smaller."""
    if config.mode != "stream":
        yield _streamed(config, machine)
    elif config.policy != "recompute":
        yield {"policy": "recompute"}
    elif config.batch_size % (4 * config.micro_batches) == 0:
        yield {"micro_batches": 4 * config.micro_batches}
    if config.state is None and config.mode != "memory":
        yield {"state": "int8"}


def _streamed(config: TrainConfig, machine: Machine) -> dict[str, Any]:
    memory = {} if config.memory else {"memory": _memory(machine)}
    return {"mode": "stream", **memory}


def _memory(machine: Machine) -> int:
    return int((machine.host_bytes or 0) * _SHARE) // _MIB * _MIB


def _words(changes: Mapping[str, Any]) -> list[str]:
    """Returns changes of a run as the words of a command line."""
    words = []
    for name, value in changes.items():
        text = exact_bytes(value) if name == "memory" else f"{value}"
        if isinstance(value, StateTier):
            text = f"host={exact_bytes(value.host)}"
        words += [f"--{name.replace('_', '-')}", text.replace(" ", "")]
    return words


# --- the best of a list of settings --------------------------------------------------


@dataclass(frozen=True)
class Setting:
    """A setting of a run that was tried.

    Attributes:
      changes: Flags, by their field.
      plan: None if it was refused.
      cost: What it costs, such as bits; such a setting is not chosen.
    """

    changes: Mapping[str, Any]
    plan: Plan | None
    cost: str = ""
    refused: str = ""

    @property
    def words(self) -> list[str]:
        return _words(self.changes)

    @property
    def order(self) -> tuple[bool, float, float]:
        """What fits before what does not, the faster first."""
        if self.plan is None or self.plan.time is None:
            return True, math.inf, math.inf
        excess = self.plan.excess
        return excess > 1, excess if excess > 1 else 0.0, self.plan.time.step_s

    def to_json(self) -> dict[str, JsonValue]:
        """For ``--json``."""
        found = {"cost": self.cost, "refused": self.refused}
        said = {name: text for name, text in found.items() if text}
        plan = self.plan and self.plan.to_json()
        return {"flags": [*self.words], **said, "plan": plan}

    def cells(self) -> list[str]:
        """Of a row of the table."""
        words = " ".join(self.words) or "as given"
        plan = self.plan
        if plan is None or plan.time is None:
            return [
                words,
                "",
                "",
                "",
                "",
                textwrap.shorten(f"refused: {self.refused}", 60, placeholder=" …"),
            ]
        found = {name: format_bytes(needed) for name, (needed, _) in plan.tiers.items()}
        sizes = [found.get(name, "-") for name in ("host", "device", "disk")]
        over = " and the ".join(plan.misfits)
        note = f"does not fit the {over}" if over else self.cost
        limit = plan.time.limit + (f"; {note}" if note else "")
        return [words, *sizes, f"{plan.time.step_s:.3g} s", limit]


def fit(
    config: TrainConfig, batch: Batch, machine: Machine, *, say: Say = unsaid
) -> list[Setting]:
    """Plans a list of settings of a run, for some seconds, the best setting first.

    One kind of setting after another is tried on the best so far. Flags with another
    value than the default stay as they are.

    Raises:
      UsageError: A rate of the machine is missing.
      JaxinfError: Nothing can be planned.
    """
    default, found = TrainConfig(), list[Setting]()
    like: StepCount | None = None

    def is_free(*names: str) -> bool:
        return all(getattr(config, n) == getattr(default, n) for n in names)

    def tried(changes: Mapping[str, Any], cost: str = "") -> None:
        nonlocal like
        say(f"counting {' '.join(_words(changes)) or 'the run as it is'}")
        try:
            ready = check(replace(config, **changes))
            plan = plan_run(ready, batch, machine, like=like)
        except (JaxinfError, UsageError) as error:
            found.append(Setting(changes, None, cost, str(error).partition(";")[0]))
            return
        if plan.missing:
            raise UsageError(
                f"--fit: expected {plan.missing} of the machine; give --machine FILE "
                "that 'jaxinf doctor --json FILE' wrote"
            )
        like = plan.like or like
        found.append(Setting(changes, plan, cost))

    tried({})
    if is_free("mode"):
        tried(_streamed(config, machine))
    for settings in (_policies, _parts, _kept):
        best = min(found, key=lambda one: one.order)
        if best.plan is not None:
            for changes in settings(best.plan, machine):
                if is_free(*changes.keys() - {"memory"}):
                    tried({**best.changes, **changes})
    found.sort(key=lambda one: one.order)
    best = found[0]
    for state in ("bf16", "int8") if is_free("state") else ():
        tried({**best.changes, "state": state}, "rounds state")
    if best.plan is not None and config.clip_norm and not config.compress:
        free = replace(best.plan.config, clip_norm=0.0)
        time = step_time(free, best.plan.needs, machine)
        plan = replace(best.plan, config=free, time=time)
        found.append(Setting({**best.changes, "clip_norm": 0.0}, plan, "no clipping"))
    return found


def _policies(plan: Plan, machine: Machine) -> Iterator[dict[str, Any]]:
    if plan.config.mode == "stream":
        yield {"policy": "keep"}
        yield {"policy": "offload"}


def _parts(plan: Plan, machine: Machine) -> Iterator[dict[str, Any]]:
    if plan.config.mode == "stream" and plan.config.batch_size % 4 == 0:
        yield {"micro_batches": 4}


def _kept(plan: Plan, machine: Machine) -> Iterator[dict[str, Any]]:
    """Yields memory for state that stays between steps: what the host has left."""
    left = (_memory(machine) - plan.needs.host_bytes) // _MIB * _MIB
    is_free = plan.config.mode == "update" and plan.config.memory is None
    if is_free and left >= _LEAST_KEPT_BYTES:
        memory = plan.config.buffer_bytes + left
        yield {"state_tier": StateTier(left), "memory": memory}
