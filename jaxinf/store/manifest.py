"""``jaxinf.json``: the contents of a store, and the places of its chunks.

Invariant: a manifest is immutable and round-trips through JSON unchanged. Anything that
does not parse is a `StoreFormatError`; nothing is guessed.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import Meta

from jaxinf.documents import Document, one_of, shown
from jaxinf.errors import StoreFormatError
from jaxinf.layout import LeafGrid, scales_length, shared_grid
from jaxinf.store.contents import (
    BESIDE,
    CODECS,
    MASTER_CODECS,
    LeafContents,
    StateRecord,
    StoreContents,
)
from jaxinf.store.documents import (
    Csds,
    Dtype,
    Id,
    Lengths,
    Name,
    Roots,
    read_document,
    refusing,
    write_document,
)
from jaxinf.store.names import (
    MASTER_PARAMS,
    array_name,
    check_leaf_paths,
    encode_key,
)

FORMAT_VERSION = 3
"""Version of a store; the first that a release of jaxinf writes."""

MEMBER_VERSION = 4
"""Version of a store that is a member: it holds a part of the chunks of its leaves."""

VERSIONS = (FORMAT_VERSION, MEMBER_VERSION)
"""The versions of stores that this jaxinf opens."""

_WHAT = "the manifest of a jaxinf store"
_REMEDY = (
    "restore the file from a checkpoint of the store (checkpoints/NAME/jaxinf.json) or "
    "a backup, or remove the store and start again"
)
_MOST_ELEMENTS = 1 << 58  # with 16 bytes each, 2^62 bytes
_MOST_CHUNK_ELEMENTS = 1 << 36  # 16,384 times the usual size of a chunk


_Process: TypeAlias = Annotated[int, Meta(ge=0, lt=2**20)]


class Member(Document, frozen=True):
    """A store's part in a run of several processes, each of which has a store.

    Attributes:
      run: id of the run, 32 hex digits; the same in all members.
      number: number of this member's process.
      count: number of members.
    """

    run: Id
    number: _Process
    count: Annotated[int, Meta(ge=2, le=2**20)]


class _State(Document, frozen=True, array_like=True):
    name: Name
    dtype: Dtype
    codec: Annotated[str, one_of("", *CODECS, *MASTER_CODECS, *BESIDE)] = ""


_Parts: TypeAlias = Annotated[
    tuple[Annotated[int, Meta(ge=1, le=2**62 - 1)], ...], Meta(max_length=64)
]


class _Leaf(Document, frozen=True):
    path: Annotated[
        tuple[Annotated[str, Meta(max_length=255)], ...], Meta(max_length=255)
    ]
    shape: Lengths
    dtype: Dtype
    kernel: str
    states: Annotated[tuple[_State, ...], Meta(min_length=1)]
    chunk_shape: _Parts
    shard_counts: _Parts
    csds: Csds
    owners: tuple[_Process, ...] = ()


class _Manifest(Document, frozen=True, tag_field="format", tag="jaxinf"):
    format_version: Literal[3, 4]
    store_id: Id
    created_by: dict[str, str]
    csds: Roots
    kernels: dict[str, tuple[str, ...]]
    leaves: tuple[_Leaf, ...]
    member: Member | None = None


@dataclass(frozen=True, kw_only=True)
class LeafRecord(LeafContents):
    """One leaf, with the places of its chunks.

    Attributes:
      chunk_shape: chunk shape of every state's array.
      csds: the CSD of each chunk, in grid order; 0 for one that is not held.
      owners: in a member, the number of the member that holds each chunk; else empty.
      member: number of this member.
    """

    chunk_shape: tuple[int, ...]
    csds: tuple[int, ...]
    owners: tuple[int, ...] = ()
    member: int = 0

    @cached_property
    def held(self) -> Sequence[int]:
        """Numbers of the chunks that this store holds, in grid order."""
        if not self.owners:
            return range(len(self.csds))
        return tuple(n for n, own in enumerate(self.owners) if own == self.member)

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

    @classmethod
    def of(
        cls, leaf: LeafContents, chunk_shape: tuple[int, ...], csds: tuple[int, ...]
    ) -> "LeafRecord":
        """Makes a leaf with new places of its chunks."""
        own = {item.name: getattr(leaf, item.name) for item in fields(LeafContents)}
        return cls(**own, chunk_shape=chunk_shape, csds=csds)

    @cached_property
    def grid(self) -> LeafGrid:
        """The chunk grid."""
        return shared_grid(self.shape, self.chunk_shape)

    @property
    def chunk_bytes(self) -> list[int]:
        """Bytes of each chunk on the drive, all states together."""
        chunks = self.grid.chunks()
        return [sum(one.stored_bytes(chunk) for one in self.states) for chunk in chunks]

    def array_grid(self, state: StateRecord) -> tuple[Sequence[int], Sequence[int]]:
        """Returns shape and chunk shape of a state's array."""
        if state.codec != "scale":
            return self.shape, self.chunk_shape
        length = scales_length(self.grid)
        return (len(self.csds) * length,), (length,)

    def array_name(self, state: str) -> str:
        """Returns the directory of a state's array, relative to a slot."""
        return array_name(state, self.path)


