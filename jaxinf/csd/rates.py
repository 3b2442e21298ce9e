"""Bandwidths as users write them, of drives, their cards and a shared host link.

Invariant: a rate is a number of bytes a second above 0, or none.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

__all__ = ["CsdRates", "parse_rates"]

_UNITS = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "Ki": 2.0**10, "Mi": 2.0**20}
_UNITS["Gi"] = 2.0**30
_RATE = re.compile(r"(\d+(?:\.\d+)?)\s*(k|M|G|Ki|Mi|Gi|)B/s")


@dataclass(frozen=True)
class CsdRates:
    """Bytes a second; None where nothing is held up.

    Attributes:
      drive_read, drive_write: of each drive, which does one request after another.
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
