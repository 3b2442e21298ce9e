"""Bandwidths of a system that is not there: drives, their cards and a shared host link.

Invariant: rates only delay; what is moved and computed is the same without them.
"""

import re
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, fields, replace

__all__ = ["Channel", "CsdRates", "DriveChannels", "moving", "parse_rates"]

_UNITS = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "Ki": 2.0**10, "Mi": 2.0**20}
_UNITS["Gi"] = 2.0**30
_RATE = re.compile(r"(\d+(?:\.\d+)?)\s*(k|M|G|Ki|Mi|Gi|)B/s")


class Channel:
    """Something that moves bytes at a rate, one request after another. Thread-safe.

    Args:
      bytes_per_s: its rate; None for one that never holds anybody up.
    """

    def __init__(self, bytes_per_s: float | None) -> None:
        self.bytes_per_s = bytes_per_s
        self._lock = threading.Lock()
        self._free_at_s = 0.0

    def reserve(self, num_bytes: int) -> float:
        """When these bytes will be through, by `time.monotonic`."""
        now_s = time.monotonic()
        if self.bytes_per_s is None:
            return now_s
        with self._lock:
            begin_s = max(now_s, self._free_at_s)
            self._free_at_s = begin_s + num_bytes / self.bytes_per_s
            return self._free_at_s


def moving(num_bytes: int, *channels: Channel) -> AbstractContextManager[None]:
    """Moves bytes in the body; returns no sooner than the channels, side by side."""
    limiting = [channel for channel in channels if channel.bytes_per_s is not None]
    return _held_up(num_bytes, limiting) if limiting else _FREE


@contextmanager
def _held_up(num_bytes: int, channels: Sequence[Channel]) -> Iterator[None]:
    ends_s = [channel.reserve(num_bytes) for channel in channels]
    yield
    delay_s = max(ends_s, default=0.0) - time.monotonic()
    if delay_s > 0:
        time.sleep(delay_s)


_FREE = nullcontext()


@dataclass(frozen=True)
class CsdRates:
    """Bytes a second; None where nothing is held up.

    Attributes:
      drive_read, drive_write: of each drive.
      internal: between a drive and the card beside it, each way together.
      kernel: of each card's kernel: state read and written, gradients and results.
      link: of the host link, which all CSDs share.
    """

    drive_read: float | None = None
    drive_write: float | None = None
    internal: float | None = None
    kernel: float | None = None
    link: float | None = None

    @property
    def is_set(self) -> bool:
        """Whether anything is held up."""
        return any(getattr(self, f.name) is not None for f in fields(self))


@dataclass(frozen=True)
class DriveChannels:
    """What the transfers of one CSD go through; `link` is shared by all of a store."""

    read: Channel = field(default_factory=lambda: Channel(None))
    write: Channel = field(default_factory=lambda: Channel(None))
    internal: Channel = field(default_factory=lambda: Channel(None))
    kernel: Channel = field(default_factory=lambda: Channel(None))
    link: Channel = field(default_factory=lambda: Channel(None))

    @classmethod
    def of(cls, rates: CsdRates, link: Channel) -> "DriveChannels":
        """The channels of one more CSD behind a link."""
        return cls(
            Channel(rates.drive_read),
            Channel(rates.drive_write),
            Channel(rates.internal),
            Channel(rates.kernel),
            link,
        )


def parse_rates(options: Mapping[str, str]) -> CsdRates:
    """Rates as users write them: ``drive=1.5GB/s``, ``link=800MB/s``, ….

    `drive` sets both ways.

    Raises:
      ValueError: there is no such rate, or it is no number of bytes a second above 0.
    """
    rates = CsdRates()
    names = {f.name for f in fields(rates)}
    for name, text in options.items():
        chosen = ("drive_read", "drive_write") if name == "drive" else (name,)
        if not names.issuperset(chosen):
            raise ValueError(
                f"{name}={text}: expected one of drive, {', '.join(sorted(names))}"
            )
        match = _RATE.fullmatch(text.strip())
        value = float(match[1]) * _UNITS[match[2]] if match else 0.0
        if not value:
            raise ValueError(
                f"{name}={text}: expected bytes a second above 0, for example 1.5GB/s"
            )
        rates = replace(rates, **dict.fromkeys(chosen, value))
    return rates
