"""Emulated cards: the code that drives cards, over a stand-in for pyxrt.

Invariant: drives access the stand-in's P2P memory like a card's, in whole pages.
"""

from collections.abc import Sequence
from pathlib import Path

from jaxinf.csd.cards.card import FileIO
from jaxinf.csd.cards.smartssd import CardFleet
from jaxinf.csd.cards.standin import ANY_KERNEL, EmulatedXrt
from jaxinf.csd.cards.xrt import XrtCard
from jaxinf.io import PAGE_BYTES, ByteMeters
from jaxinf.typing import Array, PathLikeStr


def open_emulated(
    roots: Sequence[Path],
    memory_bytes: int,
    meters: ByteMeters,
    num_buffers: int | None = None,
) -> CardFleet:
    """Opens one card for each root, with `num_buffers` or as many buffers as fit."""
    runtime = EmulatedXrt()
    cards = [XrtCard(runtime, n, Path(ANY_KERNEL)) for n in range(len(roots))]
    fleet = EmulatedFleet("emulated", cards, memory_bytes, meters, num_buffers)
    fleet.probe(roots, must_be_direct=False)
    return fleet


class EmulatedFleet(CardFleet):
    """A fleet whose drives reach P2P memory as strictly as real ones."""

    def _io(self, directory: Path) -> FileIO:
        return _PagesIO(super()._io(directory))


class _PagesIO:
    """Refuses transfers that no drive can make with a card's memory."""

    def __init__(self, io: FileIO) -> None:
        self._io = io
        self.direct = io.direct

    def read(
        self, path: PathLikeStr, array: Array, offset_bytes: int, num_bytes: int
    ) -> None:
        _check_pages(array, offset_bytes)
        self._io.read(path, array, offset_bytes, num_bytes)

    def write(
        self, path: PathLikeStr, array: Array, offset_bytes: int, num_bytes: int
    ) -> None:
        _check_pages(array, offset_bytes)
        self._io.write(path, array, offset_bytes, num_bytes)


def _check_pages(array: Array, offset_bytes: int) -> None:
    """Requires whole pages of memory; the last page's padding is the transfer's own."""
    if array.ctypes.data % PAGE_BYTES or array.size % PAGE_BYTES:
        raise OSError(22, "P2P I/O of memory that is no whole pages")
    if offset_bytes % PAGE_BYTES:
        raise OSError(22, "P2P I/O at an offset that is no whole pages")
