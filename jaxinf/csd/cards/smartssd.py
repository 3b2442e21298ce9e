"""CSDs that are drives with an FPGA beside them: Samsung's SmartSSD, or emulated ones.

Invariant: cards are found, checked and loaded before anything is written; requests that
they cannot meet are refused then.

The engine keeps the order of Smart-Infinity (section IV-B): a worker hands out the
result before it writes, and writes the master first. Meanwhile other workers load into
buffers of their own.
"""

from collections.abc import Sequence
from pathlib import Path

from jaxinf.csd.base import GradientForm, KernelNeed, is_idle
from jaxinf.csd.cards.card import CardCsd
from jaxinf.csd.cards.library import load_runtime
from jaxinf.csd.cards.memory import BUFFERS_BYTES, CardMemory, set_bytes
from jaxinf.csd.cards.peer import probe_peer
from jaxinf.csd.cards.standin import ANY_KERNEL, EmulatedXrt
from jaxinf.csd.cards.sysfs import card_of, list_cards
from jaxinf.csd.cards.xrt import XrtCard, open_card
from jaxinf.errors import CsdError, UnsupportedTransformError
from jaxinf.kernels import CardKernel, card_kernel
from jaxinf.transfer import ByteMeters, supports_direct


def open_emulated(
    roots: Sequence[Path],
    memory_bytes: int,
    meters: ByteMeters,
    num_buffers: int | None = None,
) -> "CardFleet":
    """Opens one card for each root, with `num_buffers` or as many buffers as fit.

    It is the code that drives cards, over a stand-in for pyxrt.
    """
    runtime = EmulatedXrt()
    cards = [XrtCard(runtime, n, Path(ANY_KERNEL)) for n in range(len(roots))]
    fleet = CardFleet("emulated", cards, memory_bytes, meters, num_buffers)
    fleet.probe(roots, must_be_direct=False)
    return fleet


def open_smartssd(
    roots: Sequence[Path],
    memory_bytes: int,
    meters: ByteMeters,
    *,
    xclbin: Path | None,
    num_devices: int | None = None,
) -> "CardFleet":
    """Opens the cards beside the drives that the roots are on.

    Args:
      xclbin: the file with the cards' kernels; None is refused.
      num_devices: number of devices if they cannot be listed, as in XRT's emulation;
        then root n gets device n.

    Raises:
      CsdError: the runtime, a card or the xclbin is missing, or P2P is off.
    """
    load_runtime()
    devices = _devices(roots, num_devices)
    if xclbin is None or not xclbin.is_file():
        found = "none named" if xclbin is None else f"no such file as {xclbin}"
        raise CsdError(
            "csd='smartssd': expected the xclbin with the cards' kernels, found "
            f"{found}; build one (make -C hls hw KERNELS=…), and name it: "
            "csd='smartssd:xclbin=FILE', or the variable JAXINF_XCLBIN"
        )
    # Loading a card unmaps the buffers of others, so all are loaded before allocation.
    cards = [open_card(device, xclbin) for device in devices]
    fleet = CardFleet("smartssd", cards, memory_bytes, meters)
    # XRT's emulation keeps the cards' memory on the host: any file system will do.
    fleet.probe(roots, must_be_direct=num_devices is None)
    return fleet


def _devices(roots: Sequence[Path], num_devices: int | None) -> list[str | int]:
    """Returns a device for each root: an address, or an index if there is none."""
    if num_devices is not None:
        if len(roots) > num_devices:
            raise CsdError(
                f"csd='smartssd': {len(roots)} CSD roots, and {num_devices} devices "
                "by the option `devices` (JAXINF_XRT_DEVICES); raise it, or give "
                "fewer roots"
            )
        return list(range(len(roots)))
    cards = list_cards()
    if not cards:
        raise CsdError(
            "csd='smartssd': expected a card, found none that XRT's driver serves; "
            "load the driver (`sudo modprobe xocl`), see `xbutil examine`; in XRT's "
            "emulation say how many there are: JAXINF_XRT_DEVICES=1"
        )
    found: dict[str | int, Path] = {}
    for root in roots:
        address = card_of(root, cards)
        if address in found:
            raise CsdError(
                f"CSD roots {found[address]} and {root} are on one drive (card "
                f"{address}); give one root for each card"
            )
        found[address] = root
    return list(found)


