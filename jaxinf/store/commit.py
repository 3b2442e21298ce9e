"""``commit.json``: the record that makes a slot a committed step.

Invariant: a record read back is bit for bit the record written; floats travel as bytes.
"""

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeAlias

import msgspec
import numpy as np
from msgspec import Meta

from jaxinf.documents import Document, pattern, shown
from jaxinf.errors import StoreFormatError
from jaxinf.store.documents import (
    Dtype,
    Id,
    Lengths,
    Name,
    Sum,
    read_document,
    refusing,
    write_document,
)
from jaxinf.store.manifest import (
    FORMAT_VERSION,
    MEMBER_VERSION,
    VERSIONS,
    Manifest,
    dtype_of,
    version_of,
)
from jaxinf.store.names import array_name, check_leaf_paths
from jaxinf.transfer import crc32c
from jaxinf.typing import Array, JsonValue

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


class ScalarDocument(Document, frozen=True):
    """A scalar on disk: ``data``, and ``value`` for people, which is not read."""

    path: str
    dtype: Dtype
    shape: Lengths
    data: Annotated[str, pattern("(?:[0-9a-f]{2})*+", "bytes in hex digits")]
    value: str = ""


@dataclass(frozen=True)
class ScalarState:
    """A value of the optax state that belongs to no leaf: a count, a hyperparameter.

    Attributes:
      path: its path in the optax state; see `jaxinf.store.names`.
      value: the array; small.
    """

    path: str
    value: Array

    @property
    def document(self) -> ScalarDocument:
        """Its form on disk."""
        value = np.ascontiguousarray(self.value).reshape(np.shape(self.value))
        text = str(value) if value.shape == () else ""
        name, data = value.dtype.name, value.tobytes().hex()
        return ScalarDocument(self.path, name, value.shape, data, text)

    @classmethod
    def of(cls, document: ScalarDocument) -> "ScalarState":
        """Reads its form on disk.

        Raises:
          ValueError: the document contradicts itself.
        """
        path, dtype, shape = document.path, dtype_of(document.dtype), document.shape
        data = bytes.fromhex(document.data)
        if len(data) != math.prod(shape) * dtype.itemsize:
            raise ValueError(
                f"scalar {path}: expected {dtype} of shape {shape}, found "
                f"{len(data)} bytes"
            )
        value = np.frombuffer(data, dtype).reshape(shape).copy()
        return cls(path, value)


CARRY = "carry"
"""The first part of the names of arrays that a step carries."""

MOST_CARRIED_BYTES = 64 << 20
"""Limit of the bytes that a step carries."""


class CarriedArray(Document, frozen=True):
    """An array that a step carries; see `jaxinf.store.stock`.

    Attributes:
      path: its keys in the tree that was given.
      shape, dtype: of the array; typed keys are their numbers.
      crc32c: CRC-32C of its elements, in C order.
    """

    path: tuple[str, ...]
    shape: Lengths
    dtype: Dtype
    crc32c: Sum

    @classmethod
    def of(cls, path: tuple[str, ...], shape: Any, dtype: str, raw: bytes) -> Self:
        """Describes an array of these bytes."""
        checksum = crc32c(np.frombuffer(raw, np.uint8))
        return cls(path, tuple(shape), dtype, f"{checksum:08x}")

    @property
    def name(self) -> str:
        """Its directory, relative to a step."""
        return array_name(CARRY, self.path)

    @property
    def document(self) -> str:
        """Its ``zarr.json``, relative to a step."""
        return f"{self.name}/zarr.json"

    @property
    def chunk(self) -> str:
        """Its only chunk's file, relative to a step."""
        return "/".join((self.name, "c", *("0" for _ in self.shape)))

    @property
    def num_bytes(self) -> int:
        """Bytes of its elements."""
        return math.prod(self.shape) * dtype_of(self.dtype).itemsize


def check_carry(carry: Sequence[CarriedArray]) -> None:
    """Raises ValueError for names that are none, twice the same, or too many bytes."""
    check_leaf_paths([one.path for one in carry], {CARRY})
    num_bytes = sum(one.num_bytes for one in carry)
    if num_bytes > MOST_CARRIED_BYTES:
        raise ValueError(
            f"expected at most {MOST_CARRIED_BYTES} bytes (64 MiB) together, found "
            f"{num_bytes}; keep large arrays among the params, or in a checkpoint of "
            "your own"
        )


_Count: TypeAlias = Annotated[int, Meta(ge=0, le=2**62 - 1)]
_Length: TypeAlias = Annotated[int, Meta(ge=1, le=2**62 - 1)]
_Axis: TypeAlias = Annotated[str, pattern(r"[^\0-\x1f\x7f]*", "an axis's name", 255)]
_Mesh: TypeAlias = Annotated[dict[_Axis, _Length], Meta(max_length=64)]


