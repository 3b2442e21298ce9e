"""What a step and its functions have together.

Invariant: one of them runs at a time, with the memory for reading.
"""

from jaxinf.streaming.move.params import Params
from jaxinf.streaming.turns import Turns


class Shared:
    """What a step and its functions have together.

    Attributes:
      turns: The thread that they run on.
    """

    def __init__(self) -> None:
        self.turns = Turns()
        self._last: Params | None = None

    def give(self, params: Params) -> None:
        """Gives the memory for reading to those that are next to run."""
        if self._last is not None and self._last is not params:
            self._last.rest()
        self._last = params
