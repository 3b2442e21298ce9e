"""``jaxinf.json``: the contents of a store, and the places of its chunks.

Invariant: a manifest is immutable and round-trips through JSON unchanged. Anything that
does not parse is a `StoreFormatError`; nothing is guessed.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from jaxinf.errors import StoreFormatError
from jaxinf.layout import LeafGrid, scales_length
from jaxinf.schema import SchemaError, shown
from jaxinf.store.contents import (
    BESIDE,
    CODECS,
    MASTER_CODECS,
    LeafContents,
    StateRecord,
    StoreContents,
)
from jaxinf.store.documents import (
    check_seal,
    no_document,
    read_document,
    write_document,
)
from jaxinf.store.names import (
    MASTER_PARAMS,
    array_name,
    check_leaf_paths,
    encode_key,
)
from jaxinf.store.schemas import MANIFEST

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


@dataclass(frozen=True)
class Member:
    """A store's part in a run of several processes, each of which has a store.

    Attributes:
      run: id of the run, 32 hex digits; the same in all members.
      number: number of this member's process.
      count: number of members.
    """

    run: str
    number: int
    count: int


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
        return LeafGrid(shape=self.shape, chunk_shape=self.chunk_shape)

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

    def as_member(
        self,
        member: Member,
        owners: Sequence[Sequence[int]],
        csds: Sequence[Sequence[int]],
    ) -> "Manifest":
        """Returns the manifest of a member.

        Args:
          member: the member.
          owners: the member that holds each chunk, by leaf.
          csds: the CSD of each chunk, by leaf; 0 for one that is not held.
        """
        leaves = [
            replace(leaf, owners=tuple(own), csds=tuple(at), member=member.number)
            for leaf, own, at in zip(self.leaves, owners, csds, strict=True)
        ]
        return replace(
            self, leaves=tuple(leaves), member=member, format_version=MEMBER_VERSION
        )

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
        document = {
            "format": "jaxinf",
            "format_version": self.format_version,
            "store_id": self.store_id,
            "created_by": dict(self.created_by),
            "csds": list(self.csds),
            "kernels": {key: list(lines) for key, lines in self.kernels.items()},
            "leaves": [_leaf_to_json(leaf) for leaf in self.leaves],
        }
        if self.member is not None:
            document["member"] = asdict(self.member)
            for leaf, written in zip(self.leaves, document["leaves"], strict=True):
                written["owners"] = list(leaf.owners)
        return document

    def write(self, path: Path) -> None:
        """Writes the manifest; blocks until it is durable."""
        write_document(path, self.to_json())

    @classmethod
    def read(cls, path: Path) -> "Manifest":
        """Reads ``jaxinf.json``.

        Raises:
          StoreFormatError: the manifest is damaged, or of another format.
        """
        raw, document = read_document(path, _WHAT, _REMEDY)
        _check_header(path, document)
        check_seal(path, raw, _WHAT, _REMEDY)
        try:
            MANIFEST[document["format_version"]].check(document)
            return cls._from_json(document)
        except ValueError as error:
            raise no_document(path, _WHAT, _REMEDY, error) from error

    @classmethod
    def _from_json(cls, document: Mapping[str, Any]) -> "Manifest":
        member = Member(**document["member"]) if "member" in document else None
        manifest = cls(
            store_id=document["store_id"],
            csds=tuple(document["csds"]),
            kernels={k: tuple(v) for k, v in document["kernels"].items()},
            leaves=tuple(_leaf_from_json(leaf, member) for leaf in document["leaves"]),
            member=member,
            created_by=dict(document["created_by"]),
            format_version=document["format_version"],
        )
        manifest._check()
        return manifest

    def _check(self) -> None:
        """Raises ValueError if the parts do not fit each other."""
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
    """Raises SchemaError unless each chunk of a member's leaf has an owner."""
    if member is None:
        return
    if member.number >= member.count:
        raise SchemaError(f"member {member.number} of {member.count}")
    if (
        len(leaf.owners) != len(leaf.csds)
        or max(leaf.owners, default=0) >= member.count
    ):
        raise SchemaError(
            f"leaf {leaf.name}: {len(leaf.csds)} chunks of {member.count} members, "
            f"owners {shown(leaf.owners)}"
        )


def _check_size(leaf: LeafRecord) -> None:
    """Raises SchemaError for impossible lengths, or two states of one name."""
    if len(leaf.shard_counts) != len(leaf.shape):
        raise SchemaError(f"leaf {leaf.name}: {len(leaf.shard_counts)} shard counts")
    lengths = [math.prod(leaf.shape), math.prod(leaf.chunk_shape)]
    if lengths[0] >= _MOST_ELEMENTS or lengths[1] > _MOST_CHUNK_ELEMENTS:
        raise SchemaError(f"leaf {leaf.name}: more elements than a leaf or chunk has")
    names = [state.name for state in leaf.states]
    if len(set(names)) != len(names):
        raise SchemaError(f"leaf {leaf.name}: two states of one name")


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
        if state.codec not in ("", *known, *BESIDE):
            raise ValueError(f"leaf {leaf.name}: no codec {state.codec!r}")
        if state.codec == "split" and number:
            raise ValueError(f"leaf {leaf.name}: {state.name} is no master")
        if state.codec in known:
            wanted = StateRecord(state.name, "float32").coded(state.codec)
            if leaf.states[number : number + len(wanted)] != wanted:
                raise ValueError(f"leaf {leaf.name}: {state.name} is not {wanted}")


def _leaf_to_json(leaf: LeafRecord) -> dict[str, Any]:
    return {
        "path": list(leaf.path),
        "shape": list(leaf.shape),
        "dtype": leaf.dtype,
        "kernel": leaf.kernel,
        "states": [
            [s.name, s.dtype, s.codec] if s.codec else [s.name, s.dtype]
            for s in leaf.states
        ],
        "chunk_shape": list(leaf.chunk_shape),
        "shard_counts": list(leaf.shard_counts),
        "csds": list(leaf.csds),
    }


def _leaf_from_json(document: Mapping[str, Any], member: Member | None) -> LeafRecord:
    states = tuple(StateRecord(*fields) for fields in document["states"])
    return LeafRecord(
        path=tuple(document["path"]),
        shape=tuple(document["shape"]),
        dtype=document["dtype"],
        kernel=document["kernel"],
        states=states,
        chunk_shape=tuple(document["chunk_shape"]),
        shard_counts=tuple(document["shard_counts"]),
        csds=tuple(document["csds"]),
        owners=tuple(document.get("owners", ())),
        member=0 if member is None else member.number,
    )


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