class KeptPlan(Document, frozen=True):
    """The cuts of a streamed program, on which a step's bits depend.

    Attributes:
      version: of the programs that jaxinf makes of cuts.
      fingerprint: of the traced program.
      cuts: the nodes at which segments begin, and the number of nodes.
      mesh: devices along each axis of the mesh; empty without one.
      rows: of old: tables whose blocks of rows were programs' params.
    """

    version: _Count
    fingerprint: Annotated[str, Meta(max_length=256)]
    cuts: tuple[_Count, ...]
    mesh: Annotated[dict[_Axis, _Length], Meta(max_length=64)] = msgspec.field(
        default_factory=dict
    )
    rows: dict[str, _Length] = msgspec.field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.cuts[:1] != (0,) or [*self.cuts] != sorted({*self.cuts}):
            raise ValueError("cuts: expected numbers that rise from 0, found others")


def plan_of_before(store: Path, name: str) -> KeptPlan | None:
    """Reads ``stream/NAME.json``, where a store kept a plan before its records did.

    Raises:
      StoreFormatError: the plan is damaged, or something else.
    """
    path = store / "stream" / f"{name}.json"
    if not os.path.lexists(path):
        return None
    remedy = "pass replan=True for another plan (bits then differ from here on)"
    return read_document(path, KeptPlan, "a plan of a streamed program", remedy)


_Step: TypeAlias = Annotated[int, Meta(ge=0, le=2**31 - 1)]  # the state's is an int32
_SUMS = pattern("(?:[0-9a-f]{8}(?: [0-9a-f]{8})*+)?", "checksums of 8 hex digits")


class _Record(Document, frozen=True):
    format_version: Literal[3, 4]
    step: _Step
    skipped_steps: _Step
    scalar_state: tuple[ScalarDocument, ...]
    payload: Any
    committed_at: Annotated[str, Meta(max_length=64)]
    checksums: dict[Name, Annotated[str, _SUMS]]
    commit: Annotated[
        str, pattern("[0-9a-f]{32}-[0-9]{1,16}", "an id of a session and a number")
    ] = ""
    device_updates: Annotated[int, Meta(ge=1, le=2**31 - 1)] = 0
    inexact: dict[str, Sum] = msgspec.field(default_factory=dict)
    steps_without_params: Annotated[int, Meta(ge=1, le=2**31 - 1)] = 0
    carry: tuple[CarriedArray, ...] = ()
    streams: dict[Id, KeptPlan] = msgspec.field(default_factory=dict)
    device_tier: Annotated[int, Meta(ge=1, le=2**62 - 1)] = 0  # of old
    documents: dict[str, Sum] = msgspec.field(default_factory=dict)  # of old: not used


