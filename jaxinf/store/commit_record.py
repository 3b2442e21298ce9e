"""``commit.json``: the record that makes a slot a committed step.

Invariant: a record read back is bit for bit the record written; floats travel as bytes.
"""

import math
import os
import re
from datetime import UTC, datetime
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeAlias

import msgspec
import numpy as np
from msgspec import Meta

from jaxinf.documents import Document, pattern, shorten
from jaxinf.errors import StoreFormatError
from jaxinf.store.carried_arrays import CarriedArray, check_carry
from jaxinf.store.documents import (
    Checksum,
    Dtype,
    Id,
    Lengths,
    Name,
    read_document,
    seal,
)
from jaxinf.store.manifest import FORMAT_VERSION, Manifest, check_version, dtype_of
from jaxinf.transfer import write_bytes_atomically
from jaxinf.typing import Array

_WHAT = "the record of a committed step"
_REMEDY = (
    "undo the edit, restore the file from a backup, or go back to a checkpoint (jaxinf "
    "checkpoint restore STORE NAME)"
)

SCHEDULE_FREE = "z"
"""The state from which a schedule-free optimizer's averaged params are computed."""


def schedule_free_params(params: Array, z: Array, b1: np.float32) -> Array:
    """Returns optax's `schedule_free_eval_params` in float32."""
    y, z = params.astype(np.float32), z.astype(np.float32)
    return (y - (np.float32(1) - b1) * z) / b1


class ScalarState(Document, frozen=True):
    """A value of the optax state that belongs to no leaf: a count, a hyperparameter."""

    path: str  # in the optax state; see `encode_path`
    dtype: Dtype
    shape: Lengths
    data: Annotated[str, pattern("(?:[0-9a-f]{2})*+", "bytes in hex digits")]
    text: str = msgspec.field(default="", name="value")  # for people; it is not read

    @classmethod
    def of(cls, path: str, value: Array) -> Self:
        """Records the elements of a small array."""
        text = str(value) if np.shape(value) == () else ""
        return cls(path, value.dtype.name, value.shape, value.tobytes().hex(), text)

    def __post_init__(self) -> None:
        num_bytes = math.prod(self.shape) * dtype_of(self.dtype).itemsize
        if len(self.data) != 2 * num_bytes:
            raise ValueError(
                f"scalar {self.path}: expected {self.dtype} of shape {self.shape}, "
                f"found {len(self.data) // 2} bytes"
            )

    @property
    def value(self) -> Array:
        """A new array of the elements."""
        elements = np.frombuffer(bytearray.fromhex(self.data), dtype_of(self.dtype))
        return elements.reshape(self.shape)


_Count: TypeAlias = Annotated[int, Meta(ge=0, le=2**62 - 1)]
_Length: TypeAlias = Annotated[int, Meta(ge=1, le=2**62 - 1)]
_Axis: TypeAlias = Annotated[str, pattern(r"[^\0-\x1f\x7f]*", "an axis's name", 255)]
_Mesh: TypeAlias = Annotated[dict[_Axis, _Length], Meta(max_length=64)]


class KeptCuts(Document, frozen=True):
    """The cuts of a streamed program, on which a step's bits depend."""

    version: _Count  # of the programs that jaxinf makes of cuts
    fingerprint: Annotated[str, Meta(max_length=256)]  # of the traced program
    cuts: tuple[_Count, ...]  # where segments begin, and the number of nodes
    mesh: _Mesh = msgspec.field(default_factory=dict)  # devices along each axis

    def __post_init__(self) -> None:
        if self.cuts[:1] != (0,) or [*self.cuts] != sorted({*self.cuts}):
            raise ValueError("cuts: expected numbers that rise from 0, found others")


def read_old_cuts(store: Path, name: str) -> KeptCuts | None:
    """Reads ``stream/NAME.json``, where old stores have the cuts of a program."""
    path = store / "stream" / f"{name}.json"
    if not os.path.lexists(path):
        return None
    remedy = "pass replan=True for another plan (bits then differ from here on)"
    return read_document(path, KeptCuts, "a plan of a streamed program", remedy)


_Step: TypeAlias = Annotated[int, Meta(ge=0, le=2**31 - 1)]  # the state's is an int32
_Every: TypeAlias = Annotated[int, Meta(ge=1, le=2**31 - 1)]
_ALWAYS = "step skipped_steps scalar_state payload committed_at checksums".split()
"""Keys that a document always has; it has no others whose value is empty or 0."""


class CommitAction(Enum):
    """The actions of a commit, in order; docs/format.md says why.

    Each has ended, and is durable, before the next begins.
    """

    SYNC = "sync"  # the step's chunks become durable
    RECORD = "record"  # the slot gets its record
    MEET = "meet"  # members wait until all have their records
    FLIP = "flip"  # `current` names the slot


