"""Computational storage devices: one protocol, one module a kind.

Invariant: every kind gives the same bits, errors and crash safety.
"""

from jaxinf.csd.base import (
    Csd,
    CsdBuffer,
    CsdFleet,
    Extent,
    GradientForm,
    KernelNeed,
    Rounding,
    Transfer,
    Update,
    UpdateOutcome,
    is_idle,
)
from jaxinf.csd.host import HostCsd
from jaxinf.csd.host_kernels import initialise_states
from jaxinf.csd.kinds import CSD_KINDS, CsdSpec, open_csds, parse_csd
