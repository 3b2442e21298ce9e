"""The options of a step.

Invariant: values are checked before they come here.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import jax

from jaxinf import compat
from jaxinf.compress import TopK
from jaxinf.program import Average, NonFinitePolicy
from jaxinf.streaming.plan.calls import Policy
from jaxinf.typing import PyTree


@dataclass(frozen=True)
class Options:
    """The arguments of `jaxinf.stream`."""

    memory_bytes: int
    device_memory_bytes: int | None = None
    has_aux: bool = False
    policy: Policy = "recompute"
    replan: bool = False
    nonfinite: NonFinitePolicy = "error"
    micro_batches: int = 1
    weights: Callable[[PyTree], Any] | None = None
    average: Average | None = None
    compress: TopK | None = None
    extra_args: Mapping[str, Any] = field(default_factory=dict)
    deterministic: bool = True
    device_updates: int | Literal["auto"] = 0
    carry: Callable[[PyTree], PyTree] | None = None

    @property
    def jit(self) -> Any:
        options = compat.deterministic_options(self.deterministic)
        return partial(jax.jit, compiler_options=options)
