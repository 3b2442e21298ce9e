"""What a step and its functions have together.

Invariant: one of them runs at a time, with the memory for reading.
"""

from jaxinf.streaming.bound import Setup
from jaxinf.streaming.move.params import Params
from jaxinf.streaming.move.resident import Resident
from jaxinf.streaming.turns import Turns


class Shared:
    """What a step and its functions have together.

    Attributes:
      turns: The thread that they run on.
    """

    def __init__(self, setup: Setup) -> None:
        self.turns = Turns()
        self._setup = setup
        self._last: Params | None = None
        self._resident: Resident | None = None

    @property
    def resident(self) -> Resident:
        """Params that stay between steps; those of all shapes of batches.

        Raises:
          StreamError: As for `device_limit`.
        """
        if self._resident is None:
            is_host = self._setup.limit.is_host
            self._resident = Resident(self._setup.device, is_host=is_host)
        return self._resident

    def drop(self) -> None:
        """Frees what stays, if anything does; no program may be under way."""
        if self._resident is not None:
            self._resident.drop()

    def give(self, params: Params) -> None:
        """Gives the memory for reading to those that are next to run."""
        if self._last is not None and self._last is not params:
            self._last.rest()
        self._last = params
