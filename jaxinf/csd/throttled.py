"""Slows any kind of CSD down to given bandwidths, to emulate another system.

Invariant: a throttled CSD only adds delays. Data, results and errors are those of the
wrapped CSD.
"""

import threading
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, NamedTuple

from jaxinf.compress import SparseGradient
from jaxinf.csd.base import (
    Csd,
    CsdBuffer,
    CsdFleet,
    CsdInfo,
    Extent,
    KernelNeed,
    Rounding,
    ScalarInputs,
    Transfer,
    UpdateOutcome,
    is_idle,
)
from jaxinf.csd.rates import CsdRates
from jaxinf.program import InitKernel, Kernel
from jaxinf.typing import Array

__all__ = ["DriveLimit", "Server", "ThrottledCsd", "ThrottledFleet", "drive_limits"]


class Server:
    """A resource that serves one request at a time: a drive, a link. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free_at_s = 0.0

    def reserve(self, num_bytes: int, bytes_per_s: float | None) -> float:
        """Returns the time (`time.monotonic`) at which a request will be done.

        Args:
          num_bytes: bytes that it moves.
          bytes_per_s: its rate; None for at once, without waiting for others.
        """
        now_s = time.monotonic()
        if bytes_per_s is None:
            return now_s
        with self._lock:
            begin_s = max(now_s, self._free_at_s)
            self._free_at_s = begin_s + num_bytes / bytes_per_s
            return self._free_at_s

    @property
    def free_at_s(self) -> float:
        """The time at which all requests so far will be done."""
        with self._lock:
            return self._free_at_s


class _Passage(NamedTuple):
    """Bytes that pass a server at a rate; None for no limit."""

    server: Server
    num_bytes: int
    bytes_per_s: float | None


@contextmanager
def _held_up(*passages: _Passage) -> Iterator[None]:
    """Starts all passages, runs the body, and waits for the slowest passage."""
    ends_s = [server.reserve(num, rate) for server, num, rate in passages]
    yield
    delay_s = max(ends_s) - time.monotonic()
    if delay_s > 0:
        time.sleep(delay_s)


class DriveLimit:
    """The limits of a drive for all that the host moves there. Thread-safe.

    Args:
      read, write: bytes a second; None for no limit.
      drive: the drive, which its CSD may use, too.
      link: the way of these bytes to the host, and its bytes a second.
    """

    def __init__(
        self,
        read: float | None = None,
        write: float | None = None,
        *,
        drive: Server | None = None,
        link: tuple[Server, float | None] | None = None,
    ) -> None:
        self._rates = {"read": read, "write": write}
        self._drive = drive or Server()
        self._link = link or (self._drive, None)

    @contextmanager
    def moving(self, kind: Literal["read", "write"], num_bytes: int) -> Iterator[None]:
        """Makes the body, which moves bytes, last for as long as the limits say."""
        link, rate = self._link
        drive = _Passage(self._drive, num_bytes, self._rates[kind])
        with _held_up(drive, _Passage(link, num_bytes, rate)):
            yield


def drive_limits(csds: Sequence[Csd]) -> Sequence[DriveLimit]:
    """Returns the limits of drives for what moves there beside the CSDs' state."""
    return [
        csd.drive_limit if isinstance(csd, ThrottledCsd) else DriveLimit()
        for csd in csds
    ]


