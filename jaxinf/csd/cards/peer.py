"""A drive's transfers to and from a card's memory, and a trial of them at open.

Invariant: no transfer with a card's memory goes through the page cache; if a drive
refuses that memory, the transfer fails with the reason.
"""

import errno
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from jaxinf.csd.cards.xrt import XrtCard
from jaxinf.errors import CsdError, StoreIOError
from jaxinf.transfer import PAGE_BYTES, REFUSALS, read_into, write_from
from jaxinf.typing import Array

_REMEDY = (
    "the drive cannot reach the card's memory: P2P must be on (`xbutil examine`), the "
    "IOMMU off or passing through (iommu=pt), and the kernel built with "
    "CONFIG_PCI_P2PDMA where the driver needs it"
)


@contextmanager
def p2p_transfer(array: Array, offset_bytes: int) -> Iterator[None]:
    """Checks the body's transfer between a file and a card's memory, `array`.

    Raises:
      OSError: No drive can send a card less than whole pages.
      StoreIOError: The drive failed, or refuses the memory; names the remedy.
    """
    if any(n % PAGE_BYTES for n in (array.ctypes.data, array.size, offset_bytes)):
        raise OSError(errno.EINVAL, "P2P I/O of memory that is no whole pages")
    try:
        yield
    except StoreIOError as error:
        cause = error.__cause__
        if isinstance(cause, OSError) and cause.errno in REFUSALS:
            raise StoreIOError(f"{error}; {_REMEDY}") from cause
        raise


def probe_peer(card: XrtCard, root: Path) -> None:
    """Sends a page from a drive to its card and another one back; refuses other bytes.

    Leaves nothing behind. This also detects a switch or an IOMMU that drops transfers:
    the page then reads as ones.
    """
    memory = card.allocate(2 * PAGE_BYTES, p2p=True)
    received, returned = memory.array[:PAGE_BYTES], memory.array[PAGE_BYTES:]
    sent = np.frombuffer(secrets.token_bytes(PAGE_BYTES), np.uint8)
    file = root / f".jaxinf-probe-{os.getpid()}-{secrets.token_hex(4)}"
    try:
        file.write_bytes(sent.tobytes())
        with open(file, "rb") as written:
            os.fsync(written)
        with p2p_transfer(received, 0):
            read_into(file, received, 0, PAGE_BYTES, buffered=False)
        returned[...] = ~sent
        is_same = np.array_equal(received, sent)
        with p2p_transfer(returned, 0):
            write_from(file, returned, 0, PAGE_BYTES, buffered=False)
        is_same &= file.read_bytes() == (~sent).tobytes()
    except (OSError, StoreIOError) as error:
        raise CsdError(f"CSD root {root}: card {card.name}: {error}") from error
    finally:
        file.unlink(missing_ok=True)
    if not is_same:
        raise CsdError(
            f"CSD root {root}: card {card.name}: expected a page to pass between the "
            f"drive and the card's memory, found other bytes; {_REMEDY}"
        )
