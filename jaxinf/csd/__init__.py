"""Computational storage devices: one protocol, one module a kind.

Invariant: every kind gives the same bits, errors and crash safety.
"""

from jaxinf.csd.base import Csd, CsdBuffer, CsdInfo, Extent, Rounding, ScalarInputs
from jaxinf.csd.host import HostCsd

__all__ = [
    "CSD_KINDS",
    "Csd",
    "CsdBuffer",
    "CsdInfo",
    "Extent",
    "HostCsd",
    "Rounding",
    "ScalarInputs",
]

CSD_KINDS = ("host",)
"""The kinds that `jaxinf.open_store` takes."""