class CardFleet:
    """See `jaxinf.csd.CsdFleet`: one card for each root, each with its own memory.

    Args:
      cards: in the roots' order, with the xclbin loaded.
      memory_bytes: limit for each card: its state in card memory, and the gradients and
        results that the host maps for it.
      num_buffers: number of subgroups in a card at once; None for as many as fit.
    """

    def __init__(
        self,
        kind: str,
        cards: Sequence[XrtCard],
        memory_bytes: int,
        meters: ByteMeters,
        num_buffers: int | None = None,
    ) -> None:
        self._kind = kind
        self._num_buffers = num_buffers
        self._cards = cards
        self._memory_bytes = memory_bytes
        self._meters = meters
        self._memories: list[CardMemory] = []

    def probe(self, roots: Sequence[Path], *, must_be_direct: bool) -> None:
        """Tries whether each drive reaches its card's memory.

        Raises:
          CsdError: one does not; gives the reason.
        """
        for card, root in zip(self._cards, roots, strict=True):
            if supports_direct(root):
                probe_peer(card, root)
            elif must_be_direct:
                raise CsdError(
                    f"CSD root {root}: expected a file system with direct I/O, without "
                    "which a drive does not reach a card's memory; make one such as "
                    "ext4 or xfs on the drive"
                )

    @property
    def peak_bytes(self) -> int:
        """Peak bytes of state in a card's memory."""
        return max((memory.peak_bytes for memory in self._memories), default=0)

    def limit_memory(self, num_bytes: int) -> None:
        """Does nothing: all buffers are in the cards' own memory."""

    @property
    def num_kernels(self) -> int:
        """Two for each card: one computes while data of the other is sent."""
        return 2 * len(self._cards)

    def check(self, needs: Sequence[KernelNeed]) -> None:
        """Finds a kernel for every leaf, on every card.

        Raises:
          CsdError: no kernel reads the stored form of a leaf's state, an xclbin lacks
            the kernel, or a port of it is connected to another bank than the buffers'.
          UnsupportedTransformError: no card has a kernel of such an optimizer.
        """
        needs = [need for need in needs if not is_idle(need.kernel)]
        found = [self._kernel(n, form) for n in needs for form in n.gradients]
        for _, kernel in sorted({one.name: one for one in found}.items()):
            for card in self._cards:
                _check_banks(card, kernel)

    def _kernel(self, need: KernelNeed, gradient: GradientForm) -> CardKernel:
        master, *codecs = need.codecs
        if master or len(set(codecs)) > 1:
            raise CsdError(
                f"leaf {need.leaf}: csd={self._kind!r} reads fp32 master params and "
                f"state of one format, found params as {master or 'fp32'} and state as "
                f'{", ".join(codec or "fp32" for codec in codecs)}; use csd="host", '
                'or make the store anew with another state ("jaxinf store copy")'
            )
        codec = codecs[0] if codecs else ""
        try:
            dtypes = gradient.dtype, need.dtype
            return card_kernel(need.kernel, *dtypes, codec, gradient.is_sparse)
        except UnsupportedTransformError as error:
            raise UnsupportedTransformError(f"leaf {need.leaf}: {error}") from error

    def check_buffer(self, num_bytes: int, num_elements: int) -> None:
        """Refuses subgroups that do not fit into a card's memory.

        Raises:
          CsdError: one buffer does not fit.
        """
        need = set_bytes(num_bytes, num_elements)
        if need > BUFFERS_BYTES:
            raise CsdError(
                f"csd={self._kind!r}: a subgroup of {num_elements:,} elements needs "
                f"{need:,} bytes of a card's memory (state, gradient, result), a card "
                f"has {BUFFERS_BYTES:,}; lower memory_bytes, which subgroups are cut "
                "to"
            )

    def attach(
        self, directories: Sequence[Path], buffer_bytes: int, num_elements: int
    ) -> "Sequence[CardCsd]":
        limit_bytes = self._memory_bytes
        if self._num_buffers is not None:
            sets_bytes = self._num_buffers * set_bytes(buffer_bytes, num_elements)
            limit_bytes = min(limit_bytes, sets_bytes)
        found, self._memories = [], []
        for card, directory in zip(self._cards, directories, strict=True):
            memory = CardMemory(card, buffer_bytes, num_elements, limit_bytes)
            self._memories.append(memory)
            buffered = not supports_direct(directory)  # only if `probe` allowed it
            found.append(CardCsd(card, memory, directory, self._meters, buffered))
        return found

    def close(self) -> None:
        """Frees the cards' memory; the cards stay open for a next store."""
        for memory in self._memories:
            memory.close()


def _check_banks(card: XrtCard, kernel: CardKernel) -> None:
    """Refuses a kernel unless all its ports are connected to the buffers' bank."""
    loaded, bank = card.kernel(kernel.name), card.default_bank
    for number, pointer in enumerate(kernel.pointers):
        if (found := loaded.bank(number)) != bank:
            raise CsdError(
                f"card {card.name}: expected all ports of the xclbin's kernels in "
                f"memory bank {bank}, found {pointer.name} of {kernel.name} in "
                f"{found}; link with the connectivity of hls/cfg"
            )
