"""``commit.json``: the record that makes a slot a committed step.

Invariant: a record read back is bit for bit the record written; floats travel as bytes.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from jaxinf.errors import StoreFormatError
from jaxinf.schema import SchemaError, shown
from jaxinf.store.contents import dtype_of
from jaxinf.store.documents import (
    check_seal,
    no_document,
    read_document,
    write_document,
)
from jaxinf.store.manifest import (
    FORMAT_VERSION,
    MEMBER_VERSION,
    VERSIONS,
    Manifest,
    version_of,
)
from jaxinf.store.schemas import RECORD
from jaxinf.typing import Array, JsonValue

_WHAT = "the record of a committed step"
_REMEDY = (
    "undo the edit, restore the file from a backup, or go back to a checkpoint (jaxinf "
    "checkpoint restore STORE NAME)"
)


@dataclass(frozen=True)
class ScalarState:
    """A value of the optax state that belongs to no leaf: a count, a hyperparameter.

    Attributes:
      path: its path in the optax state; see `jaxinf.store.key_paths`.
      value: the array; small.
    """

    path: str
    value: Array

    def to_json(self) -> dict[str, Any]:
        """Returns its form on disk: ``data``, and ``value`` for people to read."""
        value = np.ascontiguousarray(self.value).reshape(np.shape(self.value))
        document: dict[str, Any] = {
            "path": self.path,
            "dtype": value.dtype.name,
            "shape": list(value.shape),
            "data": value.tobytes().hex(),
        }
        if value.shape == ():
            document["value"] = str(value)
        return document

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> "ScalarState":
        """Parses a document that fits its schema; the reverse of `to_json`.

        Raises:
          SchemaError: the document contradicts itself.
        """
        path, dtype = document["path"], dtype_of(document["dtype"])
        shape, data = tuple(document["shape"]), bytes.fromhex(document["data"])
        if len(data) != math.prod(shape) * dtype.itemsize:
            raise SchemaError(
                f"scalar {path}: expected {dtype} of shape {shape}, found "
                f"{len(data)} bytes"
            )
        value = np.frombuffer(data, dtype).reshape(shape).copy()
        spelled = document.get("value")
        if spelled is not None and not _says(spelled, value):
            raise SchemaError(
                f"scalar {path}: its data says {value}, its value says {shown(spelled)}"
            )
        return cls(path, value)


@dataclass(frozen=True)
class CommitRecord:
    """The data of a committed step beside its chunks; see docs/format.md.

    Attributes:
      step: number of the step.
      scalar_state: the optimizer's scalar state.
      skipped_steps: number of steps skipped so far for a non-finite gradient.
      payload: the caller's data.
      checksums: CRC-32C of each chunk, uint32, by array name in grid order.
      documents: result of `stock_documents`; empty in an export, which has other
        documents.
      inexact: leaves by name whose 16-bit params on the JAX device were not the rounded
        master after the step; with the greatest difference.
      device_updates: a JAX device computed every so many updates of subgroups; 0: none.
      device_tier: bytes of its memory for state that stays there; updates of what
        stays are the device's, too.
      commit: in a member, the id of the commit, which all members' records have; empty
        in other stores.
      committed_at: time of the commit for people to read, UTC.
    """

    step: int
    scalar_state: Sequence[ScalarState]
    skipped_steps: int = 0
    payload: JsonValue = None
    checksums: Mapping[str, Array] = field(default_factory=dict)
    documents: Mapping[str, str] = field(default_factory=dict)
    inexact: Mapping[str, float] = field(default_factory=dict)
    device_updates: int = 0
    device_tier: int = 0
    commit: str = ""
    committed_at: str = field(
        default_factory=lambda: datetime.now(UTC).isoformat(timespec="milliseconds")
    )

    def to_json(self) -> dict[str, Any]:
        """Returns its form on disk."""
        document = {
            "format_version": MEMBER_VERSION if self.commit else FORMAT_VERSION,
            "step": self.step,
            "skipped_steps": self.skipped_steps,
            "scalar_state": [scalar.to_json() for scalar in self.scalar_state],
            "payload": self.payload,
            "committed_at": self.committed_at,
            "documents": dict(self.documents),
            "checksums": {
                name: sums.astype(">u4").tobytes().hex(" ", 4)
                for name, sums in self.checksums.items()
            },
        }
        if self.commit:
            document["commit"] = self.commit
        if self.device_updates:
            document["device_updates"] = self.device_updates
        if self.device_tier:
            document["device_tier"] = self.device_tier
        if self.inexact:
            document["inexact"] = {
                name: np.array(bound, ">f4").tobytes().hex()
                for name, bound in self.inexact.items()
            }
        return document

    def write(self, path: Path) -> None:
        """Writes the record; blocks until it is durable."""
        write_document(path, self.to_json())

    @classmethod
    def read(cls, path: Path) -> "CommitRecord":
        """Reads a slot's record.

        Raises:
          StoreFormatError: the record is missing, damaged, edited, or of another
            format.
        """
        raw, document = read_document(path, _WHAT, _REMEDY)
        try:
            version = version_of(document)
            if version not in VERSIONS:
                raise SchemaError(
                    f"format version {shown(version)}, expected {FORMAT_VERSION}"
                )
            check_seal(path, raw, _WHAT, _REMEDY)
            RECORD[version].check(document)
            return cls._from_json(document)
        except ValueError as error:
            raise no_document(path, _WHAT, _REMEDY, error) from error

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

    def check_fits(self, path: Path, manifest: Manifest) -> None:
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

    @classmethod
    def _from_json(cls, document: Mapping[str, Any]) -> "CommitRecord":
        scalars = tuple(map(ScalarState.from_json, document["scalar_state"]))
        if len({scalar.path for scalar in scalars}) != len(scalars):
            raise SchemaError("two scalars of one path")
        return cls(
            step=document["step"],
            scalar_state=scalars,
            skipped_steps=document["skipped_steps"],
            payload=document["payload"],
            committed_at=document["committed_at"],
            commit=document.get("commit", ""),
            documents=dict(document["documents"]),
            device_updates=document.get("device_updates", 0),
            device_tier=document.get("device_tier", 0),
            checksums={
                name: np.frombuffer(bytes.fromhex(text), ">u4").astype(np.uint32)
                for name, text in document["checksums"].items()
            },
            inexact={
                name: _bound(name, text)
                for name, text in document.get("inexact", {}).items()
            },
        )


def _bound(name: str, text: str) -> float:
    bound = float(np.frombuffer(bytes.fromhex(text), ">f4")[0])
    if not 0 <= bound < math.inf:
        raise SchemaError(
            f"inexact {name}: expected a finite bound >= 0, found {bound}"
        )
    return bound


def _says(text: str, value: Array) -> bool:
    """Whether a text spells this value, perhaps as another version of NumPy would."""
    if text == str(value) or value.shape:
        return not value.shape
    try:
        number = {"b": _TRUTH.get, "c": complex, "f": float, "V": float}.get(
            value.dtype.kind, int
        )(text)
        read = np.asarray(number, value.dtype)
    except (ValueError, TypeError, OverflowError):
        return False
    return read.tobytes() == value.tobytes() or bool(read != read and value != value)


_TRUTH = {"True": True, "False": False}
