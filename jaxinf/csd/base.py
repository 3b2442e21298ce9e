"""What the engine asks of a CSD: a drive and the processor that updates what is on it.

Invariant: a CSD is a set of blocking primitives over buffers it hands out itself;
order, overlap, memory budget and commits are the engine's. Calls on different buffers
may run at once from different threads, and release the GIL while they work.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

from jaxinf.compress import SparseGradient
from jaxinf.program import InitKernel, Kernel
from jaxinf.typing import Array

__all__ = [
    "Csd",
    "CsdBuffer",
    "CsdFleet",
    "CsdInfo",
    "Extent",
    "GradientForm",
    "KernelNeed",
    "Rounding",
    "ScalarInputs",
    "Transfer",
    "UpdateOutcome",
    "is_idle",
]


@dataclass(frozen=True)
class CsdInfo:
    """What a CSD is.

    Attributes:
      kind: ``"host"``, ….
      root: the directory its chunks are in.
      total_bytes: capacity of its file system.
      free_bytes: what of that is free.
      direct_io: whether chunks bypass the page cache.
    """

    kind: str
    root: Path
    total_bytes: int
    free_bytes: int
    direct_io: bool


@dataclass(frozen=True)
class Extent:
    """One state's part of a subgroup, in its chunk file and in the CSD's buffer.

    Attributes:
      dtype: of the elements.
      num_elements: how many.
      file_offset_bytes: in the chunk file, a multiple of the page.
      buffer_offset_bytes: in the buffer, a multiple of the page.
      codec: how they stand for float32, as in the store's manifest; empty: they are.
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
class ScalarInputs:
    """What a kernel gets beside state and gradient.

    Attributes:
      scalars: 0-d arrays of 32-bit dtypes or bool, from the prologue.
      arrays: further 1-D inputs as long as the subgroup; almost always none.
    """

    scalars: tuple[Array, ...] = ()
    arrays: tuple[Array, ...] = ()


@dataclass(frozen=True)
class Rounding:
    """What the random bits of a subgroup's stochastic rounding depend on.

    Attributes:
      key: 32 bits, of leaf, chunk and step.
      first: number of the subgroup's first element in its chunk.
    """

    key: int
    first: int


@dataclass(frozen=True)
class UpdateOutcome:
    """What a CSD says of an update.

    Attributes:
      is_finite: whether every element of the gradient is finite.
      read_checksums: by position in the extents, the CRC-32C of each state as it was
        read from the drive, where `update` was asked to tell it; of the params that
        were given in place of the first, always.
    """

    is_finite: bool
    read_checksums: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True)
class GradientForm:
    """How gradients of a leaf come.

    Attributes:
      dtype: of the elements, or of the values that are sent of them.
      is_sparse: whether only some elements are sent, with their positions.
    """

    dtype: np.dtype
    is_sparse: bool = False


def is_idle(kernel: Kernel) -> bool:
    """Whether an update leaves params and state as they are."""
    return kernel.update is None and kernel.unchanged >= set(kernel.slots)


@dataclass(frozen=True, eq=False)
class KernelNeed:
    """What a leaf asks of a CSD.

    Attributes:
      leaf: its name.
      kernel: its update.
      codecs: of the master params, then of the slots in the kernel's order, as in
        `Extent`.
      dtype: of its params on the JAX device.
      gradients: all forms in which its gradients come.
    """

    leaf: str
    kernel: Kernel
    codecs: tuple[str, ...]
    dtype: np.dtype
    gradients: tuple[GradientForm, ...]


class CsdBuffer(Protocol):
    """Memory of the processor beside the drive, taken from the engine's budget."""

    @property
    def num_bytes(self) -> int:
        """Its length."""
        ...

    def release(self) -> None:
        """Gives the memory back; no view of it may be used any more."""
        ...


class Transfer(NamedTuple):
    """A state's part of a subgroup to be moved.

    Attributes:
      buffer: the subgroup's, of the CSD that moves it.
      extent: where in the buffer and in the file.
      file: its chunk's.
      for_host: of a read: the host will look at it (`Csd.view`), and no kernel.
    """

    buffer: CsdBuffer
    extent: Extent
    file: Path
    for_host: bool = False


