"""Limits of a run, and the settings within them, as text and as JSON.

Invariant: what is printed as a command line parses to the settings that it is of.
"""

import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Literal, TypeAlias

from rich.console import Console

from jaxinf.plan import Machine
from jaxinf.terminal import format_bytes, printable
from jaxinf.train.config import TrainConfig
from jaxinf.train.forecast import Forecast, life_text
from jaxinf.train.run_file import words_of_run
from jaxinf.typing import JsonValue

LossyFlag: TypeAlias = Literal[
    "state", "compress", "param-dtype", "master", "dtype", "activations"
]
"""Flags that may lose bits of a run."""


@dataclass(frozen=True)
class Limits:
    """What a run may take.

    Attributes:
      device_bytes: Of the JAX device; None if it computes in the host's memory.
      years: The least life of the drives, if the run trained without a pause.
      allowed: Flags that may be chosen though they may lose bits.
    """

    memory_bytes: int
    device_bytes: int | None = None
    years: float | None = None
    allowed: frozenset[LossyFlag] = frozenset()


@dataclass(frozen=True)
class Candidate:
    """Settings of a run, and what they take.

    Attributes:
      config: The run, as its command line says it.
      host_bytes: The least memory of the host; without the process.
      device_bytes: The least memory of the JAX device; 0 if that is the host's.
    """

    config: TrainConfig
    found: Forecast
    host_bytes: int
    device_bytes: int = 0

    @property
    def command(self) -> str:
        return shlex.join(["python", "-m", "jaxinf.train", *words_of_run(self.config)])

    def excess(self, limits: Limits) -> dict[str, float]:
        """By how much it is over limits: bytes by argument, and years that it lacks."""
        most_device = math.inf if limits.device_bytes is None else limits.device_bytes
        years = math.inf if self.found.years is None else self.found.years
        over = {
            "--memory": self.host_bytes - limits.memory_bytes,
            "--device-memory": self.device_bytes - most_device,
            "--years": (limits.years or 0) - years,
        }
        return {name: amount for name, amount in over.items() if amount > 0}

    def to_json(self) -> dict[str, JsonValue]:
        """For ``--json``."""
        return {
            "command": self.command,
            "memory_bytes": self.host_bytes,
            "device_memory_bytes": self.device_bytes,
            "forecast": asdict(self.found),
        }


@dataclass(frozen=True)
class Fit:
    """The fastest settings within limits, or what is missing.

    Attributes:
      best: The fastest; None if nothing fits.
      nearest: If nothing fits, the settings that are over by least, if any runs at all.
      changes: If nothing fits, changes with which something does, each alone, and the
        fastest settings then.
      refusal: Why the last settings that cannot be planned at all were refused.
    """

    limits: Limits
    machine: Machine
    best: Candidate | None
    others: Sequence[Candidate] = ()
    nearest: Candidate | None = None
    changes: Mapping[str, Candidate] = field(default_factory=dict)
    refusal: str = ""

    def to_json(self) -> dict[str, JsonValue]:
        """For ``--json``."""
        limits: dict[str, JsonValue] = {
            **asdict(self.limits),
            "allowed": [*sorted(self.limits.allowed)],
        }
        document: dict[str, JsonValue] = {"machine": self.machine.name}
        document |= {"limits": limits, "fits": self.best is not None}
        if self.best is not None:
            document["best"] = self.best.to_json()
            document["others"] = [other.to_json() for other in self.others]
            return document
        if self.nearest is not None:
            document["nearest"] = self.nearest.to_json()
            document["over"] = {**self.nearest.excess(self.limits)}
        document["changes"] = {k: c.to_json() for k, c in self.changes.items()}
        document["refusal"] = self.refusal
        return document

    def print(self, console: Console) -> None:
        """Prints it; the command is a line of its own."""
        lines = [f"limits  {_limits_text(self.limits)}"]
        if self.best is not None:
            lines += [f"fastest {_cost_text(self.best)}", "", self.best.command, ""]
            lines += [
                f"next    {_cost_text(o)}: {difference(o.config, self.best.config)}"
                for o in self.others
            ]
            num_drives = sum(drive.count for drive in self.machine.drives)
            kept = self.best.config.mode != "memory"
            if kept and num_drives > 1 and not self.best.config.csd_root:
                lines.append(f"drives  name all {num_drives} with --csd-root")
            if guesses := self.best.found.guesses:
                lines.append(f"guess   rests on guesses: {', '.join(guesses)}")
        else:
            lines += self._missing_lines()
        lines.append(
            f"predicted for {printable(self.machine.name)}; nothing was trained or "
            "written"
        )
        console.print("\n".join(lines), markup=False, highlight=False)

    def _missing_lines(self) -> list[str]:
        if self.nearest is None:
            return [f"nothing fits: {self.refusal}"]
        over = self.nearest.excess(self.limits)
        lines = [
            f"nothing fits; nearest is {_cost_text(self.nearest)}, over by "
            f"{_over_text(over)}:",
            f"        {' '.join(words_of_run(self.nearest.config))}",
        ]
        for name, candidate in self.changes.items():
            lines.append(f"fits    {name}: {_cost_text(candidate)}")
        return lines


# --- as text -------------------------------------------------------------------------


def _limits_text(limits: Limits) -> str:
    parts = [f"{format_bytes(limits.memory_bytes)} of memory"]
    if limits.device_bytes is not None:
        parts.append(f"{format_bytes(limits.device_bytes)} of the device's")
    if limits.years is not None:
        parts.append(f"drives that last {limits.years:g} years")
    allowed = ", ".join(f"--{flag}" for flag in sorted(limits.allowed))
    parts.append(f"{allowed} may lose bits" if allowed else "no bit lost")
    return "; ".join(parts)


def _cost_text(candidate: Candidate) -> str:
    found = candidate.found
    text = (
        f"{found.step_s:.3g} s a step, {format_bytes(candidate.host_bytes)} of memory"
    )
    if candidate.device_bytes:
        text += f", {format_bytes(candidate.device_bytes)} of the device's"
    if found.years is not None:
        text += f", drives for {life_text(found.years)}"
    if candidate.config.mode == "memory":
        text += ", nothing kept"
    return text


def _over_text(over: Mapping[str, float]) -> str:
    texts = {name: format_bytes(int(amount)) for name, amount in over.items()}
    if "--years" in over:
        texts["--years"] = f"{over['--years']:.2g}"
    return ", ".join(f"{name} {text}" for name, text in texts.items())


def difference(config: TrainConfig, other: TrainConfig) -> str:
    """Returns the flags of a run that are not another's, but for store and memory."""
    alike = replace(config, store=other.store, memory=other.memory)
    return " ".join(words_of_run(alike, other))