@dataclass(frozen=True)
class CommitRecord:
    """The data of a committed step beside its chunks; see docs/format.md.

    Attributes:
      step: number of the step.
      scalar_state: the optimizer's scalar state.
      skipped_steps: number of steps skipped so far for a non-finite gradient.
      payload: the caller's data.
      checksums: CRC-32C of each chunk, uint32, by array name in grid order.
      inexact: leaves by name whose 16-bit params on the JAX device were not the rounded
        master after the step; with the greatest difference.
      device_updates: a JAX device computed every so many updates of subgroups; 0: none.
      steps_without_params: number of the last steps whose update was given no params,
        so that they were not compared with the master.
      carry: arrays that the caller has given beside the optimizer's.
      streams: the cuts of programs by the digest of their leaves and batch, those of
        all steps so far.
      device_tier: of old: bytes of state that stayed on a JAX device, which updated it.
      carried: their bytes until they are committed; afterwards they are on the drive.
      commit: in a member, the id of the commit, which all members' records have; empty
        in other stores.
      committed_at: time of the commit for people to read, UTC.
    """

    step: int
    scalar_state: Sequence[ScalarState]
    skipped_steps: int = 0
    payload: JsonValue = None
    checksums: Mapping[str, Array] = field(default_factory=dict)
    inexact: Mapping[str, float] = field(default_factory=dict)
    device_updates: int = 0
    steps_without_params: int = 0
    carry: Sequence[CarriedArray] = ()
    streams: Mapping[str, KeptPlan] = field(default_factory=dict)
    device_tier: int = 0
    carried: Sequence[bytes] = ()
    commit: str = ""
    committed_at: str = field(
        default_factory=lambda: datetime.now(UTC).isoformat(timespec="milliseconds")
    )

    @property
    def schedule_free_b1(self) -> np.float32 | None:
        """b1 of optax's `ScheduleFreeState`; None of any other optimizer's state.

        Its averaged params are `schedule_free_params` of the params and the state z.
        """
        values = {scalar.path: scalar.value for scalar in self.scalar_state}
        for path, value in values.items():
            if path.endswith(".b1") and f"{path[:-2]}weight_sum" in values:
                return np.float32(value)
        return None

    def to_json(self) -> dict[str, Any]:
        """Returns its form on disk."""
        own = {name: getattr(self, name) for name in _AS_THEY_ARE}
        document = _Record(
            **own,
            format_version=MEMBER_VERSION if self.commit else FORMAT_VERSION,
            scalar_state=tuple(scalar.document for scalar in self.scalar_state),
            checksums={
                name: sums.astype(">u4").tobytes().hex(" ", 4)
                for name, sums in self.checksums.items()
            },
            inexact={
                name: np.array(bound, ">f4").tobytes().hex()
                for name, bound in self.inexact.items()
            },
        )
        return msgspec.to_builtins(document)

    def write(self, path: Path) -> None:
        """Writes the record; blocks until it is durable."""
        write_document(path, self.to_json())

    @classmethod
    def read(cls, path: Path | str, raw: bytes | None = None) -> "CommitRecord":
        """Reads a slot's record; `raw` are its bytes, if they are no file's.

        Raises:
          StoreFormatError: the record is missing, damaged, edited, or of another
            format.
        """
        held = read_document(
            path, _Record, _WHAT, _REMEDY, check=_check_version, raw=raw
        )
        with refusing(path, _WHAT, _REMEDY):
            if bool(held.commit) != (held.format_version == MEMBER_VERSION):
                raise ValueError(f"format {held.format_version}, commit {held.commit}")
            scalars = tuple(map(ScalarState.of, held.scalar_state))
            if len({scalar.path for scalar in scalars}) != len(scalars):
                raise ValueError("two scalars of one path")
            check_carry(held.carry)
            return cls(
                **{name: getattr(held, name) for name in _AS_THEY_ARE},
                scalar_state=scalars,
                checksums={
                    name: np.frombuffer(bytes.fromhex(text), ">u4").astype(np.uint32)
                    for name, text in held.checksums.items()
                },
                inexact={n: _bound(n, text) for n, text in held.inexact.items()},
            )

    def part(self, manifest: Manifest, commit: str = "") -> "CommitRecord":
        """Returns the record of a whole step as a store's that holds a part of it.

        Args:
          manifest: the store's.
          commit: the id of the commit, if it is a member.
        """
        held = {
            leaf.array_name(state.name): self.checksums[leaf.array_name(state.name)][
                list(leaf.held)
            ]
            for leaf in manifest.leaves
            for state in leaf.states
        }
        return replace(self, checksums=held, commit=commit)

    def check_fits(self, path: Path | str, manifest: Manifest) -> None:
        """Refuses a record whose arrays or chunks are not the store's.

        Args:
          path: path of the record, for the error.
          manifest: manifest of the store.

        Raises:
          StoreFormatError: names the difference.
        """
        arrays = {
            leaf.array_name(state.name): leaf
            for leaf in manifest.leaves
            for state in leaf.states
        }
        unknown = self.inexact.keys() - {leaf.name for leaf in manifest.leaves}
        if unknown:
            raise StoreFormatError(
                f"{path}: inexact: expected leaves of jaxinf.json, found "
                f"{', '.join(sorted(unknown))}; the two are not of one store: {_REMEDY}"
            )
        for name in {**arrays, **self.checksums}:
            expected = len(arrays[name].held) if name in arrays else 0
            found = len(self.checksums.get(name, ()))
            if found != expected or name not in arrays:
                raise StoreFormatError(
                    f"{path}: array {name}: expected {expected} checksums, as "
                    f"jaxinf.json has chunks, found {found}; the two are not of one "
                    f"store: {_REMEDY}"
                )


_AS_THEY_ARE = ("step", "skipped_steps", "payload", "committed_at")
_AS_THEY_ARE += ("commit", "device_updates", "steps_without_params", "carry")
_AS_THEY_ARE += ("streams", "device_tier")
"""Attributes of a record that are the same in its document."""


def _check_version(document: Any) -> None:
    if version_of(document) not in VERSIONS:
        raise ValueError(
            f"format version {shown(version_of(document))}, expected {FORMAT_VERSION}"
        )


def _bound(name: str, text: str) -> float:
    bound = float(np.frombuffer(bytes.fromhex(text), ">f4")[0])
    if not 0 <= bound < math.inf:
        raise ValueError(f"inexact {name}: expected a finite bound >= 0, found {bound}")
    return bound
