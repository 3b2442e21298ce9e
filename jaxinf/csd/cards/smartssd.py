"""CSDs that are drives with an FPGA beside them: Samsung's SmartSSD, or emulated ones.

Invariant: cards are found, checked and loaded before anything is written; what they
cannot do is refused then.

The engine keeps the order of Smart-Infinity (section IV-B): a worker hands out the
result before it writes, and writes the master first. Meanwhile other workers load into
buffers of their own.
"""

from collections.abc import Sequence
from pathlib import Path

from jaxinf.csd.base import GradientForm, KernelNeed, is_idle
from jaxinf.csd.cards.card import CardCsd
from jaxinf.csd.cards.library import load_runtime
from jaxinf.csd.cards.memory import BUFFERS_BYTES, CardMemory, card_buffer_bytes
from jaxinf.csd.cards.peer import probe_peer
from jaxinf.csd.cards.standin import ANY_KERNEL, EmulatedXrt
from jaxinf.csd.cards.sysfs import find_card, list_cards
from jaxinf.csd.cards.xrt import XrtCard, open_card
from jaxinf.csd.kinds import CsdSpec
from jaxinf.errors import CsdError, UnsupportedTransformError
from jaxinf.kernels import CardKernel, card_kernel
from jaxinf.transfer import ByteMeters, supports_direct


def open_cards(
    spec: CsdSpec, roots: Sequence[Path], memory_bytes: int, meters: ByteMeters
) -> "CardFleet":
    """Opens the cards beside the roots' drives, or emulated ones over a stand-in.

    Raises:
      CsdError: The runtime, a card or the xclbin is missing, or P2P is off.
    """
    # XRT's emulation, too, keeps the cards' memory on the host.
    is_emulation = spec.kind == "emulated" or spec.num_devices is not None
    if spec.kind == "emulated":
        runtime, xclbin = EmulatedXrt(), Path(ANY_KERNEL)
        cards = [XrtCard(runtime, number, xclbin) for number in range(len(roots))]
    else:
        load_runtime()
        devices = _find_devices(roots, spec.num_devices)
        xclbin = _check_xclbin(spec)
        # Loading a card unmaps the buffers of others, so none is allocated yet.
        cards = [open_card(device, xclbin) for device in devices]
    fleet = CardFleet(spec, cards, memory_bytes, meters)
    fleet.probe(roots, must_be_direct=not is_emulation)
    return fleet


def _check_xclbin(spec: CsdSpec) -> Path:
    if spec.xclbin is not None and spec.xclbin.is_file():
        return spec.xclbin
    found = "none named" if spec.xclbin is None else f"no such file as {spec.xclbin}"
    raise CsdError(
        "csd='smartssd': expected the xclbin with the cards' kernels, found "
        f"{found}; build one (make -C hls hw KERNELS=…), and name it: "
        "csd='smartssd:xclbin=FILE', or the variable JAXINF_XCLBIN"
    )


def _find_devices(roots: Sequence[Path], num_devices: int | None) -> list[str | int]:
    """Returns the PCI address of the card beside each root's drive.

    If cards cannot be listed, as in XRT's emulation, `num_devices` says how many there
    are, and root n gets the index n.
    """
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
    root_of: dict[str | int, Path] = {}
    for root in roots:
        address = find_card(root, cards)
        if address in root_of:
            raise CsdError(
                f"CSD roots {root_of[address]} and {root} are on one drive (card "
                f"{address}); give one root for each card"
            )
        root_of[address] = root
    return list(root_of)


