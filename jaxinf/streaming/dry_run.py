"""What a streamed step takes, before there is one.

Invariant: nothing is written, and params are never made.
"""

from collections.abc import Callable

import jax

from jaxinf.errors import BudgetError
from jaxinf.streaming.move.workers import writing_bytes
from jaxinf.streaming.plan.calls import Policy
from jaxinf.streaming.plan.memory import NUM_STAGED, DeviceLimit, divide
from jaxinf.streaming.plan.plan import Prepared, prepare
from jaxinf.streaming.update.micro_batches import first_part
from jaxinf.typing import PyTree

__all__ = ["LeastMemory"]

_MIB = 1 << 20
# Compiled programs take more than is estimated before: at most 1.5 times for streamed
# ones, and 2.4 times where one program does all, of GPT-2 nano in two sizes of batch.
_STREAMED, _WHOLE = 1.5, 2.5
_MOST_BYTES = 1 << 62


class LeastMemory:
    """The least memory of steps by estimates: nothing is compiled.

    Args:
      loss_fn: As for `jaxinf.stream`, without aux.
      params: Tree of arrays, or of shapes and dtypes.
      batch: As the loss function takes it.
      micro_batches: Number of parts of the batch.

    Raises:
      StreamError: The loss function cannot be streamed.
    """

    def __init__(
        self,
        loss_fn: Callable[..., jax.Array],
        params: PyTree,
        batch: PyTree,
        micro_batches: int = 1,
    ) -> None:
        self._ready = prepare(loss_fn, params, first_part(batch, micro_batches))
        self._smallest: dict[Policy, int] = {}

    @property
    def whole_bytes(self) -> int:
        """Params, values and temporaries if the program runs as a whole."""
        ready: Prepared = self._ready
        cuts = 0, len(ready.lifetimes.forward)
        return int(_WHOLE * ready.plan_of(cuts, "keep").peak_bytes)

    def of(
        self,
        policy: Policy,
        resident_bytes: int = 0,
        *,
        has_device: bool = False,
        num_drives: int = 1,
    ) -> tuple[int, int]:
        """Returns the least memory of the host, and of a device with its own, or 0.

        Args:
          policy: As for `jaxinf.stream`.
          resident_bytes: Params that stay.
          has_device: Whether the JAX device has memory of its own.
          num_drives: Drives that values may wait on.
        """
        if policy not in self._smallest:
            smallest = self._ready.smallest_bytes(policy)
            self._smallest[policy] = int(_STREAMED * smallest)
        programs = self._smallest[policy] + resident_bytes
        sizes = self._ready.lifetimes.sizes
        gradient = max(
            (sizes[piece] for piece in self._ready.gradient_pieces), default=0
        )
        limit = DeviceLimit(_MOST_BYTES, is_host=False) if has_device else DeviceLimit()
        beside = writing_bytes(num_drives) if policy in ("offload", "plan") else 0
        needed = NUM_STAGED * gradient if has_device else programs

        def suffices(memory_bytes: int) -> bool:
            try:
                division = divide(memory_bytes, 0, gradient, limit)
            except BudgetError:
                return False
            host_bytes = division.staged if has_device else division.programs
            return host_bytes >= needed + beside

        least, most = 0, 1
        while not suffices(most * _MIB):
            least, most = most, 2 * most
        while most - least > 1:
            middle = (least + most) // 2
            least, most = (least, middle) if suffices(middle * _MIB) else (middle, most)
        return most * _MIB, programs + gradient if has_device else 0
