"""What steps and functions are asked for: their memory, and how a step is run.

Invariant: values are checked before they come here.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from jaxinf.compress import TopK
from jaxinf.program import Average, NonFinitePolicy
from jaxinf.streaming.plan.calls import Policy
from jaxinf.streaming.plan.forms import Form
from jaxinf.streaming.plan.resident import Resident

__all__ = ["Limits", "Options"]


@dataclass(frozen=True)
class Limits:
    """The memory of a step or of a function.

    Attributes:
      memory_bytes, device_memory_bytes: As for `jaxinf.stream`.
      resident: Params that stay in memory.
      deterministic: Whether programs have the same bits in each run.
    """

    memory_bytes: int
    device_memory_bytes: int | None = None
    resident: Resident = None
    deterministic: bool = True

    def of_function(self) -> "Limits":
        """Returns those of a function in a step's memory; what stays is the step's."""
        given = self.memory_bytes, self.device_memory_bytes
        return Limits(*given, deterministic=self.deterministic)

    @property
    def budgets(self) -> Mapping[str, int]:
        """The budgets that are given, by argument."""
        budgets = {"memory_bytes": self.memory_bytes}
        if self.device_memory_bytes is not None:
            budgets["device_memory_bytes"] = self.device_memory_bytes
        return budgets


@dataclass(frozen=True)
class Options(Limits):
    """Options of a step; all are those of `jaxinf.stream`."""

    has_aux: bool = False
    policy: Policy = "recompute"
    replan: bool = False
    nonfinite: NonFinitePolicy | None = None
    micro_batches: int = 1
    average: Average | None = None
    compress: TopK | None = None
    extra_args: Mapping[str, Any] = field(default_factory=dict)
    activations: Form | None = None
    endurance_tbw: float | None = None
