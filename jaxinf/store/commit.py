"""``commit.json``: the record that makes a slot a committed step.

Invariant: a record read back is bit for bit the record written; floats travel as bytes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from jaxinf.errors import StoreFormatError
from jaxinf.store.contents import dtype_of
from jaxinf.store.documents import check_seal, parse_document, write_document
from jaxinf.store.key_paths import from_version_2
from jaxinf.store.manifest import FORMAT_VERSION, is_older
from jaxinf.typing import Array, JsonValue

__all__ = ["CommitRecord", "ScalarState"]

_WHAT = "the record of a committed step"
_REMEDY = "restore the store from a checkpoint or a backup"


@dataclass(frozen=True)
class ScalarState:
    """One leaf of the optax state that is no leaf's own: a count, a hyperparameter.

    Attributes:
      path: where it stands in the optax state; see `jaxinf.store.key_paths`.
      value: the array; small.
    """

    path: str
    value: Array

    def to_json(self) -> dict[str, Any]:
        """As written to disk; ``value`` is there for people, ``data`` counts."""
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
        """The reverse of `to_json`."""
        dtype = dtype_of(document["dtype"])
        flat = np.frombuffer(bytes.fromhex(document["data"]), dtype=dtype)
        shape = tuple(int(n) for n in document["shape"])
        return cls(str(document["path"]), flat.reshape(shape).copy())


@dataclass(frozen=True)
class CommitRecord:
    """What a committed step holds beside its chunks; see docs/format.md.

    Attributes:
      step: its number.
      scalar_state: the optimizer's.
      skipped_steps: for a non-finite gradient, up to this step.
      payload: the caller's.
      checksums: CRC-32C of each chunk, uint32, by array name in grid order.
      documents: of `stock_documents`; empty in an export, which has others.
      committed_at: UTC, for people.
    """

    step: int
    scalar_state: Sequence[ScalarState]
    skipped_steps: int = 0
    payload: JsonValue = None
    checksums: Mapping[str, Array] = field(default_factory=dict)
    documents: Mapping[str, str] = field(default_factory=dict)
    committed_at: str = field(
        default_factory=lambda: datetime.now(UTC).isoformat(timespec="milliseconds")
    )

    def to_json(self) -> dict[str, Any]:
        """As written to disk."""
        return {
            "format_version": FORMAT_VERSION,
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

    def write(self, path: Path) -> None:
        """Puts the record in its place; blocks until it is durable."""
        write_document(path, self.to_json())

    @classmethod
    def read(cls, path: Path, *, any_version: bool = False) -> "CommitRecord":
        """Reads a slot's record.

        Args:
          path: of the file.
          any_version: take one of an older format, in the words of the present one.

        Raises:
          StoreFormatError: when it is missing, damaged, edited, or of another format.
        """
        raw, document = parse_document(path, _WHAT, _REMEDY)
        try:
            version = document["format_version"]
            if version == FORMAT_VERSION:
                check_seal(path, raw, _WHAT, _REMEDY)
            elif not (any_version and is_older(version)):
                raise ValueError(
                    f"format version {version!r}, expected {FORMAT_VERSION}"
                )
            return cls._from_json(document, version)
        except (ValueError, KeyError, TypeError, AttributeError, SyntaxError) as error:
            raise StoreFormatError(
                f"{path}: expected {_WHAT}, found none that can be read "
                f"({type(error).__name__}: {error}); {_REMEDY}"
            ) from error

    @classmethod
    def _from_json(cls, document: Mapping[str, Any], version: int) -> "CommitRecord":
        scalars = tuple(map(ScalarState.from_json, document["scalar_state"]))
        if version == 2:
            scalars = tuple(replace(s, path=from_version_2(s.path)) for s in scalars)
        return cls(
            step=int(document["step"]),
            scalar_state=scalars,
            skipped_steps=int(document["skipped_steps"]),
            payload=document["payload"],
            committed_at=str(document["committed_at"]),
            documents={} if version == 2 else dict(document["documents"]),
            checksums={
                str(name): np.frombuffer(bytes.fromhex(text), ">u4").astype(np.uint32)
                for name, text in document["checksums"].items()
            },
        )
