"""Finds the cards of a machine, and the card beside a drive, in sysfs.

        root port ── … ── switch ─┬─ NVMe controller ── block device ── mount point
                                  └─ FPGA

Invariant: nothing is opened or changed. A drive and an FPGA are one SmartSSD if they
are alone below one PCIe switch; anything else is refused, not guessed.
"""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TypeAlias

from jaxinf.errors import CsdError

_SYSFS = Path("/sys")
_ADDRESS = re.compile(r".{4}:[^:]*:[^:]{2}\.[^:]*")


Cards: TypeAlias = Mapping[str, tuple[str, ...]]
"""FPGAs that XRT's driver serves: the PCI address of the function that users open, such
as ``0000:3d:00.1`` → PCI addresses from the root down to its own."""


def list_cards(sysfs: Path = _SYSFS) -> Cards:
    """Returns this machine's cards by address; none if XRT's driver is not loaded."""
    devices = sorted((sysfs / "bus/pci/drivers/xocl").glob("*:*:*.*"))
    return {device.name: _pci_path(device.resolve()) for device in devices}


def find_card(root: Path, cards: Cards, sysfs: Path = _SYSFS) -> str:
    """Returns the address of the card beside the drive that a directory is on.

    Raises:
      CsdError: It is on no drive, on several, or on one that has no card.
    """
    device_number = os.stat(root).st_dev
    name = f"{os.major(device_number)}:{os.minor(device_number)}"
    device = sysfs / "dev/block" / name
    if not device.exists():
        raise CsdError(
            f"CSD root {root}: expected a file system on a SmartSSD's drive, found one "
            "on no block device (tmpfs, network, overlay); mount the drive, and give a "
            "directory on it"
        )
    drives = _find_drives(device.resolve())
    if len(drives) != 1:
        names = ", ".join(sorted(path[-1] for path in drives)) or "no PCIe drive"
        raise CsdError(
            f"CSD root {root}: expected a file system on one NVMe drive, found it on "
            f"{names}; a card reaches only its own drive, so make a file system on "
            "each, and give one root for each"
        )
    (drive,) = drives
    # The paths of two endpoints below one switch differ in its port and in themselves.
    beside = [
        address
        for address, path in cards.items()
        if len(path) == len(drive) > 2 and path[:-2] == drive[:-2]
    ]
    if len(beside) == 1:
        return beside[0]
    known = ", ".join(cards) or "none"
    raise CsdError(
        f"CSD root {root}: expected a card beside its drive ({drive[-1]}), below the "
        f"same PCIe switch, found {len(beside)} (cards of this machine: {known}); give "
        'a directory on a SmartSSD, see `xbutil examine`, or use csd="host"'
    )


def _find_drives(device: Path) -> set[tuple[str, ...]]:
    """Returns the PCI path of a block device's drive; several with several paths."""
    if (device / "partition").exists():
        device = device.parent
    controllers = [device]
    if not _pci_path(device):
        # With multipath a namespace is below its subsystem, beside its controllers.
        links = device.parent.glob("nvme[0-9]*")
        controllers = [link.resolve() for link in links if link.is_symlink()]
    return {_pci_path(controller) for controller in controllers} - {()}


def _pci_path(device: Path) -> tuple[str, ...]:
    """Returns the PCI addresses among the folders of a device's path."""
    return tuple(part for part in device.parts if _ADDRESS.fullmatch(part))
