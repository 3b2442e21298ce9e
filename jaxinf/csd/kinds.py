"""CSDs by name: what `csd=` of `jaxinf.open_store` may say, and what it opens.

Invariant: a kind's own module is imported when a store of that kind is opened, not
before: nobody needs a card's software who has no card.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from jaxinf.csd.base import CsdFleet
from jaxinf.csd.host import HostFleet
from jaxinf.csd.rates import CsdRates, parse_rates
from jaxinf.csd.throttled import ThrottledFleet
from jaxinf.errors import CsdError
from jaxinf.io import ByteMeters

__all__ = ["CSD_KINDS", "CsdSpec", "open_csds", "parse_csd"]

CSD_KINDS = ("host", "emulated", "smartssd")
"""The kinds that `jaxinf.open_store` takes."""

_CARD_OPTIONS = {"xclbin": "JAXINF_XCLBIN", "devices": "JAXINF_XRT_DEVICES"}


@dataclass(frozen=True)
class CsdSpec:
    """What `csd=` asks for.

    Attributes:
      kind: one of `CSD_KINDS`.
      rates: what the CSDs are held up to.
      num_buffers: subgroups that an emulated card holds; None for as many as fit.
      xclbin: the file with the kernels of real cards.
      num_devices: where cards cannot be listed: how many XRT has, by index.
    """

    kind: str
    rates: CsdRates = field(default_factory=CsdRates)
    num_buffers: int | None = None
    xclbin: Path | None = None
    num_devices: int | None = None

    @property
    def takes_params(self) -> bool:
        """Whether params that the caller has cost less than reading the master.

        So it is where they are in the same memory, not across a link.
        """
        return self.kind == "host"

    @property
    def has_cards(self) -> bool:
        """Whether each CSD has a memory of its own, on a card."""
        return self.kind != "host"

    @property
    def codes_params(self) -> bool:
        """Whether the master of bfloat16 params may be coded: as a remainder, say."""
        return self.kind == "host"


def parse_csd(text: str, environ: Mapping[str, str] = os.environ) -> CsdSpec:
    """Reads what a user gave: ``kind`` or ``kind:name=value,name=value``.

    Options of ``host`` and ``emulated`` are bandwidths, see `CsdRates`: for example
    ``emulated:drive=1.5GB/s,link=3GB/s``. ``emulated`` has ``buffers``, too: how many
    subgroups a card holds at once. Options of ``smartssd`` are ``xclbin`` and
    ``devices``, for which the environment has JAXINF_XCLBIN and JAXINF_XRT_DEVICES.

    Raises:
      ValueError: there is no such kind or option.
    """
    kind, _, rest = text.partition(":")
    if kind not in CSD_KINDS:
        raise ValueError(
            f"csd={text!r}: expected one of {', '.join(map(repr, CSD_KINDS))}"
        )
    options: dict[str, str] = {}
    for option in filter(None, rest.split(",")):
        name, _, value = option.partition("=")
        options[name.strip()] = value.strip()
    try:
        if kind == "host":
            return CsdSpec(kind, parse_rates(options))
        if kind == "emulated":
            num_buffers = _count(options.pop("buffers", ""), "buffers", "subgroups")
            return CsdSpec(kind, parse_rates(options), num_buffers)
        return _card_spec(options, environ)
    except ValueError as error:
        raise ValueError(f"csd={text!r}: {error}") from error


def _card_spec(options: Mapping[str, str], environ: Mapping[str, str]) -> CsdSpec:
    for name in options:
        if name not in _CARD_OPTIONS:
            raise ValueError(f"{name}: expected one of {', '.join(_CARD_OPTIONS)}")
    values = {n: environ[v] for n, v in _CARD_OPTIONS.items() if environ.get(v)}
    values |= options
    xclbin = values.get("xclbin")
    return CsdSpec(
        "smartssd",
        xclbin=None if xclbin is None else Path(xclbin).expanduser().absolute(),
        num_devices=_count(values.get("devices", ""), "devices", "devices"),
    )


def _count(text: str, name: str, what: str) -> int | None:
    if not text:
        return None
    if not (text.isdecimal() and int(text)):
        raise ValueError(f"{name}={text}: expected a number of {what}")
    return int(text)


def open_csds(
    spec: CsdSpec, roots: Sequence[Path], *, memory_bytes: int, meters: ByteMeters
) -> CsdFleet:
    """Opens the CSDs of a store; nothing is written.

    Args:
      spec: which kind.
      roots: existing directories, one a CSD, on the drives that the chunks will be on.
      memory_bytes: for the buffers: of the host for all, of a card for each, with what
        the host has beside it.
      meters: counts their bytes.

    Raises:
      CsdError: one is missing or not set up; says which, and the remedy.
    """
    fleet = _OPENERS[spec.kind](spec, roots, memory_bytes, meters)
    return ThrottledFleet(fleet, spec.rates) if spec.rates.is_set else fleet


def _open_host(
    spec: CsdSpec, roots: Sequence[Path], memory_bytes: int, meters: ByteMeters
) -> CsdFleet:
    del roots
    return HostFleet(memory_bytes, meters)


def _open_emulated(
    spec: CsdSpec, roots: Sequence[Path], memory_bytes: int, meters: ByteMeters
) -> CsdFleet:
    from jaxinf.csd.cards.emulated import open_emulated

    return open_emulated(roots, memory_bytes, meters, spec.num_buffers)


def _open_smartssd(
    spec: CsdSpec, roots: Sequence[Path], memory_bytes: int, meters: ByteMeters
) -> CsdFleet:
    from jaxinf.csd.cards.smartssd import open_smartssd

    if spec.xclbin is None:
        raise CsdError(
            "csd='smartssd': expected the xclbin with the cards' kernels, found none "
            "named; build one (make -C hls hw KERNELS=…), and name it: "
            "csd='smartssd:xclbin=FILE', or the variable JAXINF_XCLBIN"
        )
    return open_smartssd(
        roots, memory_bytes, meters, xclbin=spec.xclbin, num_devices=spec.num_devices
    )


_Opener = Callable[[CsdSpec, Sequence[Path], int, ByteMeters], CsdFleet]
_OPENERS: dict[str, _Opener] = {
    "host": _open_host,
    "emulated": _open_emulated,
    "smartssd": _open_smartssd,
}
