"""``jaxinf.json``: what a store holds, and how two descriptions of it differ.

Invariant: a manifest is immutable and round-trips through JSON unchanged. What cannot
be understood is a `StoreFormatError`; nothing is guessed.
"""

import difflib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np

from jaxinf.errors import StoreFormatError
from jaxinf.layout import CODE_BLOCK, LeafGrid, scales_length
from jaxinf.store.names import (
    MASTER_PARAMS,
    array_name,
    check_leaf_paths,
    encode_key,
    leaf_name,
)

__all__ = [
    "CODECS",
    "FORMAT_VERSION",
    "MASTER_CODECS",
    "LeafRecord",
    "Manifest",
    "StateRecord",
    "dtype_of",
]

FORMAT_VERSION = 2
_OLDEST_VERSION = 1

CODECS = ("bf16", "int8")
"""Of the optimizer's state."""

MASTER_CODECS = ("split", "bf16")
"""Of the master params of leaves that are bfloat16 on the JAX device."""

# Codecs of arrays that belong to the one before, and how their names end.
_BESIDE = {"scale": "_scale", "remainder": "_remainder"}
_STORE_ID = re.compile("[0-9a-f]{32}")


@cache
def dtype_of(name: str) -> np.dtype[Any]:
    """The NumPy dtype of a name on disk, ``bfloat16`` included."""
    import ml_dtypes

    if name == "bfloat16":
        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype(name)


