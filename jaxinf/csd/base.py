"""The interface of a CSD: a drive and the processor that updates the chunks on it.

Invariant: a CSD has blocking primitives over buffers that it hands out itself. The
engine decides order, overlap, memory budget and commits. Calls on different buffers may
run at once in different threads; those of more than some microseconds release the GIL.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

from jaxinf.compress import SparseGradient
from jaxinf.program import Kernel, LeafInputs
from jaxinf.typing import Array


@dataclass(frozen=True)
class Extent:
    """One state's part of a subgroup, in its chunk file and in the CSD's buffer.

    Attributes:
      file_offset_bytes, buffer_offset_bytes: Multiples of the page.
      codec: Of float32 elements, as in the store's manifest; empty for none.
    """

    dtype: np.dtype
    num_elements: int
    file_offset_bytes: int
    buffer_offset_bytes: int
    codec: str = ""

    @cached_property
    def num_bytes(self) -> int:
        """Bytes of the elements, without padding."""
        return self.num_elements * self.dtype.itemsize


@dataclass(frozen=True)
class Rounding:
    """The seed of a subgroup's stochastic rounding.

    `key` has 32 bits, from leaf, chunk and step; `first_element` counts in the chunk.
    """

    key: int
    first_element: int


class Update(NamedTuple):
    """A run of an optimizer's kernel over a subgroup in a buffer, in place.

    Attributes:
      extents: Master params, then the kernel's slots in its order, as they are stored;
        scales follow their int8 codes, and remainders their split params.
      gradient: 1-D, 16 or 32 bits, as long as the subgroup; only read. In a sparse one,
        elements that were not sent are zero.
      out: 1-D; float32 receives the update, a 16-bit dtype the new params; these are
        the stored ones if params are coded. None if nobody wants them.
      caller_params: Params to use in place of the buffer's, of the same dtype. Only for
        a kind without cards.
      wanted_checksums: Positions of the extents whose checksum as read is requested.
    """

    extents: Sequence[Extent]
    kernel: Kernel
    gradient: Array | SparseGradient
    inputs: LeafInputs
    out: Array | None
    rounding: Rounding
    caller_params: Array | None = None
    wanted_checksums: Collection[int] = ()


@dataclass(frozen=True)
class UpdateOutcome:
    """Whether a gradient is finite, and the requested checksums.

    These are the CRC-32C of extents as read from the drive, by position; that of
    `caller_params` is among them in any case.
    """

    is_finite: bool
    read_checksums: Mapping[int, int]


@dataclass(frozen=True)
class GradientForm:
    """The dtype of a leaf's gradients, and whether only some elements are sent."""

    dtype: np.dtype
    is_sparse: bool = False


def is_idle(kernel: Kernel) -> bool:
    """Whether an update changes neither params nor state."""
    return kernel.update is None and kernel.unchanged >= set(kernel.slots)


@dataclass(frozen=True, eq=False)
class KernelNeed:
    """A leaf's requirements for a CSD.

    Attributes:
      codecs: Of the master params, then of the slots in the kernel's order, as in
        `Extent`.
      dtype: Of the params on the JAX device.
    """

    leaf: str
    kernel: Kernel
    codecs: tuple[str, ...]
    dtype: np.dtype
    gradients: tuple[GradientForm, ...]


class CsdBuffer(Protocol):
    """Memory of the processor beside the drive, taken from the engine's budget."""

    def release(self) -> None:
        """Returns the memory; its views must no longer be used."""
        ...


class Transfer(NamedTuple):
    """A state's part of a subgroup to be moved between its buffer and chunk file.

    `for_host` says of a read whether the host uses it (`Csd.view`), not a kernel.
    """

    buffer: CsdBuffer
    extent: Extent
    file: Path
    for_host: bool = False


class Csd(Protocol):
    """A computational storage device."""

    @property
    def memory(self) -> object:
        """The owner of its buffers' memory; CSDs with the same owner compete for it."""
        ...

    @property
    def is_host(self) -> bool:
        """Whether `update` runs on the caller's thread, where no interrupt ends it."""
        ...

    def acquire(self, num_bytes: int) -> CsdBuffer | None:
        """Returns a buffer, or None if the budget has no room now; never blocks."""
        ...

    def read(self, transfers: Sequence[Transfer]) -> None:
        """Drive → buffers; a `StoreIOError` names file, offset and errno."""
        ...

    def write(self, transfers: Sequence[Transfer]) -> None:
        """Buffers → drive; complete but not yet durable on return. Raises as `read`."""
        ...

    def checksum(self, buffer: CsdBuffer, extent: Extent) -> int | None:
        """Returns the CRC-32C of a state's elements in the buffer, without padding.

        Returns None between `read` and the next `update` if the CSD computes checksums
        in the pass of the update; request it from that (`Update.wanted_checksums`).
        """
        ...

    def update(self, buffer: CsdBuffer, update: Update) -> UpdateOutcome:
        """Runs a kernel over the subgroup in the buffer."""
        ...

    def view(self, buffer: CsdBuffer, extent: Extent) -> Array:
        """Returns a state of the buffer for the host to read, until the release.

        It is fast to read if it was read `for_host`; a card's own memory is slow.
        """
        ...

    def put(self, buffer: CsdBuffer, extent: Extent, values: Array) -> None:
        """Copies values of the host to a state of the buffer, to be written."""
        ...


class CsdFleet(Protocol):
    """The CSDs of one store, and what they share."""

    @property
    def peak_bytes(self) -> int:
        """Peak bytes of buffers in one memory so far."""
        ...

    @property
    def num_parallel_updates(self) -> int:
        """Number of updates to run at once; a CSD may run fewer."""
        ...

    def limit_memory(self, num_bytes: int) -> None:
        """Limits the host memory of buffers from now on; lent buffers stay."""
        ...

    def check(self, needs: Sequence[KernelNeed]) -> None:
        """Refuses needs that this kind of CSD cannot meet, before anything is written.

        A `CsdError` or `UnsupportedTransformError` names the leaf and the remedy.
        """
        ...

    def check_buffer(self, num_bytes: int, num_elements: int) -> None:
        """Refuses subgroups that are too long for a card's memory by a `CsdError`."""
        ...

    def attach(
        self, directories: Sequence[Path], buffer_bytes: int, num_elements: int
    ) -> Sequence[Csd]:
        """Returns a CSD for the chunk files below each of these directories.

        `buffer_bytes` and `num_elements` are those of the longest subgroup.
        """
        ...

    def close(self) -> None:
        """Releases all resources; buffers still lent stay valid until their release."""
        ...
