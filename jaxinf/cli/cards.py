"""The cards of a machine and their problems, for `jaxinf doctor`.

Invariant: no card is opened; a machine without cards has no problem.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jaxinf.cli.machine import Problem
from jaxinf.csd.cards.runtime import has_runtime
from jaxinf.csd.cards.sysfs import CardInfo, card_of, list_cards
from jaxinf.errors import CsdError

__all__ = ["Card", "look_at_cards"]


@dataclass(frozen=True)
class Card:
    """A card.

    Attributes:
      info: the driver's data about the card.
      paths: those of the given directories that are on the drive beside it.
      problems: missing parts and features that are off.
    """

    info: CardInfo
    paths: tuple[str, ...]
    problems: list[Problem] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """Returns its part of the document of ``--json``."""
        return {
            "address": self.info.address,
            "firmware": self.info.firmware,
            "p2p": self.info.p2p,
            "paths": list(self.paths),
            "problems": [problem.to_json() for problem in self.problems],
        }


def look_at_cards(
    paths: Sequence[Path], *, sysfs: Path = Path("/sys")
) -> tuple[Card, ...]:
    """Finds the cards of this machine, each with the directories beside it."""
    cards = list_cards(sysfs)
    beside: dict[str, list[str]] = {card.address: [] for card in cards}
    for path in paths:
        try:
            beside[card_of(path, cards, sysfs).address].append(str(path))
        except (CsdError, OSError):
            continue  # on another drive, or missing: the directory's own rows say so
    return tuple(
        Card(card, tuple(beside[card.address]), _problems(card)) for card in cards
    )


def _problems(card: CardInfo) -> list[Problem]:
    problems = []
    if card.p2p_remedy and card.p2p != "unknown":
        problems.append(Problem(f"P2P is {card.p2p}", card.p2p_remedy))
    if not has_runtime():
        problems.append(
            Problem(
                "XILINX_XRT is not set, or names no directory of XRT's",
                "install XRT, and `source /opt/xilinx/xrt/setup.sh` before Python",
            )
        )
    return problems
