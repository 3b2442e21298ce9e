"""Finds a slow CSD by timing the requests of all.

Invariant: it only warns, and never stops a step.
"""

import logging
import statistics
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from jaxinf.transfer.spans import Clock

_LOG = logging.getLogger("jaxinf")

_TIMES_SLOWER = 2.5
_NUM_ROUNDS = 3
_TIMES_LATER = 1.25
"""A drive is named if it is busy for that many times as long as the others are."""

_MIN_SECONDS = 0.1
"""Rounds in which a CSD was busy for less are ignored."""

_MIN_BYTES = 256 << 10
"""Shorter transfers count as this long, since their time hardly depends on length."""

OVERDUE_S = 60.0
"""Duration of a request after which a warning names it."""

_KINDS = {"read": "a read", "write": "a write", "update": "an update"}


class DriveMonitor:
    """Watches the CSDs of a store. Thread-safe.

    Args:
      names: the CSDs' roots, by number, as names for users.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self._guard = threading.Lock()
        self._busy: defaultdict[int, Clock] = defaultdict(Clock)
        self._bytes: Counter[int] = Counter()
        self._rounds_slow: Counter[int] = Counter()
        self._under_way: dict[int, tuple[int, str, float]] = {}  # by thread
        self._told: set[int] = set()

    @contextmanager
    def request(
        self, csd: int, kind: str, lengths: Sequence[int] = ()
    ) -> Iterator[None]:
        """Times a request to a CSD.

        Args:
          kind: ``"read"``, ``"write"`` or ``"update"``.
          lengths: bytes of each transfer; none if its drive is not involved.
        """
        num_bytes = sum([max(length, _MIN_BYTES) for length in lengths])
        thread = threading.get_ident()
        with self._guard:
            self._under_way[thread] = csd, kind, time.perf_counter()
            if num_bytes:
                self._busy[csd].start()
        try:
            yield
        finally:
            with self._guard:
                del self._under_way[thread]
                if num_bytes:
                    self._bytes[csd] += num_bytes
                    self._busy[csd].stop()

    def end_round(self) -> None:
        """Compares the drives since the last round; warns of one always slow."""
        with self._guard:
            seconds = {csd: clock.take_s() for csd, clock in self._busy.items()}
            moved = dict(self._bytes)
            self._bytes.clear()
        costs = {n: seconds[n] / moved[n] for n in moved}
        for csd, cost in costs.items():
            others = [n for n in costs if n != csd] or [csd]
            usual = statistics.median([costs[n] for n in others])
            usual_s = statistics.median([seconds[n] for n in others])
            is_slow = cost > _TIMES_SLOWER * usual and seconds[csd] > _MIN_SECONDS
            is_slow &= seconds[csd] > _TIMES_LATER * usual_s
            self._rounds_slow[csd] = self._rounds_slow[csd] + 1 if is_slow else 0
            if self._rounds_slow[csd] >= _NUM_ROUNDS and csd not in self._told:
                self._told.add(csd)
                _LOG.warning(
                    "CSD root %s: in each of the last %d steps its drive took %.1f "
                    "times as long for a byte as the others do, and they wait for it; "
                    "see to the drive (its temperature, wear, space, what else uses "
                    "it), or do without it: 'jaxinf store copy' with --csd-root for "
                    "each of the others",
                    self._names[csd],
                    _NUM_ROUNDS,
                    cost / usual,
                )

    def report_overdue(self) -> None:
        """Names every CSD that has not answered a request for a minute."""
        now_s = time.perf_counter()
        with self._guard:
            under_way = list(self._under_way.values())
        for csd, kind, began_s in under_way:
            if now_s - began_s >= OVERDUE_S:
                _LOG.warning(
                    "CSD root %s: %s has not come back for %.0f s; still waiting. "
                    "See the kernel's log (dmesg) for the drive; the last committed "
                    "step is safe if the process has to be killed",
                    self._names[csd],
                    _KINDS[kind],
                    now_s - began_s,
                )
