"""A machine by eight numbers, and the seconds of a step on it by one formula.

    step = max(drives, link, programs, updates) + what nothing overlaps

Invariant: a number that is not known is None, and then there is no time.
"""

import json
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import jax

from jaxinf.command_line import UsageError, did_you_mean
from jaxinf.train.config import TrainConfig
from jaxinf.train.count import Count, waits

_MOST = 1e30


@dataclass(frozen=True)
class Machine:
    """Memory and rates; ``jaxinf doctor --json FILE`` measures them.

    Attributes:
      host_bytes: Memory of the host.
      device_bytes: Memory of the JAX device; None if it computes in the host's.
      drive_bytes_per_s: Of each drive, reads and writes in equal parts.
      drive_rated_write_bytes: That may be written to each drive in its life.
      link_bytes_per_s: Between host and JAX device, each way.
      operations_per_s: Of a model's loss and gradient, in the run's dtype.
      params_per_s: Params that all cores update, by AdamW with float32 state.
      commit_s: Seconds of a commit.
    """

    host_bytes: float | None = None
    device_bytes: float | None = None
    drive_bytes_per_s: float | None = None
    drive_rated_write_bytes: float | None = None
    link_bytes_per_s: float | None = None
    operations_per_s: float | None = None
    params_per_s: float | None = None
    commit_s: float | None = None


def this_machine() -> Machine:
    """Returns this machine's memory; no rate of it is known."""
    device, limit = jax.devices()[0], None
    if device.platform != "cpu":
        limit = (device.memory_stats() or {}).get("bytes_limit")
    return Machine(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), limit)


def read_machine(path: Path) -> Machine:
    """Reads a machine's file: a JSON object with fields of `Machine`.

    Raises:
      UsageError: Names the file, and the field that is wrong.
    """
    names = [field.name for field in fields(Machine)]
    try:
        document = json.loads(path.expanduser().read_text(encoding="utf-8"))
        if not isinstance(document, dict):
            raise ValueError("found no JSON object")
        for name, value in document.items():
            if name not in names:
                advice = did_you_mean(name, names) or f"expected {', '.join(names)}"
                raise ValueError(f"{name!r} is not known; {advice}")
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if value is not None and not (is_number and 0 < value < _MOST):
                raise ValueError(f"{name}: expected a number above 0, found {value!r}")
    except (OSError, ValueError, RecursionError, RuntimeError) as error:
        found = error.strerror if isinstance(error, OSError) else error
        raise UsageError(
            f"--machine {path}: expected the numbers of a machine, {found}; 'jaxinf "
            "doctor --json FILE' writes them"
        ) from error
    return Machine(**document)


def write_machine(machine: Machine, path: Path) -> None:
    """Writes what `read_machine` reads, without what is not known."""
    known = {name: value for name, value in asdict(machine).items() if value}
    path.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")


@dataclass(frozen=True)
class StepTime:
    """The seconds of a step.

    Attributes:
      terms: Seconds by resource; the longest of `beside` counts.
      beside: Terms that overlap; of those on one processor, the sum.
      alone: What nothing overlaps.
    """

    terms: Mapping[str, float]
    beside: Mapping[str, float]
    alone: Mapping[str, float]

    @property
    def step_s(self) -> float:
        return max(self.beside.values()) + sum(self.alone.values())

    @property
    def limit(self) -> str:
        """The term that a step would be shorter without, by the most."""
        most = max(self.beside, key=lambda name: self.beside[name])
        both = {most: self.beside[most], **self.alone}
        return max(both, key=lambda name: both[name])


def step_time(config: TrainConfig, count: Count, machine: Machine) -> StepTime:
    """Computes the time of a step.

    With clipping or compression programs end before updates begin; on one processor
    they share it.

    Raises:
      ValueError: Names the numbers of the machine that are missing.
    """
    moved = (count.read_bytes + count.written_bytes) / count.num_drives
    crossed = max(count.up_bytes, count.down_bytes)
    work = {
        "drives": (moved, "drive_bytes_per_s"),
        "link": (crossed, "link_bytes_per_s"),
        "programs": (count.operations, "operations_per_s"),
        "updates": (count.updated, "params_per_s"),
    }
    work = {name: one for name, one in work.items() if one[0]}
    rates: Mapping[str, Any] = asdict(machine)
    missing = {rate for _, rate in work.values() if rates[rate] is None}
    commits = _commits(config)
    missing |= {"commit_s"} if commits and machine.commit_s is None else set()
    if missing:
        raise ValueError(", ".join(sorted(missing)))
    terms = {name: amount / rates[rate] for name, (amount, rate) in work.items()}
    beside, alone = dict(terms), {}
    if waits(config):
        alone["programs"] = beside.pop("programs", 0.0)
    elif machine.device_bytes is None:
        own = beside.pop("programs", 0.0), beside.pop("updates", 0.0)
        beside["programs and updates"] = sum(own)
    if commits:
        alone["commit"] = commits * (machine.commit_s or 0.0)
    return StepTime(terms, beside or {"drives": 0.0}, alone)


def _commits(config: TrainConfig) -> float:
    """Returns the commits in a step, on average."""
    if config.mode == "memory":
        return 0.0
    if config.durability == "step":
        return 1.0
    if config.durability == "checkpoint":
        return 1 / (config.checkpoint_every or math.inf)
    return 1 / int(config.durability)


def life_s(count: Count, machine: Machine, step_s: float) -> float | None:
    """Returns seconds of training after which the drives are worn out, if known."""
    rated = machine.drive_rated_write_bytes
    if rated is None or not count.written_bytes:
        return None
    return rated * count.num_drives / count.written_bytes * step_s