@dataclass(frozen=True, kw_only=True)
class Manifest(StoreContents):
    """The content of ``jaxinf.json``; see docs/format.md for each key."""

    store_id: str
    csds: tuple[str, ...]
    leaves: tuple[LeafRecord, ...]
    format_version: int = FORMAT_VERSION
    member: Member | None = None

    @cached_property
    def common(self) -> dict[str, Any]:
        """The part that all members of a run have in common, as JSON."""
        document = self.to_json()
        for leaf in document["leaves"]:
            del leaf["csds"]
        return {name: document[name] for name in ("kernels", "leaves", "created_by")}

    @cached_property
    def num_held_params(self) -> int:
        """Elements of the chunks that this store holds."""
        if self.member is None:
            return self.num_params
        chunks = [(leaf, leaf.grid.chunks()) for leaf in self.leaves]
        return sum(own[n].num_elements for leaf, own in chunks for n in leaf.held)

    @property
    def state_names(self) -> tuple[str, ...]:
        """Every state's name, the master params first."""
        names = dict.fromkeys(s.name for leaf in self.leaves for s in leaf.states)
        return tuple(names) or (MASTER_PARAMS,)

    @property
    def decoded(self) -> "Manifest":
        """Returns the same store without codecs."""
        leaves = [replace(leaf, states=leaf.slots) for leaf in self.leaves]
        return replace(self, leaves=tuple(leaves))

    def to_json(self) -> dict[str, Any]:
        """Returns its form on disk."""
        document = msgspec.convert(self, _Manifest, from_attributes=True)
        found = msgspec.to_builtins(document)
        for leaf in found["leaves"]:
            leaf["states"] = [[part for part in s if part] for s in leaf["states"]]
        return found

    def write(self, path: Path) -> None:
        """Writes the manifest; blocks until it is durable."""
        write_document(path, self.to_json())

    @classmethod
    def read(cls, path: Path) -> "Manifest":
        """Reads ``jaxinf.json``.

        Raises:
          StoreFormatError: the manifest is damaged, or of another format.
        """
        check = partial(_check_header, path)
        held = read_document(path, _Manifest, _WHAT, _REMEDY, check=check)
        with refusing(path, _WHAT, _REMEDY):
            manifest = msgspec.convert(held, cls, from_attributes=True)
            if member := held.member:
                leaves = [replace(n, member=member.number) for n in manifest.leaves]
                manifest = replace(manifest, leaves=tuple(leaves))
            manifest._check()
        return manifest

    def _check(self) -> None:
        """Raises ValueError if the parts do not fit each other."""
        if (self.member is None) != (self.format_version == FORMAT_VERSION):
            raise ValueError(f"format_version {self.format_version}: {self.member}")
        for leaf in self.leaves:
            _check_size(leaf)
            if leaf.kernel not in self.kernels:
                raise ValueError(f"leaf {leaf.name}: no kernel {leaf.kernel!r}")
            _check_master(leaf)
            num_chunks = leaf.grid.num_chunks
            if len(leaf.csds) != num_chunks:
                raise ValueError(
                    f"leaf {leaf.name}: {num_chunks} chunks, {len(leaf.csds)} CSDs"
                )
            _check_owners(leaf, self.member)
            if not all(0 <= csd < max(1, len(self.csds)) for csd in leaf.csds):
                raise ValueError(f"leaf {leaf.name}: no such CSDs: {leaf.csds}")
            _check_codecs(leaf)
        states = {state.name for leaf in self.leaves for state in leaf.states}
        if not all(name == encode_key(name) for name in states):
            raise ValueError(f"states {sorted(states)} are no file names")
        check_leaf_paths([leaf.path for leaf in self.leaves], states)


