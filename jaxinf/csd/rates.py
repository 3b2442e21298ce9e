"""Bandwidth limits of drives, cards and a shared host link, as users write them.

Invariant: a rate is a number of bytes a second above 0, or none.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

__all__ = ["CsdRates", "parse_rates"]

_UNITS = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "Ki": 2.0**10, "Mi": 2.0**20}
_UNITS["Gi"] = 2.0**30
_RATE = re.compile(r"(\d+(?:\.\d+)?)\s*(k|M|G|Ki|Mi|Gi|)B/s")

_FLAGS = {"gradients=drive": "has_stored_gradients", "writes=joined": "is_joined"}


@dataclass(frozen=True)
class CsdRates:
    """Limits in bytes per second; None for no limit.

    Attributes:
      drive_read, drive_write: limits of each drive, which serves one request at a time.
      internal: limit between a drive and its card, for both directions together.
      kernel: limit of each card's kernel, by its input of state and dense gradient.
      decompress: limit of each card's decompressor, by its output of dense gradient.
      allocate: limit of the host's allocation of buffers, for all CSDs in turn.
      link: limit of the host link, which all CSDs share.
      drives: limit of each drive in both directions, by its number, in place of
        `drive_read` and `drive_write`; empty for none.
      has_stored_gradients: whether an update reads its gradient from the drive first.
      is_joined: whether no CSD writes while results of another cross the link.
    """

    drive_read: float | None = None
    drive_write: float | None = None
    internal: float | None = None
    kernel: float | None = None
    decompress: float | None = None
    allocate: float | None = None
    link: float | None = None
    drives: tuple[float, ...] = ()
    has_stored_gradients: bool = False
    is_joined: bool = False

    @property
    def is_set(self) -> bool:
        """Whether there is any limit."""
        return self != CsdRates()

    @property
    def of_drives(self) -> "CsdRates":
        """The limits of the drives alone."""
        return CsdRates(self.drive_read, self.drive_write, drives=self.drives)

    def of_csd(self, number: int) -> "CsdRates":
        """Returns the limits of one CSD."""
        if not self.drives:
            return self
        rate = self.drives[number]
        return replace(self, drive_read=rate, drive_write=rate, drives=())


def parse_rates(options: Mapping[str, str]) -> CsdRates:
    """Parses rates as users write them: ``drive=1.5GB/s``, ``link=800MB/s``, ….

    `drive` sets both directions; ``drives=900MB/s+300MB/s`` those of each drive.
    ``gradients=drive`` and ``writes=joined`` are not rates: see
    `CsdRates.has_stored_gradients` and `CsdRates.is_joined`.

    Raises:
      ValueError: the name is unknown, or the rate is not above 0 bytes per second.
    """
    rates = CsdRates()
    names = {f.name for f in fields(rates)} - {*_FLAGS.values(), "drives"}
    for name, text in options.items():
        if f"{name}={text}" in _FLAGS:
            rates = replace(rates, **{_FLAGS[f"{name}={text}"]: True})
            continue
        if name == "drives":
            each = tuple(_rate(name, text, part) for part in text.split("+"))
            rates = replace(rates, drives=each)
            continue
        chosen = ("drive_read", "drive_write") if name == "drive" else (name,)
        if not names.issuperset(chosen):
            raise ValueError(
                f"{name}={text}: expected one of drive, drives, "
                f"{', '.join(sorted(names))}, "
                f"or {' or '.join(_FLAGS)}"
            )
        rates = replace(rates, **dict.fromkeys(chosen, _rate(name, text, text)))
    return rates


def _rate(name: str, text: str, part: str) -> float:
    match = _RATE.fullmatch(part.strip())
    value = float(match[1]) * _UNITS[match[2]] if match else 0.0
    if not value:
        raise ValueError(
            f"{name}={text}: expected bytes a second above 0, for example 1.5GB/s"
        )
    return value
