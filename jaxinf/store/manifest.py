"""``jaxinf.json``: the contents of a store, and the places of its chunks.

Invariant: a manifest is immutable and round-trips through JSON unchanged. Anything that
does not parse is a `StoreFormatError`; nothing is guessed.
"""

import difflib
import itertools
import math
from collections.abc import Iterator, Sequence
from functools import cache, cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias

import msgspec
import numpy as np
from msgspec import Meta
from msgspec.structs import replace

from jaxinf.documents import Document, one_of, shorten
from jaxinf.layout import (
    CODE_BLOCK,
    Chunk,
    CodedSlot,
    LeafGrid,
    scale_chunks,
    shared_grid,
)
from jaxinf.store.documents import (
    MASTER_PARAMS,
    Dtype,
    Id,
    Lengths,
    Name,
    Roots,
    array_name,
    check_leaf_paths,
    encode_key,
    leaf_name,
    read_document,
    seal,
)
from jaxinf.transfer import page_ceil, write_bytes_atomically
from jaxinf.typing import BFLOAT16, Array

FORMAT_VERSION: Literal[3] = 3  # the first that a release of jaxinf writes

CODECS = ("bf16", "int8")  # of the optimizer's state
MASTER_CODECS = ("split", "bf16")  # of params that are bfloat16 on the JAX device

_WHAT = "the manifest of a jaxinf store"
_REMEDY = (
    "restore the file from a checkpoint of the store (checkpoints/NAME/jaxinf.json) or "
    "a backup, or remove the store and start again"
)
_MOST_ELEMENTS = 1 << 58  # with 16 bytes each, 2^62 bytes
_MOST_CHUNK_ELEMENTS = 1 << 30  # 256 times the usual size of a chunk

# Codecs of arrays that belong to the array before them, and the ends of their names.
_ENDS = {"scale": "_scale", "remainder": "_remainder"}

# The dtype of each codec, and codec and dtype of what it has beside.
_CODED: dict[str, tuple[Any, ...]] = {
    "bf16": ("bfloat16",),
    "split": ("bfloat16", ("remainder", "int16")),
    "int8": ("uint8", ("scale", "float32")),
}

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
    return BFLOAT16 if name == "bfloat16" else np.dtype(name)


def package_versions() -> dict[str, str]:
    """Returns the versions of the packages on which a store's bits depend."""
    return {name: version(name) for name in ("jaxinf", "jax", "optax")}