class CommitRecord(Document, frozen=True, omit_defaults=False):
    """``commit.json``: a committed step's data beside its chunks; see docs/format.md.

    A JAX device computed every `device_updates`-th update of a subgroup; 0: none;
    "auto": some, in a step by which their number was measured. `inexact` maps each leaf
    whose 16-bit params on the JAX device were not the rounded master after the step to
    the greatest difference.
    """

    step: _Step
    scalar_state: tuple[ScalarState, ...]
    skipped_steps: _Step = 0  # so far, for a non-finite gradient
    payload: Any = None  # the caller's
    # CRC-32C of each chunk, uint32, by array in grid order.
    checksums: dict[Name, np.ndarray] = msgspec.field(default_factory=dict)
    committed_at: Annotated[str, Meta(max_length=64)] = msgspec.field(
        default_factory=lambda: datetime.now(UTC).isoformat(timespec="milliseconds")
    )
    # The commit's id in all members of a run: a session's id and a number.
    commit: Annotated[
        str, pattern("(?:[0-9a-f]{32}-[0-9]{1,16})?", "an id of a session and a number")
    ] = ""
    device_updates: _Every | Literal["auto"] = 0
    inexact: dict[str, np.float32] = msgspec.field(default_factory=dict)
    carry: tuple[CarriedArray, ...] = ()
    # The cuts of all programs so far, by the digest of their leaves and batch.
    streams: dict[Id, KeptCuts] = msgspec.field(default_factory=dict)
    documents: dict[str, Checksum] = msgspec.field(default_factory=dict)  # old stores'
    # Contents of the carried arrays until they are committed; not in the document.
    carried: tuple[bytes, ...] = ()

    def __post_init__(self) -> None:
        if len({scalar.path for scalar in self.scalar_state}) != len(self.scalar_state):
            raise ValueError("two scalars of one path")
        check_carry(self.carry)

    def replace(self, **changes: Any) -> "CommitRecord":
        """Returns a copy of the record with some attributes changed."""
        return msgspec.structs.replace(self, **changes)

    @property
    def schedule_free_b1(self) -> np.float32 | None:
        """b1 of optax's `ScheduleFreeState`, for `schedule_free_params`, or None."""
        values = {scalar.path: scalar.value for scalar in self.scalar_state}
        for path, value in values.items():
            if path.endswith(".b1") and f"{path[:-2]}weight_sum" in values:
                return np.float32(value)
        return None

    def to_json(self) -> dict[str, Any]:
        """Returns the document, without the keys that say nothing."""
        values = msgspec.to_builtins(self.replace(carried=()), enc_hook=_encode)
        said = {k: value for k, value in values.items() if value or k in _ALWAYS}
        return {"format_version": FORMAT_VERSION, **said}

    def write(self, path: Path) -> None:
        """Writes the record; blocks until it is durable."""
        write_bytes_atomically(path, seal(self.to_json()))

    @classmethod
    def read(cls, path: Path | str, raw: bytes | None = None) -> "CommitRecord":
        """Reads a record, or `raw`, its content; raises as `read_document`."""

        def check(document: Any) -> None:
            check_version(document)
            del document["format_version"]
            if missing := [name for name in _ALWAYS if name not in document]:
                raise ValueError(f"expected the key {missing[0]!r}, found none")
            if "carried" in document:
                raise ValueError("expected no key 'carried'")

        hooks = {"check": check, "dec_hook": _decode}
        return read_document(path, cls, _WHAT, _REMEDY, raw=raw, **hooks)

    def for_member(self, manifest: Manifest, commit: str) -> "CommitRecord":
        """Returns a whole step's record with the checksums of a member's chunks alone.

        `commit` is the commit's id, empty for a store of one process.
        """
        checksums = {
            name: self.checksums[name][list(leaf.held_numbers)]
            for name, leaf, _ in manifest.arrays()
        }
        return self.replace(checksums=checksums, commit=commit)

    def check_fits(self, path: Path | str, manifest: Manifest) -> None:
        """Raises StoreFormatError if the manifest has other arrays or chunks.

        `path` is where the record lies, for the message.
        """
        unknown = self.inexact.keys() - {leaf.name for leaf in manifest.leaves}
        problems = [
            f"inexact: expected leaves of jaxinf.json, found {name}" for name in unknown
        ]
        wanted = {name: len(leaf.held_numbers) for name, leaf, _ in manifest.arrays()}
        found = {name: len(sums) for name, sums in self.checksums.items()}
        problems += [
            f"array {name}: expected {wanted.get(name, 0)} checksums, as jaxinf.json "
            f"has chunks, found {found.get(name, 0)}"
            for name in {**wanted, **found}
            if wanted.get(name) != found.get(name, 0)
        ]
        if problems:
            raise StoreFormatError(
                f"{path}: {problems[0]}; the two are not of one store: {_REMEDY}"
            )


_SUMS = re.compile("(?:[0-9a-f]{8}(?: [0-9a-f]{8})*+)?")


def _encode(value: Any) -> str:
    """Returns the hex digits of checksums' or a bound's bits."""
    if isinstance(value, np.ndarray):
        return value.astype(">u4").tobytes().hex(" ", 4)
    return np.asarray(value, ">f4").tobytes().hex()


def _decode(kind: type, value: Any) -> Any:
    if not isinstance(value, str) or not _SUMS.fullmatch(value):
        raise ValueError(f"expected values of 8 hex digits, found {shorten(value)}")
    raw = bytes.fromhex(value)
    if kind is np.ndarray:
        return np.frombuffer(raw, ">u4").astype(np.uint32)
    bound = np.float32(np.frombuffer(raw, ">f4")[0]) if len(raw) == 4 else np.nan
    if not 0 <= bound < math.inf:
        raise ValueError(f"expected a finite bound >= 0, found {shorten(value)}")
    return bound