def _check_owners(leaf: LeafRecord, member: Member | None) -> None:
    """Raises ValueError unless each chunk of a member's leaf has an owner."""
    if member is None:
        if leaf.owners:
            raise ValueError(f"leaf {leaf.name}: owners in a store that is whole")
        return
    if member.number >= member.count:
        raise ValueError(f"member {member.number} of {member.count}")
    if (
        len(leaf.owners) != len(leaf.csds)
        or max(leaf.owners, default=0) >= member.count
    ):
        raise ValueError(
            f"leaf {leaf.name}: {len(leaf.csds)} chunks of {member.count} members, "
            f"owners {shown(leaf.owners)}"
        )


def _check_size(leaf: LeafRecord) -> None:
    """Raises ValueError for impossible lengths, or two states of one name."""
    if len(leaf.shard_counts) != len(leaf.shape):
        raise ValueError(f"leaf {leaf.name}: {len(leaf.shard_counts)} shard counts")
    lengths = [math.prod(leaf.shape), math.prod(leaf.chunk_shape)]
    if lengths[0] >= _MOST_ELEMENTS or lengths[1] > _MOST_CHUNK_ELEMENTS:
        raise ValueError(f"leaf {leaf.name}: more elements than a leaf or chunk has")
    names = [state.name for state in leaf.states]
    if len(set(names)) != len(names):
        raise ValueError(f"leaf {leaf.name}: two states of one name")


def _check_master(leaf: LeafRecord) -> None:
    """Raises ValueError unless valid master params are the first state."""
    if leaf.slots[:1] != (StateRecord(MASTER_PARAMS, "float32"),):
        raise ValueError(f"leaf {leaf.name}: no float32 params first")
    codec = leaf.states[0].codec
    if codec and (codec not in MASTER_CODECS or leaf.dtype != "bfloat16"):
        raise ValueError(f"leaf {leaf.name}: {leaf.dtype} params coded as {codec!r}")


def _check_codecs(leaf: LeafRecord) -> None:
    """Raises ValueError unless each codec has the arrays that it needs."""
    known = {*CODECS, *MASTER_CODECS}
    for number, state in enumerate(leaf.states):
        if state.codec == "split" and number:
            raise ValueError(f"leaf {leaf.name}: {state.name} is no master")
        if state.codec in known:
            wanted = StateRecord(state.name, "float32").coded(state.codec)
            if leaf.states[number : number + len(wanted)] != wanted:
                raise ValueError(f"leaf {leaf.name}: {state.name} is not {wanted}")


def version_of(document: Any) -> Any:
    """Returns a document's format version, whatever it is; None if there is none."""
    return document.get("format_version") if isinstance(document, dict) else None


def _check_header(path: Path, document: Any) -> None:
    if not isinstance(document, Mapping) or document.get("format") != "jaxinf":
        raise StoreFormatError(
            f'{path}: expected "format": "jaxinf", found another document; this is '
            "not the manifest of a jaxinf store"
        )
    version = document.get("format_version")
    is_number = type(version) is int
    if not is_number or version not in VERSIONS:
        remedy = "the manifest is damaged; restore it from a backup"
        if is_number and 0 < version < FORMAT_VERSION:
            remedy = (
                "it is older than any release: export its params with the checkout of "
                "jaxinf that wrote it and start a run from them, or start again"
            )
        elif is_number and version > max(VERSIONS):
            remedy = "open it with a newer jaxinf"
        raise StoreFormatError(
            f"{path}: this jaxinf reads format version {FORMAT_VERSION}, the store has "
            f"{shown(version)}; {remedy}"
        )