class Csd(Protocol):
    """A computational storage device. `extents` starts with the master params."""

    @property
    def memory(self) -> object:
        """What its buffers are taken from; CSDs of the same one compete for it."""
        ...

    @property
    def is_host(self) -> bool:
        """Whether an `update` runs on its caller's thread: no interrupt can end it."""
        ...

    def info(self) -> CsdInfo:
        """What it is, now."""
        ...

    def acquire(self, num_bytes: int) -> CsdBuffer | None:
        """A buffer, or None where the budget has no room for it now; never blocks."""
        ...

    def read(self, transfers: Sequence[Transfer]) -> None:
        """Drive → buffers.

        Raises:
          StoreIOError: naming file, offset and errno.
        """
        ...

    def write(self, transfers: Sequence[Transfer]) -> None:
        """Buffers → drive; complete but not yet durable on return.

        Raises:
          StoreIOError, StoreSpaceError: naming file, offset and errno.
        """
        ...

    def checksum(self, buffer: CsdBuffer, extent: Extent) -> int | None:
        """The CRC-32C of a state's elements in the buffer, padding left out.

        None between `read` and the next `update`, where the processor beside the drive
        takes it in the update's own pass: ask that for it.
        """
        ...

    def update(
        self,
        buffer: CsdBuffer,
        extents: Sequence[Extent],
        kernel: Kernel,
        gradient: Array | SparseGradient,
        inputs: ScalarInputs,
        out: Array,
        rounding: Rounding,
        *,
        given: Array | None = None,
        wants_params: bool = False,
        tells: Collection[int] = (),
    ) -> UpdateOutcome:
        """Runs an optimizer's kernel over a subgroup in the buffer, in place.

        Args:
          buffer: holds the states of `extents`.
          extents: master params, then the kernel's slots in its order, each as it is
            stored; the scales of int8 codes follow them, as the remainders follow split
            params.
          kernel: what to run.
          gradient: 1-D, 16 or 32 bits, as long as the subgroup; only read. Of a
            sparse one the elements that were not sent are zero.
          inputs: scalars and further arrays.
          out: 1-D; float32 receives the update, a 16-bit dtype the new params, which
            are those stored where they are coded.
          rounding: the random bits of stochastic rounding.
          given: params to take instead of the buffer's, of their dtype. Only of a kind
            that takes params (`CsdSpec.takes_params`).
          wants_params: float32 `out` receives the new params instead of the update.
          tells: positions in the extents whose checksum, as they were read, is wanted.
        """
        ...

    def initialise(
        self,
        buffer: CsdBuffer,
        extents: Sequence[Extent],
        kernel: InitKernel,
        params: Array,
        inputs: ScalarInputs,
        rounding: Rounding,
    ) -> None:
        """Fills a subgroup's master params and initial state in the buffer."""
        ...

    def view(self, buffer: CsdBuffer, extent: Extent) -> Array:
        """A state of the buffer for the host to read, valid until the release.

        Fast for what was read `for_host`; a card's own memory is slow to look at.
        """
        ...

    def put(self, buffer: CsdBuffer, extent: Extent, values: Array) -> None:
        """Makes values of the host's a state of the buffer, to be written."""
        ...


class CsdFleet(Protocol):
    """The CSDs of one store: what they share, and how they begin and end."""

    @property
    def peak_bytes(self) -> int:
        """The most that buffers have taken of a memory so far."""
        ...

    @property
    def used_bytes(self) -> int:
        """What buffers that are lent now take."""
        ...

    def limit_memory(self, num_bytes: int) -> None:
        """Lets buffers that take host memory take no more than this from now on."""
        ...

    @property
    def num_kernels(self) -> int:
        """How many updates are worth running at once; a CSD may let fewer."""
        ...

    def check(self, needs: Sequence[KernelNeed]) -> None:
        """Refuses what a CSD of this kind cannot do, before anything is written.

        Raises:
          CsdError: names the leaf, what is missing, and the remedy.
        """
        ...

    def check_buffer(self, num_bytes: int, num_elements: int) -> None:
        """Refuses subgroups that are too long for the CSDs' memory.

        Raises:
          CsdError: says how long, what there is, and the remedy.
        """
        ...

    def attach(
        self, directories: Sequence[Path], buffer_bytes: int, num_elements: int
    ) -> Sequence[Csd]:
        """The CSDs, for chunk files below these directories, in the roots' order.

        Args:
          directories: one a CSD; they exist.
          buffer_bytes, num_elements: of the longest subgroup that will come.
        """
        ...

    def close(self) -> None:
        """Gives everything back; buffers still lent stay valid until their release."""
        ...
