"""``jaxinf.json``: the leaves of a store, and the CSDs of their chunks.

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

from jaxinf.documents import Document, first_few, one_of, shorten
from jaxinf.layout import (
    CODE_BLOCK,
    Chunk,
    CodedSlot,
    LeafGrid,
    scale_chunks,
    shared_grid,
)
from jaxinf.store.documents import Dtype, Id, Lengths, Name, Roots, read_document, seal
from jaxinf.store.names import (
    MASTER_PARAMS,
    array_name,
    check_leaf_paths,
    encode_key,
    leaf_name,
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
_MAX_ELEMENTS = 1 << 58  # with 16 bytes each, 2^62 bytes
_MAX_CHUNK_ELEMENTS = 1 << 30  # 256 times the usual size of a chunk

# Codecs of companions: arrays that belong to the array before them; name suffixes.
_SUFFIXES = {"scale": "_scale", "remainder": "_remainder"}

# The dtype of each codec; codec and dtype of its companion, if it has one.
_CODED: dict[str, tuple[Any, ...]] = {
    "bf16": ("bfloat16",),
    "split": ("bfloat16", ("remainder", "int16")),
    "int8": ("uint8", ("scale", "float32")),
}

_Process: TypeAlias = Annotated[int, Meta(ge=0, lt=2**20)]
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
    """One stored array of a leaf: a state, or the companion of the state before it.

    Codecs encode float32. ``"bf16"``: rounded stochastically. ``"int8"``: codes, with
    their scales in a companion array of codec ``"scale"``. ``"split"``: rounded to
    bfloat16, with remainders in a companion of codec ``"remainder"``. Without a codec
    the optimizer computes with the stored elements.
    """

    name: Name  # of the optax state's field, perhaps with one of `_SUFFIXES`
    dtype: Dtype  # of the stored elements
    codec: Annotated[str, one_of("", *CODECS, *MASTER_CODECS, *_SUFFIXES)] = ""

    @property
    def itemsize(self) -> int:
        return dtype_of(self.dtype).itemsize

    @property
    def is_companion(self) -> bool:
        """Whether it holds another state's scales or remainders."""
        return self.codec in _SUFFIXES

    @property
    def base_name(self) -> str:
        """Name of the optimizer's state, also of a companion's."""
        return self.name.removesuffix(_SUFFIXES.get(self.codec, ""))

    def num_elements(self, num_leaf_elements: int) -> int:
        """Returns the length of the array for so many elements of the leaf."""
        if self.codec == "scale":
            return -(-num_leaf_elements // CODE_BLOCK)
        return num_leaf_elements

    def coded(self, codec: str) -> tuple["StateRecord", ...]:
        """Returns the arrays that store this state with a codec; "" is none."""
        if not codec:
            return (self,)
        dtype, *forms = _CODED[codec]
        companions = (StateRecord(self.name + _SUFFIXES[x], d, x) for x, d in forms)
        return (StateRecord(self.name, dtype, codec), *companions)

    def decoded(self) -> "StateRecord":
        """Returns the state in the form that the optimizer computes with."""
        return StateRecord(self.base_name, "float32") if self.codec else self

    @property
    def stored(self) -> tuple["StateRecord", ...]:
        """The arrays that store this state: its own, perhaps with a companion."""
        return self.decoded().coded(self.codec)

    def encode(self, values: Array, key: int | None, first: int = 0) -> list[Array]:
        """Encodes ``(n,)`` values; returns the elements of each of the `stored` arrays.

        `key` and `first` are those of `CodedSlot`.
        """
        if not self.codec:
            return [np.ascontiguousarray(values, dtype_of(self.dtype))]
        forms = [(s.num_elements(values.size), s.dtype) for s in self.stored]
        arrays = [np.empty(length, dtype_of(dtype)) for length, dtype in forms]
        CodedSlot(*arrays, key=key, first=first).encode(values)
        return arrays


class LeafRecord(Document, frozen=True, kw_only=True, dict=True, gc=True):
    """One leaf of the params tree.

    In a member's manifest the CSD of a chunk that another member holds is -1; on disk
    it is 0. Before chunks are placed, `csds` is empty.
    """

    path: _Path
    shape: Lengths
    dtype: Dtype  # of the params on the JAX device
    kernel: str  # key into `Manifest.kernels`
    states: Annotated[tuple[StateRecord, ...], Meta(min_length=1)]  # the master first
    chunk_shape: _Parts  # of every state's array
    shard_counts: _Parts  # along each dimension, when the store was made
    csds: tuple[_Csd, ...]  # of each chunk, in grid order
    owners: tuple[_Process, ...] = ()  # in a run, the member that holds each chunk

    @property
    def name(self) -> str:
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
        return tuple(s.decoded() for s in self.states if not s.is_companion)

    @cached_property
    def grid(self) -> LeafGrid:
        return shared_grid(self.shape, self.chunk_shape)

    def chunks(self, state: StateRecord) -> Sequence[Chunk]:
        """Returns the chunks of a state's array, one for each chunk of the grid."""
        is_scale = state.codec == "scale"
        return scale_chunks(self.grid) if is_scale else self.grid.chunks()

    @property
    def chunk_bytes(self) -> list[int]:
        """Bytes of each chunk on the drive, over all states."""
        return [
            sum(ChunkFile(-1, self, state, number).drive_bytes for state in self.states)
            for number in range(self.grid.num_chunks)
        ]

    @cached_property
    def held_numbers(self) -> Sequence[int]:
        """Numbers of the chunks that this store holds, in grid order."""
        return tuple(number for number, csd in enumerate(self.csds) if csd >= 0)

    @property
    def is_whole(self) -> bool:
        return len(self.held_numbers) == len(self.csds)

    @cached_property
    def positions(self) -> Sequence[int]:
        """Each chunk's position in `held_numbers`; -1 if another member holds it."""
        count = itertools.count()
        return tuple(-1 if csd < 0 else next(count) for csd in self.csds)


class ChunkFile(NamedTuple):
    """A chunk of a stored array, which is one file in each step of a store."""

    leaf_number: int  # in the manifest; -1 where nobody asks for it
    leaf: LeafRecord
    state: StateRecord
    number: int  # in the leaf's grid

    @property
    def block(self) -> Chunk:
        """The block of the state's array that the file holds."""
        return self.leaf.chunks(self.state)[self.number]

    @property
    def csd(self) -> int:
        return self.leaf.csds[self.number]

    @property
    def array_name(self) -> str:
        return self.leaf.array_name(self.state.name)

    @property
    def name(self) -> str:
        """The file, relative to a step."""
        return f"{self.array_name}/{self.block.key}"

    @property
    def num_bytes(self) -> int:
        return self.block.num_elements * self.state.itemsize

    @property
    def file_bytes(self) -> int:
        """Length of the file, with the padding that other zarr readers need."""
        return self.block.stored_elements * self.state.itemsize

    @property
    def drive_bytes(self) -> int:
        """Bytes on the drive, in whole pages."""
        return page_ceil(self.num_bytes)

    def __str__(self) -> str:
        return (
            f"leaf {self.leaf.name}, {self.state.name}, chunk {self.number} of "
            f"{len(self.leaf.csds)}, on CSD {self.csd}"
        )


class Member(Document, frozen=True):
    """A store's part in a run of several processes, each of which has a store."""

    run: Id  # the same in all members
    number: _Process
    count: Annotated[int, Meta(ge=2, le=2**20)]


class Manifest(Document, frozen=True, kw_only=True, dict=True, gc=True):
    """The content of ``jaxinf.json``; docs/format.md describes each key.

    Its `store_id` is empty until `place_chunks` has given its chunks to CSDs.
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
        """Makes a manifest whose chunks have no CSDs yet.

        Leaves come in the order of the flattened params; `kernels` are the updates'
        equations as text, by id.
        """
        header = {"format": "jaxinf", "format_version": FORMAT_VERSION, "store_id": ""}
        made = {"created_by": package_versions(), "csds": ()}
        return cls(**header, **made, kernels=kernels, leaves=tuple(leaves))

    @cached_property
    def num_params(self) -> int:
        return sum(math.prod(leaf.shape) for leaf in self.leaves)

    @cached_property
    def num_held_params(self) -> int:
        chunks = (c for c in self.held_chunks() if c.state is c.leaf.states[0])
        return sum(chunk.block.num_elements for chunk in chunks)

    def arrays(self) -> Iterator[tuple[str, LeafRecord, StateRecord]]:
        """Yields the name of each array in a step, its leaf and its state."""
        for leaf in self.leaves:
            for state in leaf.states:
                yield leaf.array_name(state.name), leaf, state

    def no_checksums(self) -> dict[str, np.ndarray]:
        """Returns zeros for the checksums of each array's chunks, by array."""
        return {n: np.zeros(len(leaf.csds), np.uint32) for n, leaf, _ in self.arrays()}

    def held_chunks(self) -> Iterator[ChunkFile]:
        """Yields the chunks that this store holds, array after array."""
        for leaf_number, leaf in enumerate(self.leaves):
            for state in leaf.states:
                for number in leaf.held_numbers:
                    yield ChunkFile(leaf_number, leaf, state, number)

    @property
    def state_names(self) -> tuple[str, ...]:
        """Every state's name, the master params first."""
        names = dict.fromkeys(s.name for leaf in self.leaves for s in leaf.states)
        return tuple(names) or (MASTER_PARAMS,)

    @cached_property
    def common(self) -> dict[str, Any]:
        """The part that is the same in all members of a run, as JSON."""
        document = self.to_json()
        for leaf in document["leaves"]:
            del leaf["csds"]
        return {name: document[name] for name in ("kernels", "leaves", "created_by")}

    def tree_difference(self, other: "Manifest") -> list[str]:
        """Lists the differences in leaves and states from a run's manifest.

        Grids, CSDs and versions are not compared; they may differ between stores.
        """
        mine, theirs = _describe_leaves(self), _describe_leaves(other)
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

    def to_json(self) -> dict[str, Any]:
        """Returns the document; other members' chunks are on CSD 0 there."""
        document = msgspec.to_builtins(self)
        for leaf in document["leaves"]:
            leaf["states"] = [[part for part in s if part] for s in leaf["states"]]
            leaf["csds"] = [max(0, csd) for csd in leaf["csds"]]
        return document

    def write(self, path: Path) -> None:
        """Writes the manifest; blocks until it is durable."""
        write_bytes_atomically(path, seal(self.to_json()))

    @classmethod
    def read(cls, path: Path | str, raw: bytes | None = None) -> "Manifest":
        """Reads ``jaxinf.json``, or `raw`, its content; raises as `read_document`."""
        hooks = {"check": check_version, "finish": _check_parts}
        return read_document(path, cls, _WHAT, _REMEDY, raw=raw, **hooks)


def find_leaf(manifest: Manifest, state: str, leaf: str) -> LeafRecord:
    """Returns a leaf by its name; ValueError lists the leaves or states there are."""
    records = {record.name: record for record in manifest.leaves}
    if (record := records.get(leaf.strip("/"))) is None:
        raise ValueError(
            f"no leaf {leaf!r} in the store; there are {first_few(records, most=8)}. "
            "A state comes before its leaf"
        )
    if state not in (states := [stored.name for stored in record.states]):
        listed = ", ".join(states)
        raise ValueError(f"leaf {leaf}: no state {state!r}; there are {listed}")
    return record


def without_csds(manifest: Manifest) -> Manifest:
    """Returns a manifest with all chunks in the store's own directory."""
    leaves = (replace(leaf, csds=(0,) * len(leaf.csds)) for leaf in manifest.leaves)
    return replace(manifest, csds=(), leaves=tuple(leaves))


def leaf_of_member(
    leaf: LeafRecord, owners: Sequence[int], member: Member
) -> LeafRecord:
    """Returns a leaf as a member records it: other members' chunks are on CSD -1."""
    pairs = zip(leaf.csds, owners, strict=True)
    csds = tuple(csd if owner == member.number else -1 for csd, owner in pairs)
    return replace(leaf, owners=tuple(owners), csds=csds)


def _describe_leaves(manifest: Manifest) -> dict[str, str]:
    """Describes, by leaf, what a store and a run that opens it must agree on."""
    described = {}
    for leaf in manifest.leaves:
        states = ", ".join(f"{s.name} {s.dtype}" for s in leaf.decoded_states)
        form = f"shape {leaf.shape}, params {leaf.dtype}, states ({states})"
        described[leaf.name] = form
    return described


def check_version(document: Any) -> None:
    """Raises ValueError for a document of another format version, or of none."""
    number = document.get("format_version") if isinstance(document, dict) else None
    if type(number) is not int or number != FORMAT_VERSION:
        raise ValueError(
            f"format version {shorten(number)}, expected {FORMAT_VERSION}; a higher "
            "one is a newer jaxinf's"
        )


def _check_parts(manifest: Manifest) -> Manifest:
    """Raises ValueError if parts do not fit together; hides other members' chunks."""
    member = manifest.member
    if member is not None and member.number >= member.count:
        raise ValueError(f"member {member.number} of {member.count}")
    for leaf in manifest.leaves:
        problem = _find_problem(leaf, 0 if member is None else member.count)
        if leaf.kernel not in manifest.kernels:
            problem = f"no kernel {leaf.kernel!r}"
        if max(leaf.csds, default=0) >= max(1, len(manifest.csds)):
            problem = f"no such CSDs: {leaf.csds}"
        if problem:
            raise ValueError(f"leaf {leaf.name}: {problem}")
    if not all(name == encode_key(name) for name in manifest.state_names):
        raise ValueError(f"states {manifest.state_names} are no file names")
    check_leaf_paths([leaf.path for leaf in manifest.leaves], manifest.state_names)
    if member is None:
        return manifest
    leaves = [leaf_of_member(leaf, leaf.owners, member) for leaf in manifest.leaves]
    return replace(manifest, leaves=tuple(leaves))


def _find_problem(leaf: LeafRecord, num_members: int) -> str | None:
    master, num_chunks = leaf.states[0], len(leaf.csds)
    lengths = [math.prod(leaf.shape), math.prod(leaf.chunk_shape)]
    if len(leaf.shard_counts) != len(leaf.shape):
        return f"{len(leaf.shard_counts)} shard counts"
    if lengths[0] >= _MAX_ELEMENTS or lengths[1] > _MAX_CHUNK_ELEMENTS:
        return "more elements than a leaf or chunk has"
    if len({state.name for state in leaf.states}) != len(leaf.states):
        return "two states of one name"
    if master.is_companion or master.decoded() != StateRecord(MASTER_PARAMS, "float32"):
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
    stored = [state.stored for state in leaf.states if not state.is_companion]
    if leaf.states != tuple(itertools.chain(*stored)):
        return "codes without what belongs to them behind them"
    return None
