"""A machine by eight numbers, and the seconds of a step on it by one formula.

    step = max(drives, link, programs, updates) + what nothing overlaps

Invariant: a number that is not known is None, and then there is no time.
"""

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, TypeAlias

import jax
import msgspec

from jaxinf.command_line import UsageError
from jaxinf.documents import Document, decode, encode
from jaxinf.train.config import TrainConfig
from jaxinf.train.count import RunNeeds, waits

_Number: TypeAlias = Annotated[float, msgspec.Meta(gt=0, lt=1e30)] | None


class Machine(Document, frozen=True):
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

    host_bytes: _Number = None
    device_bytes: _Number = None
    drive_bytes_per_s: _Number = None
    drive_rated_write_bytes: _Number = None
    link_bytes_per_s: _Number = None
    operations_per_s: _Number = None
    params_per_s: _Number = None
    commit_s: _Number = None


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
    try:
        return decode(path.expanduser().read_bytes(), Machine)
    except (OSError, ValueError, RuntimeError) as error:
        found = error.strerror if isinstance(error, OSError) else error
        raise UsageError(
            f"--machine {path}: expected numbers of a machine "
            f"({', '.join(Machine.__struct_fields__)}), found: {found}; "
            "'jaxinf doctor --json FILE' writes them"
        ) from error


def write_machine(machine: Machine, path: Path) -> None:
    """Writes what `read_machine` reads, without what is not known."""
    path.write_bytes(encode(machine))


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