class CardFleet:
    """See `jaxinf.csd.CsdFleet`: one card for each root, each with its own memory.

    `memory_bytes` limits each card: its state in card memory, and the gradients and
    results that the host maps for it.
    """

    def __init__(
        self,
        spec: CsdSpec,
        cards: Sequence[XrtCard],
        memory_bytes: int,
        meters: ByteMeters,
    ) -> None:
        self._spec = spec
        self._cards = cards
        self._memory_bytes = memory_bytes
        self._meters = meters
        self._memories: list[CardMemory] = []

    def probe(self, roots: Sequence[Path], *, must_be_direct: bool) -> None:
        """Refuses drives that do not reach their card's memory."""
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
        return max((memory.peak_bytes for memory in self._memories), default=0)

    @property
    def num_parallel_updates(self) -> int:
        """Two for each card: one computes while data of the other is sent."""
        return 2 * len(self._cards)

    def limit_memory(self, num_bytes: int) -> None:
        """Does nothing: all buffers are in the cards' own memory."""

    def check(self, needs: Sequence[KernelNeed]) -> None:
        """Finds a kernel for every leaf, in every card's xclbin."""
        needs = [need for need in needs if not is_idle(need.kernel)]
        kernels = [self._find_kernel(n, form) for n in needs for form in n.gradients]
        for _, kernel in sorted({kernel.name: kernel for kernel in kernels}.items()):
            for card in self._cards:
                _check_banks(card, kernel)

    def _find_kernel(self, need: KernelNeed, gradient: GradientForm) -> CardKernel:
        master, *codecs = need.codecs
        if master or len(set(codecs)) > 1:
            raise CsdError(
                f"leaf {need.leaf}: csd={self._spec.kind!r} reads fp32 master params "
                f"and state of one format, found params as {master or 'fp32'} and "
                f'state as {", ".join(c or "fp32" for c in codecs)}; use csd="host", '
                'or make the store anew with another state ("jaxinf store copy")'
            )
        try:
            return card_kernel(
                need.kernel,
                gradient_dtype=gradient.dtype,
                out_dtype=need.dtype,
                codec=codecs[0] if codecs else "",
                is_sparse=gradient.is_sparse,
            )
        except UnsupportedTransformError as error:
            raise UnsupportedTransformError(f"leaf {need.leaf}: {error}") from error

    def check_buffer(self, num_bytes: int, num_elements: int) -> None:
        needed_bytes = card_buffer_bytes(num_bytes, num_elements)
        if needed_bytes > BUFFERS_BYTES:
            raise CsdError(
                f"csd={self._spec.kind!r}: a subgroup of {num_elements:,} elements "
                f"needs {needed_bytes:,} bytes of a card's memory (state, gradient, "
                f"result), a card has {BUFFERS_BYTES:,}; lower memory_bytes, which "
                "subgroups are cut to"
            )

    def attach(
        self, directories: Sequence[Path], buffer_bytes: int, num_elements: int
    ) -> "Sequence[CardCsd]":
        limit_bytes = self._memory_bytes
        if self._spec.num_buffers is not None:
            each_bytes = card_buffer_bytes(buffer_bytes, num_elements)
            limit_bytes = min(limit_bytes, self._spec.num_buffers * each_bytes)
        csds, self._memories = [], []
        for card, directory in zip(self._cards, directories, strict=True):
            memory = CardMemory(
                card, buffer_bytes, num_elements=num_elements, limit_bytes=limit_bytes
            )
            buffered = not supports_direct(directory)  # only if `probe` allowed it
            csd = CardCsd(card, memory, directory, self._meters, buffered=buffered)
            self._memories.append(memory)
            csds.append(csd)
        return csds

    def close(self) -> None:
        """Frees the cards' memory; the cards stay open for a next store."""
        for memory in self._memories:
            memory.close()


def _check_banks(card: XrtCard, kernel: CardKernel) -> None:
    """Refuses a kernel unless all its ports are connected to the buffers' bank."""
    for number, pointer in enumerate(kernel.pointers):
        if (bank := card.bank_of(kernel.name, number)) != card.bank:
            raise CsdError(
                f"card {card.name}: expected all ports of the xclbin's kernels in "
                f"memory bank {card.bank}, found {pointer.name} of {kernel.name} in "
                f"{bank}; link with the connectivity of hls/cfg"
            )
