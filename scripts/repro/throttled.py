"""Slows any kind of CSD down to given bandwidths, to emulate another system.

    store = jaxinf.open_store(path, csd=throttled("emulated", CsdRates(link=3e9)))

Invariant: a throttled CSD only adds delays. Data, results and errors are those of the
wrapped CSD.
"""

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from jaxinf.compress import SparseGradient
from jaxinf.csd import (
    Csd,
    CsdBuffer,
    CsdFleet,
    CsdSpec,
    Extent,
    Transfer,
    Update,
    UpdateOutcome,
    is_idle,
    parse_csd,
)
from jaxinf.typing import Array


@dataclass(frozen=True)
class CsdRates:
    """Limits in bytes per second, each described in docs/cards.md; None for none."""

    drive_read: float | None = None
    drive_write: float | None = None
    kernel: float | None = None
    decompress: float | None = None
    allocate: float | None = None
    link: float | None = None
    has_stored_gradients: bool = False
    is_joined: bool = False


def throttled(csd: str, rates: CsdRates) -> CsdSpec:
    """Returns a value of `csd=`: CSDs of a kind that are slowed down.

    Args:
      csd: the kind, with its options; see `jaxinf.csd.parse_csd`.
      rates: limits of every CSD; all share one link.
    """
    return replace(parse_csd(csd), wrap=partial(ThrottledFleet, rates=rates))


class Server:
    """A resource that serves one request at a time: a drive, a link. Thread-safe.

    Attributes:
      free_at_s: the time (`time.monotonic`) at which all requests so far will be done.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.free_at_s = 0.0

    def reserve(self, num_bytes: float, bytes_per_s: float | None) -> float:
        """Returns the time (`time.monotonic`) at which a request will be done.

        Args:
          num_bytes: bytes that it moves.
          bytes_per_s: its rate; None for at once, without waiting for others.
        """
        now_s = time.monotonic()
        if bytes_per_s is None:
            return now_s
        with self._lock:
            begin_s = max(now_s, self.free_at_s)
            self.free_at_s = begin_s + num_bytes / bytes_per_s
            return self.free_at_s


Passage = tuple[Server, float, float | None]
"""A server, and the bytes that pass it at a rate; None for no limit."""


@contextmanager
def held_up(*passages: Passage) -> Iterator[None]:
    """Starts all passages, runs the body, and waits for the slowest passage."""
    ends_s = [server.reserve(num, rate) for server, num, rate in passages]
    yield
    delay_s = max(ends_s) - time.monotonic()
    if delay_s > 0:
        time.sleep(delay_s)


def wait(*passages: Passage) -> None:
    """Waits until all passages are done."""
    with held_up(*passages):
        pass


class ThrottledFleet:
    """See `jaxinf.csd.CsdFleet`: a fleet whose CSDs are throttled behind one link."""

    def __init__(self, fleet: CsdFleet, rates: CsdRates) -> None:
        self._fleet = fleet
        self._rates = rates

    def __getattr__(self, name: str) -> Any:
        return getattr(self._fleet, name)

    def attach(
        self, directories: Sequence[Path], buffer_bytes: int, num_elements: int
    ) -> "Sequence[ThrottledCsd]":
        """Returns the fleet's CSDs, throttled."""
        csds = self._fleet.attach(directories, buffer_bytes, num_elements)
        link = Server()
        return [ThrottledCsd(csd, self._rates, link, len(csds)) for csd in csds]


class ThrottledCsd:
    """See `jaxinf.csd.Csd`. Thread-safe.

    A drive is one server, so its reads and writes wait for each other. On a host all
    state crosses the link. With cards state passes between drive and card, and only
    gradients and results cross the link.

    Args:
      csd: the CSD that does the work.
      rates: its limits.
      link: the host's link, which the CSDs of a store share.
      num_csds: number of the store's CSDs. The host allocates buffers for all of them
        in turn before any of them reads.
    """

    def __init__(self, csd: Csd, rates: CsdRates, link: Server, num_csds: int) -> None:
        self._csd = csd
        self._rates = rates
        self._link, self._host, self._num_csds = link, Server(), num_csds
        self._drive, self._kernel = Server(), Server()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._csd, name)

    def read(self, transfers: Sequence[Transfer]) -> None:
        """Drive → buffers; limited by allocation, then by the drive and the path."""
        num_bytes = sum(transfer.extent.num_bytes for transfer in transfers)
        wait((self._host, self._num_csds * num_bytes, self._rates.allocate))
        with self._moving(num_bytes, self._rates.drive_read):
            self._csd.read(transfers)

    def write(self, transfers: Sequence[Transfer]) -> None:
        """Buffers → drive; limited by the drive and the path.

        With `CsdRates.is_joined` the write starts when the link is free.
        """
        if self._rates.is_joined:
            # Results of other CSDs may reach the link during the sleep.
            while (delay_s := self._link.free_at_s - time.monotonic()) > 0:
                time.sleep(delay_s)
        num_bytes = sum(transfer.extent.num_bytes for transfer in transfers)
        with self._moving(num_bytes, self._rates.drive_write):
            self._csd.write(transfers)

    def _moving(self, num_bytes: int, rate: float | None) -> Any:
        ways: list[Passage] = [(self._drive, num_bytes, rate)]
        if self._csd.is_host:
            ways.append(self._crossing(num_bytes))
        return held_up(*ways)

    def _crossing(self, num_bytes: int) -> Passage:
        return self._link, num_bytes, self._rates.link

    def update(self, buffer: CsdBuffer, update: Update) -> UpdateOutcome:
        """Runs the kernel; on a card, between the transfers of gradient and result.

        Only a card's kernel is slowed down; the host's has its own speed.
        """
        if self._csd.is_host or is_idle(update.kernel):
            return self._csd.update(buffer, update)
        gradient, dense_bytes = update.gradient, update.gradient.nbytes
        if self._rates.has_stored_gradients:
            wait((self._drive, gradient.nbytes, self._rates.drive_read))
        else:
            wait(self._crossing(gradient.nbytes))
        if isinstance(gradient, SparseGradient):
            dense_bytes = gradient.num_elements * gradient.values.itemsize
            wait((self._kernel, dense_bytes, self._rates.decompress))
        num_bytes = dense_bytes + sum(extent.num_bytes for extent in update.extents)
        with held_up((self._kernel, num_bytes, self._rates.kernel)):
            outcome = self._csd.update(buffer, update)
        wait(self._crossing(0 if update.out is None else update.out.nbytes))
        return outcome

    def put(self, buffer: CsdBuffer, extent: Extent, values: Array) -> None:
        """Copies values to the buffer; for a card, they cross the link."""
        self._csd.put(buffer, extent, values)
        if not self._csd.is_host:
            wait(self._crossing(extent.num_bytes))