@dataclass(frozen=True)
class StateRecord:
    """One stored array of a leaf.

    Attributes:
      name: the optax state's field name, with an end of `_BESIDE` where it belongs to
        the array before it.
      dtype: of what is stored.
      codec: how it stands for float32: ``"bf16"`` (rounded stochastically), ``"int8"``
        (codes, whose scales are the array after it), ``"scale"`` (those), ``"split"``
        (rounded to bfloat16, the remainder being the array after it), ``"remainder"``
        (that); empty where it is what the optimizer computes with.
    """

    name: str
    dtype: str
    codec: str = ""

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return dtype_of(self.dtype).itemsize

    @property
    def slot(self) -> str:
        """The name of the optimizer's state that this is, or belongs to."""
        return self.name.removesuffix(_BESIDE.get(self.codec, ""))

    @property
    def is_beside(self) -> bool:
        """Whether it is no state of its own, but belongs to the array before it."""
        return self.codec in _BESIDE

    def num_elements(self, num_leaf_elements: int) -> int:
        """Elements that stand for so many of the leaf."""
        if self.codec == "scale":
            return -(-num_leaf_elements // CODE_BLOCK)
        return num_leaf_elements

    def coded(self, codec: str) -> tuple["StateRecord", ...]:
        """What is stored of this state with a codec."""
        if codec == "bf16":
            return (StateRecord(self.name, "bfloat16", codec),)
        if codec == "split":
            rest = StateRecord(self.name + _BESIDE["remainder"], "int16", "remainder")
            return (StateRecord(self.name, "bfloat16", codec), rest)
        assert codec == "int8"
        scales = StateRecord(self.name + _BESIDE["scale"], "float32", "scale")
        return (StateRecord(self.name, "uint8", codec), scales)

    def decoded(self) -> "StateRecord":
        """The state that the optimizer computes with."""
        return StateRecord(self.slot, "float32") if self.codec else self


@dataclass(frozen=True)
class LeafRecord:
    """One leaf of the params tree.

    Attributes:
      path: its keys.
      shape: its natural shape.
      dtype: the dtype of the params on the JAX device.
      kernel: key into `Manifest.kernels`.
      states: what is stored, the master params first.
      chunk_shape: of every state's array.
      shard_counts: shards along each dimension when the store was made.
      csds: the CSD of each chunk, in grid order.
    """

    path: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str
    kernel: str
    states: tuple[StateRecord, ...]
    chunk_shape: tuple[int, ...]
    shard_counts: tuple[int, ...]
    csds: tuple[int, ...]

    @property
    def name(self) -> str:
        """The leaf's keys joined by ``/``."""
        return leaf_name(self.path)

    @cached_property
    def grid(self) -> LeafGrid:
        """The chunk grid."""
        return LeafGrid(shape=self.shape, chunk_shape=self.chunk_shape)

    def state(self, name: str) -> StateRecord:
        """The record of a stored array; it must exist."""
        return next(state for state in self.states if state.name == name)

    @property
    def slots(self) -> tuple[StateRecord, ...]:
        """The states that the optimizer computes with, the master params first."""
        return tuple(s.decoded() for s in self.states if not s.is_beside)

    def beside(self, state: StateRecord) -> StateRecord | None:
        """The array that belongs to a state's: scales, remainders, or None."""
        found = (s for s in self.states if s.is_beside and s.slot == state.name)
        return next(found, None)

    def array_grid(self, state: StateRecord) -> tuple[Sequence[int], Sequence[int]]:
        """Shape and chunk shape of a state's array."""
        if state.codec != "scale":
            return self.shape, self.chunk_shape
        length = scales_length(self.grid)
        return (len(self.csds) * length,), (length,)

    def array_name(self, state: str) -> str:
        """Directory of one state's array, relative to a slot."""
        return array_name(state, self.path)


@dataclass(frozen=True)
class Manifest:
    """The content of ``jaxinf.json``; see docs/format.md for each key."""

    store_id: str
    csds: tuple[str, ...]
    kernels: Mapping[str, tuple[str, ...]]
    leaves: tuple[LeafRecord, ...]
    created_by: Mapping[str, str] = field(default_factory=dict)
    format_version: int = FORMAT_VERSION

    @property
    def num_params(self) -> int:
        """Elements over all leaves."""
        return sum(int(np.prod(leaf.shape, dtype=np.int64)) for leaf in self.leaves)

    @property
    def state_names(self) -> tuple[str, ...]:
        """Every state's name, the master params first."""
        names = dict.fromkeys(s.name for leaf in self.leaves for s in leaf.states)
        return tuple(names) or (MASTER_PARAMS,)

    @property
    def decoded(self) -> "Manifest":
        """The same store with everything as the optimizer computes with it."""
        leaves = [replace(leaf, states=leaf.slots) for leaf in self.leaves]
        return replace(self, leaves=tuple(leaves))

    def to_json(self) -> dict[str, Any]:
        """As written to disk."""
        return {
            "format": "jaxinf",
            "format_version": self.format_version,
            "store_id": self.store_id,
            "created_by": dict(self.created_by),
            "csds": list(self.csds),
            "kernels": {key: list(lines) for key, lines in self.kernels.items()},
            "leaves": [_leaf_to_json(leaf) for leaf in self.leaves],
        }

    @classmethod
    def read(cls, path: Path, *, any_version: bool = False) -> "Manifest":
        """Reads ``jaxinf.json``.

        Args:
          path: of the file.
          any_version: take older formats too, which only a migration can.

        Raises:
          StoreFormatError: when it is corrupt, or of another format.
        """
        try:
            document = json.loads(path.read_text())
        except (ValueError, UnicodeDecodeError) as error:
            raise StoreFormatError(
                f"{path}: expected the JSON manifest of a jaxinf store, found text "
                f"that does not parse ({error}); restore the file from a backup or "
                "remove the store and start again"
            ) from error
        _check_header(path, document, any_version=any_version)
        try:
            return cls._from_json(document)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise StoreFormatError(
                f"{path}: the manifest is incomplete or damaged "
                f"({type(error).__name__}: {error}); restore the file from a backup "
                "or remove the store and start again"
            ) from error

    @classmethod
    def _from_json(cls, document: Mapping[str, Any]) -> "Manifest":
        manifest = cls(
            store_id=str(document["store_id"]),
            csds=tuple(document["csds"]),
            kernels={k: tuple(v) for k, v in document["kernels"].items()},
            leaves=tuple(_leaf_from_json(leaf) for leaf in document["leaves"]),
            created_by=dict(document["created_by"]),
            format_version=int(document["format_version"]),
        )
        manifest._check()
        return manifest

    def _check(self) -> None:
        """Raises ValueError where the parts do not fit each other."""
        if not _STORE_ID.fullmatch(self.store_id):
            raise ValueError(f"store_id {self.store_id!r} is not 32 hex digits")
        if not all(
            isinstance(root, str) and root.startswith("/") for root in self.csds
        ):
            raise ValueError(f"csds {list(self.csds)} are not absolute paths")
        for leaf in self.leaves:
            if leaf.kernel not in self.kernels:
                raise ValueError(f"leaf {leaf.name}: no kernel {leaf.kernel!r}")
            _check_master(leaf)
            num_chunks = leaf.grid.num_chunks
            if len(leaf.csds) != num_chunks:
                raise ValueError(
                    f"leaf {leaf.name}: {num_chunks} chunks, {len(leaf.csds)} CSDs"
                )
            if not all(0 <= csd < max(1, len(self.csds)) for csd in leaf.csds):
                raise ValueError(f"leaf {leaf.name}: no such CSDs: {leaf.csds}")
            _check_codecs(leaf)
        states = {state.name for leaf in self.leaves for state in leaf.states}
        if not all(name == encode_key(name) for name in states):
            raise ValueError(f"states {sorted(states)} are no file names")
        check_leaf_paths([leaf.path for leaf in self.leaves], states)

    def tree_difference(self, other: "Manifest") -> list[str]:
        """How the leaves and states of `other` differ from this one's, as lines.

        Grids, CSDs and versions do not count: they are this store's own business.
        """
        mine = {leaf.name: leaf for leaf in self.leaves}
        theirs = {leaf.name: leaf for leaf in other.leaves}
        lines = [f"- leaf {n}: in the store only" for n in mine if n not in theirs]
        lines += [f"+ leaf {n}: not in the store" for n in theirs if n not in mine]
        for name in (n for n in mine if n in theirs):
            lines += _leaf_difference(mine[name], theirs[name])
        if not lines and list(mine) != list(theirs):
            lines.append("the same leaves come in another order")
        return lines

    def kernel_difference(self, other: "Manifest") -> list[str]:
        """How the first update that differs does so; the leaves must be the same."""
        for mine, theirs in zip(self.leaves, other.leaves, strict=True):
            old, new = self.kernels[mine.kernel], other.kernels[theirs.kernel]
            if old != new:
                diff = difflib.unified_diff(old, new, "store", "optimizer", lineterm="")
                return [f"the update of leaf {mine.name} has other equations:", *diff]
        return []


def _check_master(leaf: LeafRecord) -> None:
    """Raises ValueError where the master params are not first, or no master's."""
    if leaf.slots[:1] != (StateRecord(MASTER_PARAMS, "float32"),):
        raise ValueError(f"leaf {leaf.name}: no float32 params first")
    codec = leaf.states[0].codec
    if codec and (codec not in MASTER_CODECS or leaf.dtype != "bfloat16"):
        raise ValueError(f"leaf {leaf.name}: {leaf.dtype} params coded as {codec!r}")


def _check_codecs(leaf: LeafRecord) -> None:
    """Raises ValueError where a codec's arrays are not what it needs."""
    known = {*CODECS, *MASTER_CODECS}
    for number, state in enumerate(leaf.states):
        if state.codec not in ("", *known, *_BESIDE):
            raise ValueError(f"leaf {leaf.name}: no codec {state.codec!r}")
        if state.codec == "split" and number:
            raise ValueError(f"leaf {leaf.name}: {state.name} is no master")
        if state.codec in known:
            wanted = StateRecord(state.name, "float32").coded(state.codec)
            if leaf.states[number : number + len(wanted)] != wanted:
                raise ValueError(f"leaf {leaf.name}: {state.name} is not {wanted}")


def _leaf_difference(old: LeafRecord, new: LeafRecord) -> list[str]:
    lines = []
    if old.shape != new.shape:
        lines.append(f"leaf {old.name}: shape {old.shape} in the store, {new.shape}")
    if old.dtype != new.dtype:
        lines.append(f"leaf {old.name}: params {old.dtype} in the store, {new.dtype}")
    if old.slots != new.slots:
        lines.append(
            f"leaf {old.name}: states {_states_text(old.slots)} in the store, "
            f"{_states_text(new.slots)}"
        )
    return lines


def _states_text(states: Sequence[StateRecord]) -> str:
    return "(" + ", ".join(f"{s.name} {s.dtype}" for s in states) + ")"


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


def _leaf_from_json(document: Mapping[str, Any]) -> LeafRecord:
    states = tuple(StateRecord(*fields) for fields in document["states"])
    for state in states:
        dtype_of(state.dtype)
    return LeafRecord(
        path=tuple(str(key) for key in document["path"]),
        shape=tuple(int(n) for n in document["shape"]),
        dtype=str(document["dtype"]),
        kernel=str(document["kernel"]),
        states=states,
        chunk_shape=tuple(int(n) for n in document["chunk_shape"]),
        shard_counts=tuple(int(n) for n in document["shard_counts"]),
        csds=tuple(int(n) for n in document["csds"]),
    )


def _check_header(path: Path, document: Any, *, any_version: bool) -> None:
    if not isinstance(document, Mapping) or document.get("format") != "jaxinf":
        raise StoreFormatError(
            f'{path}: expected "format": "jaxinf", found another document; this is '
            "not the manifest of a jaxinf store"
        )
    version = document.get("format_version")
    is_number = isinstance(version, int)
    is_older = is_number and _OLDEST_VERSION <= version < FORMAT_VERSION
    if version != FORMAT_VERSION and not (any_version and is_older):
        remedy = "the manifest is damaged; restore it from a backup"
        if is_older:
            remedy = f'bring it up to date with "jaxinf store migrate {path.parent}"'
        elif is_number and version > FORMAT_VERSION:
            remedy = "open it with a newer jaxinf (pip install -U jaxinf)"
        raise StoreFormatError(
            f"{path}: this jaxinf reads format version {FORMAT_VERSION}, the store has "
            f"{version!r}; {remedy}"
        )