class ThrottledFleet:
    """See `jaxinf.csd.CsdFleet`: a fleet with throttled CSDs.

    Args:
      fleet: a fleet of any kind.
      rates: limits of each CSD and of the shared link.
    """

    def __init__(self, fleet: CsdFleet, rates: CsdRates) -> None:
        self._fleet = fleet
        self._rates = rates

    @property
    def peak_bytes(self) -> int:
        """See `CsdFleet.peak_bytes`."""
        return self._fleet.peak_bytes

    @property
    def used_bytes(self) -> int:
        """See `CsdFleet.used_bytes`."""
        return self._fleet.used_bytes

    def limit_memory(self, num_bytes: int) -> None:
        """See `CsdFleet.limit_memory`."""
        self._fleet.limit_memory(num_bytes)

    @property
    def num_kernels(self) -> int:
        """See `CsdFleet.num_kernels`."""
        return self._fleet.num_kernels

    def check(self, needs: Sequence[KernelNeed]) -> None:
        """See `CsdFleet.check`."""
        self._fleet.check(needs)

    def check_buffer(self, num_bytes: int, num_elements: int) -> None:
        """See `CsdFleet.check_buffer`."""
        self._fleet.check_buffer(num_bytes, num_elements)

    def attach(
        self, directories: Sequence[Path], buffer_bytes: int, num_elements: int
    ) -> "Sequence[ThrottledCsd]":
        """Returns the fleet's CSDs, throttled, behind one link."""
        csds = self._fleet.attach(directories, buffer_bytes, num_elements)
        link, num_csds = Server(), len(csds)
        rates = [self._rates.of_csd(number) for number in range(num_csds)]
        return [
            ThrottledCsd(csd, own, link, num_csds)
            for csd, own in zip(csds, rates, strict=True)
        ]

    def close(self) -> None:
        """Closes the fleet."""
        self._fleet.close()


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

    Attributes:
      drive_limit: the limits of its drive for what moves there beside state.
    """

    def __init__(self, csd: Csd, rates: CsdRates, link: Server, num_csds: int) -> None:
        self._csd = csd
        self._rates = rates
        self._link, self._host, self._num_csds = link, Server(), num_csds
        self._drive, self._internal, self._kernel = Server(), Server(), Server()
        self.drive_limit = DriveLimit(
            rates.drive_read,
            rates.drive_write,
            drive=self._drive,
            link=(link, rates.link),
        )

    @property
    def memory(self) -> object:
        """See `Csd.memory`."""
        return self._csd.memory

    @property
    def is_host(self) -> bool:
        """See `Csd.is_host`."""
        return self._csd.is_host

    def info(self) -> CsdInfo:
        """See `Csd.info`."""
        return self._csd.info()

    def acquire(self, num_bytes: int) -> CsdBuffer | None:
        """See `Csd.acquire`."""
        return self._csd.acquire(num_bytes)

    def read(self, transfers: Sequence[Transfer]) -> None:
        """Drive → buffers; limited by allocation, then by the drive and the path."""
        num_bytes = sum(transfer.extent.num_bytes for transfer in transfers)
        everywhere = num_bytes * self._num_csds
        with _held_up(_Passage(self._host, everywhere, self._rates.allocate)):
            pass
        with self._moving(transfers, self._rates.drive_read):
            self._csd.read(transfers)

    def write(self, transfers: Sequence[Transfer]) -> None:
        """Buffers → drive; limited by the drive and the path.

        With `CsdRates.is_joined` the write starts when the link is free.
        """
        if self._rates.is_joined:
            # Results of other CSDs may reach the link during the sleep.
            while (delay_s := self._link.free_at_s - time.monotonic()) > 0:
                time.sleep(delay_s)
        with self._moving(transfers, self._rates.drive_write):
            self._csd.write(transfers)

    @contextmanager
    def _moving(
        self, transfers: Sequence[Transfer], drive_rate: float | None
    ) -> Iterator[None]:
        num_bytes = sum(transfer.extent.num_bytes for transfer in transfers)
        way = _Passage(self._internal, num_bytes, self._rates.internal)
        if self.is_host:
            way = self._crossing(num_bytes)
        with _held_up(_Passage(self._drive, num_bytes, drive_rate), way):
            yield

    def _crossing(self, num_bytes: int) -> _Passage:
        return _Passage(self._link, num_bytes, self._rates.link)

    def checksum(self, buffer: CsdBuffer, extent: Extent) -> int | None:
        """See `Csd.checksum`."""
        return self._csd.checksum(buffer, extent)

    def update(
        self,
        buffer: CsdBuffer,
        extents: Sequence[Extent],
        kernel: Kernel,
        gradient: Array | SparseGradient,
        inputs: ScalarInputs,
        out: Array,
        rounding: Rounding,
        *,
        given: Array | None = None,
        wants_params: bool = False,
        tells: Collection[int] = (),
    ) -> UpdateOutcome:
        """Runs the kernel; on a card, between the transfers of gradient and result.

        Only a card's kernel is slowed down; the host's has its own speed.
        """
        is_moving = not (self.is_host or is_idle(kernel))
        if is_moving:
            self._wait_for_gradient(gradient)
        state_bytes = sum(extent.num_bytes for extent in extents)
        kernel_bytes = state_bytes + _dense_bytes(gradient)
        rate = self._rates.kernel if is_moving else None
        with _held_up(_Passage(self._kernel, kernel_bytes, rate)):
            outcome = self._csd.update(
                buffer,
                extents,
                kernel,
                gradient,
                inputs,
                out,
                rounding,
                given=given,
                wants_params=wants_params,
                tells=tells,
            )
        if is_moving:
            self._wait_for_link(out.nbytes)
        return outcome

    def _wait_for_gradient(self, gradient: Array | SparseGradient) -> None:
        if self._rates.has_stored_gradients:
            passage = _Passage(self._drive, gradient.nbytes, self._rates.drive_read)
        else:
            passage = self._crossing(gradient.nbytes)
        with _held_up(passage):
            pass
        if isinstance(gradient, SparseGradient):
            num_bytes = _dense_bytes(gradient)
            with _held_up(_Passage(self._kernel, num_bytes, self._rates.decompress)):
                pass

    def _wait_for_link(self, num_bytes: int) -> None:
        with _held_up(self._crossing(num_bytes)):
            pass

    def initialise(
        self,
        buffer: CsdBuffer,
        extents: Sequence[Extent],
        kernel: InitKernel,
        params: Array,
        inputs: ScalarInputs,
        rounding: Rounding,
    ) -> None:
        """Fills the buffer; for a card, the host's result crosses the link."""
        self._csd.initialise(buffer, extents, kernel, params, inputs, rounding)
        if not self.is_host:
            self._wait_for_link(sum(extent.num_bytes for extent in extents))

    def view(self, buffer: CsdBuffer, extent: Extent) -> Array:
        """See `Csd.view`."""
        return self._csd.view(buffer, extent)

    def put(
        self,
        buffer: CsdBuffer,
        extent: Extent,
        values: Array,
        *,
        checksum: int | None = None,
    ) -> None:
        """Copies values to the buffer; for a card, they cross the link."""
        self._csd.put(buffer, extent, values, checksum=checksum)
        if not self.is_host:
            self._wait_for_link(extent.num_bytes)


def _dense_bytes(gradient: Array | SparseGradient) -> int:
    if isinstance(gradient, SparseGradient):
        return gradient.num_elements * gradient.values.itemsize
    return gradient.nbytes
