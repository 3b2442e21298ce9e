"""A leaf of a store: its stored arrays, and the places of their chunks.

Invariant: a record is the JSON of ``jaxinf.json``, and immutable.
"""

from collections.abc import Sequence
from functools import cache, cached_property
from typing import Annotated, Any, TypeAlias

import numpy as np
from msgspec import Meta

from jaxinf.documents import Document, one_of
from jaxinf.layout import CODE_BLOCK, Chunk, LeafGrid, scales_length, shared_grid
from jaxinf.store.documents import Dtype, Lengths, Name
from jaxinf.store.names import array_name, leaf_name
from jaxinf.transfer import page_ceil

CODECS = ("bf16", "int8")
"""Codecs of the optimizer's state."""

MASTER_CODECS = ("split", "bf16")
"""Codecs of the master params of leaves that are bfloat16 on the JAX device."""

# Codecs of arrays that belong to the array before them, and the ends of their names.
BESIDE = {"scale": "_scale", "remainder": "_remainder"}

Process: TypeAlias = Annotated[int, Meta(ge=0, lt=2**20)]
"""Number of a process."""

_Parts: TypeAlias = Annotated[
    tuple[Annotated[int, Meta(ge=1, le=2**62 - 1)], ...], Meta(max_length=64)
]
_Path: TypeAlias = Annotated[
    tuple[Annotated[str, Meta(max_length=255)], ...], Meta(max_length=255)
]
_Csd: TypeAlias = Annotated[int, Meta(ge=0, le=65535)]


@cache
def dtype_of(name: str) -> np.dtype[Any]:
    """Returns the NumPy dtype of a name on disk; ``bfloat16`` is one of them."""
    import ml_dtypes

    if name == "bfloat16":
        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype(name)


class StateRecord(Document, frozen=True, array_like=True):
    """One stored array of a leaf.

    Attributes:
      name: name of the optax state's field; with an end of `BESIDE` if it belongs to
        the array before it.
      dtype: dtype of the stored elements.
      codec: the codec for float32: ``"bf16"`` (rounded stochastically), ``"int8"``
        (codes; their scales are the next array), ``"scale"`` (these scales),
        ``"split"`` (rounded to bfloat16; the remainders are the next array),
        ``"remainder"`` (these remainders); empty if the optimizer computes with the
        stored elements.
    """

    name: Name
    dtype: Dtype
    codec: Annotated[str, one_of("", *CODECS, *MASTER_CODECS, *BESIDE)] = ""

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return dtype_of(self.dtype).itemsize

    @property
    def slot(self) -> str:
        """Name of the optimizer's state, also for its scales or remainders."""
        return self.name.removesuffix(BESIDE.get(self.codec, ""))

    @property
    def is_beside(self) -> bool:
        """Whether it belongs to the array before it, and is not a state of its own."""
        return self.codec in BESIDE

    def num_elements(self, num_leaf_elements: int) -> int:
        """Returns the number of its elements for a number of the leaf's."""
        if self.codec == "scale":
            return -(-num_leaf_elements // CODE_BLOCK)
        return num_leaf_elements

    def stored_bytes(self, chunk: Chunk) -> int:
        """Returns the bytes of a chunk's file in one slot on the drive: whole pages."""
        return page_ceil(self.num_elements(chunk.num_elements) * self.itemsize)

    def coded(self, codec: str) -> tuple["StateRecord", ...]:
        """Returns the arrays that store this state with a codec."""
        if codec == "bf16":
            return (StateRecord(self.name, "bfloat16", codec),)
        if codec == "split":
            rest = StateRecord(self.name + BESIDE["remainder"], "int16", "remainder")
            return (StateRecord(self.name, "bfloat16", codec), rest)
        assert codec == "int8"
        scales = StateRecord(self.name + BESIDE["scale"], "float32", "scale")
        return (StateRecord(self.name, "uint8", codec), scales)

    def decoded(self) -> "StateRecord":
        """Returns the state in the form that the optimizer computes with."""
        return StateRecord(self.slot, "float32") if self.codec else self


class LeafRecord(Document, frozen=True, kw_only=True, dict=True, gc=True):
    """One leaf of the params tree.

    Attributes:
      path: its keys.
      shape: its natural shape.
      dtype: the dtype of the params on the JAX device.
      kernel: key into `Manifest.kernels`.
      states: its stored arrays, the master params first.
      chunk_shape: chunk shape of every state's array; empty before it is laid out.
      shard_counts: shards along each dimension when the store was made.
      csds: the CSD of each chunk, in grid order; -1 (on disk 0) for one that another
        member holds. Empty before the leaf is laid out.
      owners: in a member, the number of the member that holds each chunk; else empty.
    """

    path: _Path
    shape: Lengths
    dtype: Dtype
    kernel: str
    states: Annotated[tuple[StateRecord, ...], Meta(min_length=1)]
    chunk_shape: _Parts
    shard_counts: _Parts
    csds: tuple[_Csd, ...]
    owners: tuple[Process, ...] = ()

    @property
    def name(self) -> str:
        """The leaf's keys joined by ``/``."""
        return leaf_name(self.path)

    def array_name(self, state: str) -> str:
        """Returns the directory of a state's array, relative to a slot."""
        return array_name(state, self.path)

    # --- states ----------------------------------------------------------------------

    def state(self, name: str) -> StateRecord:
        """Returns the record of a stored array, which must exist."""
        return next(state for state in self.states if state.name == name)

    @property
    def slots(self) -> tuple[StateRecord, ...]:
        """The states that the optimizer computes with, the master params first."""
        return tuple(s.decoded() for s in self.states if not s.is_beside)

    def beside(self, state: StateRecord) -> StateRecord | None:
        """Returns the array that belongs to a state's: scales, remainders, or None."""
        found = (s for s in self.states if s.is_beside and s.slot == state.name)
        return next(found, None)

    # --- chunks ----------------------------------------------------------------------

    @cached_property
    def grid(self) -> LeafGrid:
        """The chunk grid."""
        return shared_grid(self.shape, self.chunk_shape)

    def array_grid(self, state: StateRecord) -> tuple[Sequence[int], Sequence[int]]:
        """Returns shape and chunk shape of a state's array."""
        if state.codec != "scale":
            return self.shape, self.chunk_shape
        length = scales_length(self.grid)
        return (len(self.csds) * length,), (length,)

    @property
    def chunk_bytes(self) -> list[int]:
        """Bytes of each chunk on the drive, all states together."""
        chunks = self.grid.chunks()
        return [sum(one.stored_bytes(chunk) for one in self.states) for chunk in chunks]

    @cached_property
    def held(self) -> Sequence[int]:
        """Numbers of the chunks that this store holds, in grid order."""
        if not self.owners:
            return range(len(self.csds))
        return tuple(number for number, csd in enumerate(self.csds) if csd >= 0)

    @property
    def is_whole(self) -> bool:
        """Whether this store holds all chunks."""
        return len(self.held) == len(self.csds)

    @cached_property
    def places(self) -> Sequence[int]:
        """Each chunk's position in `held`; -1 for one that is not held."""
        if not self.owners:
            return range(len(self.csds))
        found = {number: place for place, number in enumerate(self.held)}
        return tuple(found.get(number, -1) for number in range(len(self.csds)))
