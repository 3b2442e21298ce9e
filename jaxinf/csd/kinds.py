"""CSDs by name: parses `csd=` of `jaxinf.open_store`, and opens the CSDs.

Invariant: a kind's own module is imported only when a store of that kind is opened, so
that users without cards need no software for them.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from jaxinf.csd.base import CsdFleet
from jaxinf.csd.host import HostFleet
from jaxinf.transfer import ByteMeters

CSD_KINDS = ("host", "emulated", "smartssd")
"""The kinds that `jaxinf.open_store` takes."""

_VARIABLES = {"xclbin": "JAXINF_XCLBIN", "devices": "JAXINF_XRT_DEVICES"}
_OPTIONS = {"host": (), "emulated": ("buffers",), "smartssd": tuple(_VARIABLES)}


@dataclass(frozen=True)
class CsdSpec:
    """The parsed value of `csd=`.

    Attributes:
      kind: one of `CSD_KINDS`.
      num_buffers: subgroups that an emulated card holds; None for as many as fit.
      xclbin: the file with the kernels of real cards.
      num_devices: number of XRT's devices, if they cannot be listed.
      wrap: returns the fleet to use in place of the opened one, which it may call, for
        example one that takes the time of other hardware; None for the opened one.
    """

    kind: str
    num_buffers: int | None = None
    xclbin: Path | None = None
    num_devices: int | None = None
    wrap: Callable[[CsdFleet], CsdFleet] | None = None

    @property
    def has_cards(self) -> bool:
        """Whether each CSD has a memory of its own, on a card, across a link.

        Else it is cheaper to take the caller's params than to read the master.
        """
        return self.kind != "host"

    @property
    def codes_params(self) -> bool:
        """Whether the master of bfloat16 params may be coded, for example split."""
        return self.kind == "host"


def parse_csd(text: str, environ: Mapping[str, str] = os.environ) -> CsdSpec:
    """Parses ``kind`` or ``kind:name=value,name=value``.

    ``emulated`` has ``buffers``, the number of subgroups that a card holds at once.
    ``smartssd`` has ``xclbin`` and ``devices``; the environment variables are
    JAXINF_XCLBIN and JAXINF_XRT_DEVICES. ``host`` has no option.

    Raises:
      ValueError: there is no such kind or option.
    """
    kind, _, rest = text.partition(":")
    if kind not in CSD_KINDS:
        raise ValueError(
            f"csd={text!r}: expected one of {', '.join(map(repr, CSD_KINDS))}"
        )
    options: dict[str, str] = {}
    if kind == "smartssd":
        options = {n: environ[v] for n, v in _VARIABLES.items() if environ.get(v)}
    for option in filter(None, rest.split(",")):
        name, _, value = option.partition("=")
        options[name.strip()] = value.strip()
    try:
        for name in options:
            if name not in _OPTIONS[kind]:
                raise ValueError(
                    f"{name}: expected {' or '.join(_OPTIONS[kind]) or 'no option'}"
                )
        xclbin = options.get("xclbin")
        return CsdSpec(
            kind,
            _count(options, "buffers", "subgroups"),
            None if xclbin is None else Path(xclbin).expanduser().absolute(),
            _count(options, "devices", "devices"),
        )
    except ValueError as error:
        raise ValueError(f"csd={text!r}: {error}") from error


def _count(options: Mapping[str, str], name: str, what: str) -> int | None:
    text = options.get(name, "")
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
      spec: the kind and its options.
      roots: existing directories, one for each CSD, on the drives for the chunks.
      memory_bytes: memory for buffers: on the host for all CSDs together, on cards for
        each, including the host memory for that card.
      meters: counts their bytes.

    Raises:
      CsdError: a CSD is missing or not set up; names it and the remedy.
    """
    fleet: CsdFleet
    if spec.kind == "host":
        fleet = HostFleet(memory_bytes, meters)
    else:
        from jaxinf.csd.cards import smartssd as cards

        if spec.kind == "emulated":
            fleet = cards.open_emulated(roots, memory_bytes, meters, spec.num_buffers)
        else:
            fleet = cards.open_smartssd(
                roots,
                memory_bytes,
                meters,
                xclbin=spec.xclbin,
                num_devices=spec.num_devices,
            )
    return spec.wrap(fleet) if spec.wrap else fleet
