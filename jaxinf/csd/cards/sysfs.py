"""Finds the cards of a machine, and the card beside a drive, in sysfs.

        root port ── … ── switch ─┬─ NVMe controller ── block device ── mount point
                                  └─ FPGA

Invariant: nothing is opened or changed. A drive and an FPGA are one SmartSSD if they
  are alone below one PCIe switch; anything else is refused, not guessed.
"""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from jaxinf.errors import CsdError

_SYSFS = Path("/sys")
_P2P_STATES = {"0": "off", "1": "on"}
_P2P_REMEDIES = {
    "needs a reboot": "reboot the machine (warm)",
    "not supported": "program the card with a platform that has P2P (xbmgmt program)",
    "wrongly mapped": "switch P2P off and on again (xbutil configure), and reboot",
}


@dataclass(frozen=True)
class CardInfo:
    """An FPGA that XRT's driver serves.

    Attributes:
      address: PCI address of the function that users open, such as ``0000:3d:00.1``.
      firmware: the platform that it runs; empty if the driver does not say.
      p2p: ``"on"``, ``"off"``, ``"needs a reboot"``, ``"not supported"``, ``"wrongly
        mapped"``; ``"unknown"`` if the driver does not say.
      path: PCI addresses from the root down to its own.
    """

    address: str
    firmware: str
    p2p: str
    path: tuple[str, ...]

    @property
    def p2p_remedy(self) -> str:
        """The command or action that switches P2P on; empty if it is on."""
        if self.p2p == "on":
            return ""
        if self.p2p in _P2P_REMEDIES:
            return _P2P_REMEDIES[self.p2p]
        return (
            f"sudo xbutil configure --device {self.address} --p2p enable, then reboot "
            "(warm); the BIOS needs large PCIe addresses (above 4G decoding)"
        )


def list_cards(sysfs: Path = _SYSFS) -> list[CardInfo]:
    """Returns this machine's cards by address; none if XRT's driver is not loaded."""
    found = []
    for device in sorted((sysfs / "bus/pci/drivers/xocl").glob("*:*:*.*")):
        real = device.resolve()
        firmware = next((_text(p) for p in sorted(real.glob("rom*/VBNV"))), "")
        p2p, path = _p2p_state(real), _pci_path(real)
        found.append(CardInfo(device.name, firmware, p2p, path))
    return found


def _p2p_state(device: Path) -> str:
    """Reads the state of P2P from the driver's folder, as `xbutil examine` does."""
    for folder in [*sorted(device.glob("p2p*/")), device]:
        sizes = _bar_sizes(_text(folder / "config")) if folder != device else {}
        if sizes:
            return _state_of(sizes)
        if enabled := _text(folder / "p2p_enable"):
            return _P2P_STATES.get(enabled, enabled)
    return "unknown"


def _bar_sizes(config: str) -> dict[str, int]:
    """Parses the sizes of the card's window in the driver's ``config``, in bytes.

    ``bar`` is the present size, ``rbar`` the size after a reboot, ``exp_bar`` the size
    that P2P needs, ``remap`` the part that shows the card's memory.
    """
    pairs = (line.partition(":") for line in config.splitlines())
    return {name: int(size) for name, _, size in pairs if size.strip().isdecimal()}


def _state_of(sizes: dict[str, int]) -> str:
    bar = sizes.get("bar")
    if bar is None:
        return "not supported"
    if sizes.get("rbar", 0) > bar:
        return "needs a reboot"
    if sizes.get("remap", 0) not in (0, bar):
        return "wrongly mapped"
    return "on" if sizes.get("exp_bar") == bar else "off"


def card_of(root: Path, cards: Sequence[CardInfo], sysfs: Path = _SYSFS) -> CardInfo:
    """Returns the card beside the drive that a directory is on.

    Raises:
      CsdError: it is on no drive, on several, or on one that has no card.
    """
    number = os.stat(root).st_dev
    device = sysfs / "dev/block" / f"{os.major(number)}:{os.minor(number)}"
    if not device.exists():
        raise CsdError(
            f"CSD root {root}: expected a file system on a SmartSSD's drive, found one "
            "on no block device (tmpfs, network, overlay); mount the drive, and give a "
            "directory on it"
        )
    drives = {path for path in _drives(device.resolve()) if path}
    if len(drives) != 1:
        names = ", ".join(sorted(path[-1] for path in drives)) or "no PCIe drive"
        raise CsdError(
            f"CSD root {root}: expected a file system on one NVMe drive, found it on "
            f"{names}; a card reaches only its own drive, so make a file system on "
            "each, and give one root for each"
        )
    (drive,) = drives
    beside = [card for card in cards if _is_beside(drive, card.path)]
    if len(beside) == 1:
        return beside[0]
    known = ", ".join(card.address for card in cards) or "none"
    raise CsdError(
        f"CSD root {root}: expected a card beside its drive ({drive[-1]}), below the "
        f"same PCIe switch, found {len(beside)} (cards of this machine: {known}); give "
        'a directory on a SmartSSD, see `xbutil examine`, or use csd="host"'
    )


def check_p2p(root: Path, card: CardInfo) -> None:
    """Refuses a card that its drive cannot reach.

    Raises:
      CsdError: P2P is off; names the remedy.
    """
    if card.p2p not in ("on", "unknown"):  # if unknown, the first allocation will tell
        raise CsdError(
            f"CSD root {root}: expected P2P on card {card.address} to be on, found it "
            f"{card.p2p}; {card.p2p_remedy}"
        )


def _is_beside(drive: tuple[str, ...], card: tuple[str, ...]) -> bool:
    """Whether two endpoints are below one switch: only the switch's ports differ."""
    return len(drive) == len(card) > 2 and drive[:-2] == card[:-2]


def _drives(device: Path) -> Iterator[tuple[str, ...]]:
    """Yields the PCI paths of the drives that a block device consists of."""
    if (device / "partition").exists():
        device = device.parent
    below = sorted((device / "slaves").glob("*"))
    if below:  # a volume on other devices
        for other in below:
            yield from _drives(other.resolve())
        return
    path = _pci_path(device)
    if path:
        yield path
        return
    # With multipath a namespace is below its subsystem, beside its controllers.
    controllers = sorted(device.parent.glob("nvme[0-9]*"))
    found = {_pci_path(c.resolve()) for c in controllers if c.is_symlink()}
    yield from found or {()}


def _pci_path(device: Path) -> tuple[str, ...]:
    """Returns the PCI addresses among the folders of a device's path."""
    return tuple(part for part in device.parts if _is_address(part))


def _is_address(text: str) -> bool:
    domain, *rest = text.split(":")
    return len(rest) == 2 and len(domain) == 4 and rest[1][2:3] == "."


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:  # this driver lacks the attribute, or does not show it
        return ""