class StateRecord(Document, frozen=True, array_like=True):
    """One stored array of a leaf: a state, or what belongs to the one before it.

    Codecs are of float32: ``"bf16"``, rounded stochastically; ``"int8"``, codes, whose
    scales are the next array, ``"scale"``; ``"split"``, rounded to bfloat16, whose
    remainders are the next array, ``"remainder"``. Without one the optimizer computes
    with the stored elements.
    """

    name: Name  # of the optax state's field, perhaps with one of `_ENDS`
    dtype: Dtype  # of the stored elements
    codec: Annotated[str, one_of("", *CODECS, *MASTER_CODECS, *_ENDS)] = ""

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return dtype_of(self.dtype).itemsize

    @property
    def is_beside(self) -> bool:
        """Whether it belongs to the array before it, and is not a state of its own."""
        return self.codec in _ENDS

    @property
    def base_name(self) -> str:
        """Name of the optimizer's state, also for its scales or remainders."""
        return self.name.removesuffix(_ENDS.get(self.codec, ""))

    def num_elements(self, num_leaf_elements: int) -> int:
        """Returns the number of its elements for a number of the leaf's."""
        if self.codec == "scale":
            return -(-num_leaf_elements // CODE_BLOCK)
        return num_leaf_elements

    def coded(self, codec: str) -> tuple["StateRecord", ...]:
        """Returns the arrays that store this state with a codec, or without one."""
        if not codec:
            return (self,)
        dtype, *beside = _CODED[codec]
        more = (StateRecord(self.name + _ENDS[x], d, x) for x, d in beside)
        return (StateRecord(self.name, dtype, codec), *more)

    def decoded(self) -> "StateRecord":
        """Returns the state in the form that the optimizer computes with."""
        return StateRecord(self.base_name, "float32") if self.codec else self

    @property
    def stored(self) -> tuple["StateRecord", ...]:
        """The arrays that store this state: its own, and the one beside it, if any."""
        return self.decoded().coded(self.codec)

    def encode(self, values: Array, key: int | None, first: int = 0) -> list[Array]:
        """Returns ``(n,)`` decoded values as they are stored, in its one or two arrays.

        `key` and `first` are those of `CodedSlot`.
        """
        if not self.codec:
            return [np.ascontiguousarray(values, dtype_of(self.dtype))]
        forms = [(one.num_elements(values.size), one.dtype) for one in self.stored]
        arrays = [np.empty(length, dtype_of(dtype)) for length, dtype in forms]
        CodedSlot(*arrays, key=key, first=first).encode(values)
        return arrays


class LeafRecord(Document, frozen=True, kw_only=True, dict=True, gc=True):
    """One leaf of the params tree.

    In a member the CSD of a chunk that another one holds is -1, on disk 0. Before a
    leaf is laid out, it has neither a chunk shape nor CSDs.
    """

    path: _Path
    shape: Lengths
    dtype: Dtype  # of the params on the JAX device
    kernel: str  # key into `Manifest.kernels`
    states: Annotated[tuple[StateRecord, ...], Meta(min_length=1)]  # the master first
    chunk_shape: _Parts  # of every state's array
    shard_counts: _Parts  # along each dimension, when the store was made
    csds: tuple[_Csd, ...]  # of each chunk, in grid order
    owners: tuple[Process, ...] = ()  # in a member, the member that holds each chunk

    @property
    def name(self) -> str:
        """The leaf's keys joined by ``/``."""
        return leaf_name(self.path)

    def array_name(self, state: str) -> str:
        """Returns the directory of a state's array, relative to a slot."""
        return array_name(state, self.path)

    def state(self, name: str) -> StateRecord:
        """Returns the record of a stored array, which must exist."""
        return next(state for state in self.states if state.name == name)

    @property
    def decoded_states(self) -> tuple[StateRecord, ...]:
        """The states that the optimizer computes with, the master params first."""
        return tuple(s.decoded() for s in self.states if not s.is_beside)

    # --- chunks ----------------------------------------------------------------------

    @cached_property
    def grid(self) -> LeafGrid:
        """The chunk grid."""
        return shared_grid(self.shape, self.chunk_shape)

    def chunks(self, state: StateRecord) -> Sequence[Chunk]:
        """Returns the chunks of a state's array, one for each of the leaf's grid."""
        is_scale = state.codec == "scale"
        return scale_chunks(self.grid) if is_scale else self.grid.chunks()

    @property
    def chunk_bytes(self) -> list[int]:
        """Bytes of each chunk on the drive, all states together."""
        return [
            sum(ChunkFile(-1, self, state, number).drive_bytes for state in self.states)
            for number in range(self.grid.num_chunks)
        ]

    @cached_property
    def held(self) -> Sequence[int]:
        """Numbers of the chunks that this store holds, in grid order."""
        return tuple(number for number, csd in enumerate(self.csds) if csd >= 0)

    @property
    def is_whole(self) -> bool:
        """Whether this store holds all chunks."""
        return len(self.held) == len(self.csds)

    @cached_property
    def places(self) -> Sequence[int]:
        """Each chunk's position in `held`; -1 for one that is not held."""
        count = itertools.count()
        return tuple(-1 if csd < 0 else next(count) for csd in self.csds)


class ChunkFile(NamedTuple):
    """A chunk's file in each step of a store."""

    number: int  # of the leaf; -1 for a reader, which needs none
    leaf: LeafRecord
    state: StateRecord
    chunk: int  # its number in the leaf's grid

    @property
    def layout(self) -> Chunk:
        """Its place in the state's array."""
        return self.leaf.chunks(self.state)[self.chunk]

    @property
    def csd(self) -> int:
        """The CSD that holds it."""
        return self.leaf.csds[self.chunk]

    @property
    def array(self) -> str:
        """The directory of the state's array, relative to a step."""
        return self.leaf.array_name(self.state.name)

    @property
    def name(self) -> str:
        """Its file, relative to a step."""
        return f"{self.array}/{self.layout.key}"

    @property
    def num_bytes(self) -> int:
        """Bytes of its elements."""
        return self.layout.num_elements * self.state.itemsize

    @property
    def file_bytes(self) -> int:
        """Length of its file, with the padding that other readers need."""
        return self.layout.stored_elements * self.state.itemsize

    @property
    def drive_bytes(self) -> int:
        """Bytes that it takes on the drive: whole pages."""
        return page_ceil(self.num_bytes)

    def __str__(self) -> str:
        return (
            f"leaf {self.leaf.name}, {self.state.name}, chunk {self.chunk} of "
            f"{len(self.leaf.csds)}, on CSD {self.csd}"
        )


class Member(Document, frozen=True):
    """A store's part in a run of several processes, each of which has a store."""

    run: Id  # the same in all members
    number: Process  # this member's
    count: Annotated[int, Meta(ge=2, le=2**20)]


class Manifest(Document, frozen=True, kw_only=True, dict=True, gc=True):
    """The content of ``jaxinf.json``; see docs/format.md for each key.

    One with an empty `store_id` has contents without places, as `lay_out` takes them.
    """

    format: Literal["jaxinf"]
    format_version: Literal[3]
    store_id: Id
    created_by: dict[str, str]
    csds: Roots
    kernels: dict[str, tuple[str, ...]]
    leaves: tuple[LeafRecord, ...]
    member: Member | None = None

    @classmethod
    def of_contents(
        cls, leaves: Sequence[LeafRecord], kernels: dict[str, tuple[str, ...]]
    ) -> "Manifest":
        """Makes one without places, of leaves in the order of the flattened params.

        Kernels are the updates' equations as text, by id.
        """
        header = {"format": "jaxinf", "format_version": FORMAT_VERSION, "store_id": ""}
        made = {"created_by": package_versions(), "csds": ()}
        return cls(**header, **made, kernels=kernels, leaves=tuple(leaves))

    @cached_property
    def num_params(self) -> int:
        """Elements over all leaves."""
        return sum(math.prod(leaf.shape) for leaf in self.leaves)

    @cached_property
    def num_held_params(self) -> int:
        """Elements of the chunks that this store holds."""
        firsts = (one for one in self.held() if one.state is one.leaf.states[0])
        return sum(one.layout.num_elements for one in firsts)

    def arrays(self) -> Iterator[tuple[str, LeafRecord, StateRecord]]:
        """Yields the name of each array in a step, its leaf and its state."""
        for leaf in self.leaves:
            for state in leaf.states:
                yield leaf.array_name(state.name), leaf, state

    def no_checksums(self) -> dict[str, np.ndarray]:
        """Returns an array of zeros for the checksums of each array's chunks."""
        return {n: np.zeros(len(leaf.csds), np.uint32) for n, leaf, _ in self.arrays()}

    def held(self) -> Iterator[ChunkFile]:
        """Yields the chunks that this store holds, by array."""
        for number, leaf in enumerate(self.leaves):
            for state in leaf.states:
                for chunk in leaf.held:
                    yield ChunkFile(number, leaf, state, chunk)

    @property
    def state_names(self) -> tuple[str, ...]:
        """Every state's name, the master params first."""
        names = dict.fromkeys(s.name for leaf in self.leaves for s in leaf.states)
        return tuple(names) or (MASTER_PARAMS,)

    @cached_property
    def common(self) -> dict[str, Any]:
        """The part that all members of a run have in common, as JSON."""
        document = self.to_json()
        for leaf in document["leaves"]:
            del leaf["csds"]
        return {name: document[name] for name in ("kernels", "leaves", "created_by")}

    def tree_difference(self, other: "Manifest") -> list[str]:
        """Lists differences between the leaves and states of `other` and these.

        Grids, CSDs and versions are not compared; they may differ between stores.
        """
        mine, theirs = ({n.name: _form(n) for n in m.leaves} for m in (self, other))
        lines = [
            f"leaf {name}: {mine.get(name, 'none')} in the store, "
            f"{theirs.get(name, 'none')} given"
            for name in {**mine, **theirs}
            if mine.get(name) != theirs.get(name)
        ]
        if not lines and list(mine) != list(theirs):
            lines.append("the same leaves come in another order")
        return lines

    def kernel_difference(self, other: "Manifest") -> list[str]:
        """Describes the first update that differs; the leaves must be the same."""
        for mine, theirs in zip(self.leaves, other.leaves, strict=True):
            old, new = self.kernels[mine.kernel], other.kernels[theirs.kernel]
            if old != new:
                diff = difflib.unified_diff(old, new, "store", "optimizer", lineterm="")
                return [f"the update of leaf {mine.name} has other equations:", *diff]
        return []

    # --- on disk ---------------------------------------------------------------------

    def to_json(self) -> dict[str, Any]:
        """Returns its form on disk."""
        found = msgspec.to_builtins(self)
        for leaf in found["leaves"]:
            leaf["states"] = [[part for part in s if part] for s in leaf["states"]]
            leaf["csds"] = [max(0, csd) for csd in leaf["csds"]]
        return found

    def write(self, path: Path) -> None:
        """Writes the manifest; blocks until it is durable."""
        write_bytes_atomically(path, seal(self.to_json()))

    @classmethod
    def read(cls, path: Path | str, raw: bytes | None = None) -> "Manifest":
        """Reads ``jaxinf.json``; raises as `read_document`, whose `raw` is this."""
        hooks = {"check": check_version, "finish": _checked}
        return read_document(path, cls, _WHAT, _REMEDY, raw=raw, **hooks)


def without_csds(manifest: Manifest) -> Manifest:
    """Returns a store's manifest whose chunks are all in one place."""
    leaves = (replace(leaf, csds=(0,) * len(leaf.csds)) for leaf in manifest.leaves)
    return replace(manifest, csds=(), leaves=tuple(leaves))


def held_by(leaf: LeafRecord, owners: Sequence[int], member: Member) -> LeafRecord:
    """Returns a leaf as a member has it: chunks of others are on no CSD."""
    pairs = zip(leaf.csds, owners, strict=True)
    csds = tuple(csd if own == member.number else -1 for csd, own in pairs)
    return replace(leaf, owners=tuple(owners), csds=csds)


def _form(leaf: LeafRecord) -> str:
    """Describes what must be the same in a store and in the run that opens it."""
    states = ", ".join(f"{state.name} {state.dtype}" for state in leaf.decoded_states)
    return f"shape {leaf.shape}, params {leaf.dtype}, states ({states})"


def check_version(document: Any) -> None:
    """Raises ValueError for a document of another format version, or of none."""
    found = document.get("format_version") if isinstance(document, dict) else None
    if type(found) is not int or found != FORMAT_VERSION:
        raise ValueError(
            f"format version {shorten(found)}, expected {FORMAT_VERSION}; a higher "
            "one is a newer jaxinf's"
        )


def _checked(held: Manifest) -> Manifest:
    """Returns a manifest as its member has it; ValueError if its parts do not fit."""
    member = held.member
    if member is not None and member.number >= member.count:
        raise ValueError(f"member {member.number} of {member.count}")
    for leaf in held.leaves:
        problem = _problem(leaf, 0 if member is None else member.count)
        if leaf.kernel not in held.kernels:
            problem = f"no kernel {leaf.kernel!r}"
        if max(leaf.csds, default=0) >= max(1, len(held.csds)):
            problem = f"no such CSDs: {leaf.csds}"
        if problem:
            raise ValueError(f"leaf {leaf.name}: {problem}")
    if not all(name == encode_key(name) for name in held.state_names):
        raise ValueError(f"states {held.state_names} are no file names")
    check_leaf_paths([leaf.path for leaf in held.leaves], held.state_names)
    if member is None:
        return held
    leaves = [held_by(leaf, leaf.owners, member) for leaf in held.leaves]
    return replace(held, leaves=tuple(leaves))


def _problem(leaf: LeafRecord, num_members: int) -> str | None:
    """Says what is wrong with a leaf; None if nothing is."""
    master, num_chunks = leaf.states[0], len(leaf.csds)
    lengths = [math.prod(leaf.shape), math.prod(leaf.chunk_shape)]
    if len(leaf.shard_counts) != len(leaf.shape):
        return f"{len(leaf.shard_counts)} shard counts"
    if lengths[0] >= _MOST_ELEMENTS or lengths[1] > _MOST_CHUNK_ELEMENTS:
        return "more elements than a leaf or chunk has"
    if len({state.name for state in leaf.states}) != len(leaf.states):
        return "two states of one name"
    if master.is_beside or master.decoded() != StateRecord(MASTER_PARAMS, "float32"):
        return "no float32 params first"
    if master.codec and (master.codec not in MASTER_CODECS or leaf.dtype != "bfloat16"):
        return f"{leaf.dtype} params coded as {master.codec!r}"
    if leaf.grid.num_chunks != num_chunks:
        return f"{leaf.grid.num_chunks} chunks, {num_chunks} CSDs"
    is_owned = len(leaf.owners) == (num_chunks if num_members else 0)
    if not is_owned or max(leaf.owners, default=-1) >= num_members:
        return f"{num_chunks} chunks, owners {shorten(leaf.owners)} of {num_members}"
    if any(state.codec == "split" for state in leaf.states[1:]):
        return "a state coded as 'split', which the params alone may be"
    own = [state.stored for state in leaf.states if not state.is_beside]
    if leaf.states != tuple(itertools.chain(*own)):
        return "codes without what belongs to them behind them"
    return None
