"""What a step is asked for, the memory that it is given, and a budget that works.

Invariant: values are checked before they come here. A refused budget is refused with
one that works.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, TypeVar

import jax

from jaxinf import compat
from jaxinf.compress import TopK
from jaxinf.errors import BudgetError
from jaxinf.program import Average, NonFinitePolicy
from jaxinf.streaming.plan.calls import Policy, may_leave
from jaxinf.streaming.plan.memory import DeviceLimit
from jaxinf.terminal import exact_bytes
from jaxinf.typing import PyTree

_Plan = TypeVar("_Plan")

# Of what is added to a budget, so much at least goes where bytes are missing: buffers
# take at most three eighths. The last of three tries is generous.
_SHARES = 5 / 8, 5 / 8, 1 / 8


@dataclass(frozen=True)
class Options:
    """The arguments of `jaxinf.stream`."""

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
    device_updates: int | Literal["auto"] = 0
    carry: Callable[[PyTree], PyTree] | None = None

    @property
    def jit(self) -> Any:
        """`jax.jit` with the options of compilation."""
        own = compat.deterministic_options(self.deterministic)
        return partial(jax.jit, compiler_options=own)

    @property
    def may_leave(self) -> bool:
        """Whether values may be on a drive for a part of a step."""
        return may_leave(self.policy, self.micro_batches)


@dataclass(frozen=True)
class Budget:
    """The memory of a step: its options', and the limit of the JAX device."""

    memory_bytes: int
    device_memory_bytes: int | None = None
    device: DeviceLimit = field(default_factory=DeviceLimit)

    @property
    def limit(self) -> DeviceLimit:
        if self.device_memory_bytes is None:
            return self.device
        return replace(self.device, num_bytes=self.device_memory_bytes)


def within(budget: Budget, plan: Callable[[Budget], _Plan], *, advises: bool) -> _Plan:
    """Returns what `plan` makes of a budget.

    Args:
      advises: Whether an error names a budget that works, for which it plans again:
        not where several processes plan, which do so once.

    Raises:
      BudgetError: The budget is too small.
    """
    try:
        return plan(budget)
    except BudgetError as error:
        if not advises:
            raise
        raise _advised(error, budget, plan) from None


def _advised(
    error: BudgetError, budget: Budget, plan: Callable[[Budget], object]
) -> BudgetError:
    """Returns the refusal with budgets that work; blocks while it plans."""
    tried, last = budget, error
    for share in _SHARES:
        held_bytes = getattr(tried, last.limit)
        if held_bytes is None:
            break
        more = max(1, int(last.missing_bytes / share))
        tried = replace(tried, **{last.limit: _rounded(held_bytes + more)})
        try:
            plan(tried)
        except BudgetError as other:
            last = other
            continue
        names = "memory_bytes", "device_memory_bytes"
        found = {name: getattr(tried, name) for name in names}
        raised = {k: n for k, n in found.items() if n != getattr(budget, k)}
        return error._advising({name: exact_bytes(n) for name, n in raised.items()})
    return error


def _rounded(num_bytes: int) -> int:
    """Returns whole MiB that are easily read: at most 1/32 more."""
    unit = max(1 << 20, 1 << max(0, num_bytes.bit_length() - 6))
    return -(-num_bytes // unit) * unit
