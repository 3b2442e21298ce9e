"""Descriptions of machines: rates of drives, cores, links and devices.

Invariant: every rate has a source, and says whether it was measured, published, fitted
or guessed.
"""

from jaxinf.plan.machine import (
    MACHINES,
    Card,
    Device,
    Drive,
    Machine,
    MachineError,
    Rate,
    read_machine,
    write_machine,
)

__all__ = [
    "MACHINES",
    "Card",
    "Device",
    "Drive",
    "Machine",
    "MachineError",
    "Rate",
    "read_machine",
    "write_machine",
]
