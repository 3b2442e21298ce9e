"""What a step or a function is asked for: its memory, and how it is run.

Invariant: values are checked before they come here.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from jaxinf.compress import TopK
from jaxinf.program import Average, NonFinitePolicy
from jaxinf.streaming.plan.calls import Policy, may_leave
from jaxinf.streaming.plan.resident import Resident
from jaxinf.streaming.update.assigning import DeviceUpdates
from jaxinf.typing import PyTree


@dataclass(frozen=True)
class Options:
    """Options of a step or of a function; all are those of `jaxinf.stream`."""

    memory_bytes: int
    device_memory_bytes: int | None = None
    resident: Resident = None
    has_aux: bool = False
    policy: Policy = "recompute"
    replan: bool = False
    nonfinite: NonFinitePolicy | None = None
    micro_batches: int = 1
    weights: Callable[[PyTree], Any] | None = None
    average: Average | None = None
    compress: TopK | None = None
    extra_args: Mapping[str, Any] = field(default_factory=dict)
    deterministic: bool = True
    device_updates: DeviceUpdates = None

    def of_function(self) -> "Options":
        """Returns those of a function in a step's memory; what stays is the step's."""
        return Options(
            self.memory_bytes,
            self.device_memory_bytes,
            has_aux=True,
            policy="keep",
            deterministic=self.deterministic,
        )

    @property
    def may_leave(self) -> bool:
        """Whether values may be on a drive for a part of a step."""
        return may_leave(self.policy, self.micro_batches)

    @property
    def budgets(self) -> Mapping[str, int]:
        budgets = {"memory_bytes": self.memory_bytes}
        if self.device_memory_bytes is not None:
            budgets["device_memory_bytes"] = self.device_memory_bytes
        return budgets
