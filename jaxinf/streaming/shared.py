"""What a step and its functions have together.

Invariant: one of them runs at a time, with the memory for reading.
"""

from functools import cached_property

from jaxinf.streaming.bound import Setup
from jaxinf.streaming.move.params import Params
from jaxinf.streaming.move.resident import Resident
from jaxinf.streaming.turns import Turns

__all__ = ["Shared"]


class Shared:
    """What a step and its functions have together.

    Args:
      setup: The step's.

    Attributes:
      turns: The thread that they run on.
      resident: Params that stay between steps; those of all shapes of batches.
    """

    def __init__(self, setup: Setup) -> None:
        self.turns = Turns()
        self._setup = setup
        self._last: Params | None = None

    @cached_property
    def resident(self) -> Resident:
        """Params that stay between steps; those of all shapes of batches."""
        return Resident(self._setup.device, is_host=self._setup.limit.is_host)

    def give(self, params: Params) -> None:
        """Gives the memory for reading to those that are next to run."""
        if self._last is not None and self._last is not params:
            self._last.rest()
        self._last = params
