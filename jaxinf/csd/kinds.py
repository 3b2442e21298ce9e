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

_OPTIONS: Mapping[str, Mapping[str, str]] = {
    "host": {},
    "emulated": {"buffers": ""},
    "smartssd": {"xclbin": "JAXINF_XCLBIN", "devices": "JAXINF_XRT_DEVICES"},
}
"""The options of each kind, with the environment variable of each that has one."""

CSD_KINDS = tuple(_OPTIONS)
"""The kinds that `jaxinf.open_store` takes."""


@dataclass(frozen=True)
class CsdSpec:
    """The parsed value of `csd=`.

    Attributes:
      kind: One of `CSD_KINDS`.
      num_buffers: Subgroups that an emulated card holds; None for as many as fit.
      xclbin: The file with the kernels of real cards.
      num_devices: Number of XRT's devices, if they cannot be listed.
      wrap: Returns the fleet to use in place of the opened one, for example one that
        calls it at the speed of other hardware; None for the opened one.
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
        return not self.has_cards


def parse_csd(text: str, environ: Mapping[str, str] = os.environ) -> CsdSpec:
    """Parses ``kind`` or ``kind:name=value,name=value``.

    ``host`` has no option. ``emulated`` has ``buffers``, the number of subgroups that a
    card holds at once. ``smartssd`` has ``xclbin`` and ``devices``, for which there are
    the environment variables JAXINF_XCLBIN and JAXINF_XRT_DEVICES.

    Raises:
      ValueError: There is no such kind or option.
    """
    kind, _, rest = text.partition(":")
    if kind not in _OPTIONS:
        raise ValueError(
            f"csd={text!r}: expected one of {', '.join(map(repr, CSD_KINDS))}"
        )
    known = _OPTIONS[kind]
    options = {name: environ.get(variable, "") for name, variable in known.items()}
    for assignment in filter(None, rest.split(",")):
        name, _, value = map(str.strip, assignment.partition("="))
        if name not in known:
            expected = " or ".join(known) or "no option"
            raise ValueError(f"csd={text!r}: {name}: expected {expected}")
        options[name] = value
    numbers: dict[str, int | None] = {}
    for name, unit in (("buffers", "subgroups"), ("devices", "devices")):
        value = options.get(name, "")
        if value and not (value.isdecimal() and int(value)):
            raise ValueError(
                f"csd={text!r}: {name}={value}: expected a number of {unit}"
            )
        numbers[name] = int(value) if value else None
    file = options.get("xclbin")
    return CsdSpec(
        kind,
        num_buffers=numbers["buffers"],
        xclbin=Path(file).expanduser().absolute() if file else None,
        num_devices=numbers["devices"],
    )


def open_csds(
    spec: CsdSpec, roots: Sequence[Path], *, memory_bytes: int, meters: ByteMeters
) -> CsdFleet:
    """Opens the CSDs of a store; nothing is written.

    Args:
      roots: Existing directories, one for each CSD, on the drives for the chunks.
      memory_bytes: Memory for buffers: on the host for all CSDs together, on cards for
        each, including the host memory for that card.

    Raises:
      CsdError: A CSD is missing or not set up; names it and the remedy.
    """
    fleet: CsdFleet
    if spec.kind == "host":
        fleet = HostFleet(memory_bytes, meters)
    else:
        from jaxinf.csd.cards.smartssd import open_cards

        fleet = open_cards(spec, roots, memory_bytes, meters)
    return spec.wrap(fleet) if spec.wrap else fleet
