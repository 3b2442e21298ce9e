"""CSDs by name: what `csd=` of `jaxinf.open_store` may say, and what it opens.

Invariant: a kind's own module is imported when a store of that kind is opened, not
before: nobody needs a card's software who has no card.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jaxinf.csd.base import CsdFleet
from jaxinf.csd.host import HostFleet
from jaxinf.io import ByteMeters

__all__ = ["CSD_KINDS", "CsdSpec", "open_csds", "parse_csd"]

CSD_KINDS = ("host",)
"""The kinds that `jaxinf.open_store` takes."""


@dataclass(frozen=True)
class CsdSpec:
    """What `csd=` asks for.

    Attributes:
      kind: one of `CSD_KINDS`.
    """

    kind: str

    @property
    def takes_params(self) -> bool:
        """Whether params that the caller has cost less than reading the master.

        So it is where they are in the same memory, not across a link.
        """
        return self.kind == "host"


def parse_csd(text: str) -> CsdSpec:
    """Reads what a user gave.

    Raises:
      ValueError: there is no such kind.
    """
    if text not in CSD_KINDS:
        raise ValueError(
            f"csd={text!r}: expected one of {', '.join(map(repr, CSD_KINDS))}"
        )
    return CsdSpec(text)


def open_csds(
    spec: CsdSpec, roots: Sequence[Path], *, memory_bytes: int, meters: ByteMeters
) -> CsdFleet:
    """Opens the CSDs of a store; nothing is written.

    Args:
      spec: which kind.
      roots: existing directories, one a CSD, on the drives that the chunks will be on.
      memory_bytes: for the buffers of all.
      meters: counts their bytes.

    Raises:
      CsdError: one is missing or not set up; says which, and the remedy.
    """
    del roots
    assert spec.kind == "host"
    return HostFleet(memory_bytes, meters)
