"""What a step or a function is asked for: its memory, and how it is run.

Invariant: values are checked before they come here.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import jax
from jax.sharding import Mesh

from jaxinf import compat
from jaxinf.compress import TopK
from jaxinf.program import Average, NonFinitePolicy
from jaxinf.streaming.plan.calls import Policy, may_leave
from jaxinf.streaming.plan.compiled import Executables
from jaxinf.streaming.plan.device import device_limit, mesh_limit
from jaxinf.streaming.plan.group_step import GroupStep
from jaxinf.streaming.plan.memory import DeviceLimit
from jaxinf.streaming.program.meshes import default_device
from jaxinf.typing import PyTree


@dataclass(frozen=True)
class StepOptions:
    """The arguments of `jaxinf.stream`, and where it runs.

    Attributes:
      together: The processes of the run.
      executables: Programs compiled before, for batches of all shapes.
      other_limit: The limit of another device than JAX's, to plan for.
    """

    memory_bytes: int
    device_memory_bytes: int | None = None
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
    device_updates: int | None = None
    carry: Callable[[PyTree], PyTree] | None = None
    together: GroupStep = field(default_factory=GroupStep)
    executables: Executables = field(default_factory=dict)
    other_limit: DeviceLimit | None = None

    @cached_property
    def device(self) -> Any:
        """The JAX device that programs run on; on a mesh, one like all of them."""
        return default_device()

    @cached_property
    def limit(self) -> DeviceLimit:
        """The limit of the JAX device's memory."""
        own = self.device_memory_bytes
        return self.other_limit or device_limit(self.device, own)

    @property
    def jit(self) -> Any:
        """`jax.jit` with the options of compilation."""
        own = compat.deterministic_options(self.deterministic)
        return partial(jax.jit, compiler_options=own)

    def limit_within(
        self, budgets: Mapping[str, int], mesh: Mesh | None = None
    ) -> DeviceLimit:
        limit = self.limit
        if mesh is not None and self.other_limit is None:
            limit = mesh_limit(mesh.local_devices, self.device_memory_bytes)
        num_bytes = budgets.get("device_memory_bytes", limit.num_bytes)
        return replace(limit, num_bytes=num_bytes)

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
