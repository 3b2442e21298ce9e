"""``commit.json``: the record that makes a slot a committed step.

Invariant: a record read back is bit for bit the record written; floats travel as bytes.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from jaxinf.errors import StoreFormatError
from jaxinf.store.contents import dtype_of
from jaxinf.store.manifest import FORMAT_VERSION
from jaxinf.typing import Array, JsonValue

__all__ = ["CommitRecord", "ScalarState"]


@dataclass(frozen=True)
class ScalarState:
    """One leaf of the optax state that is no leaf's own: a count, a hyperparameter.

    Attributes:
      path: where it stands in the optax state, as ``jax.tree_util.keystr`` prints it.
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
      committed_at: UTC, for people.
    """

    step: int
    scalar_state: Sequence[ScalarState]
    skipped_steps: int = 0
    payload: JsonValue = None
    checksums: Mapping[str, Array] = field(default_factory=dict)
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
            "checksums": {
                name: sums.astype(">u4").tobytes().hex(" ", 4)
                for name, sums in self.checksums.items()
            },
        }

    @classmethod
    def read(cls, path: Path, *, any_version: bool = False) -> "CommitRecord":
        """Reads a slot's record.

        Args:
          path: of the file.
          any_version: take one of an older format, which may lack checksums.

        Raises:
          StoreFormatError: when it is missing or damaged.
        """
        try:
            document = json.loads(path.read_text())
            checksums = (
                document.get("checksums", {})
                if any_version
                else (document["checksums"])
            )
            return cls(
                step=int(document["step"]),
                scalar_state=tuple(
                    ScalarState.from_json(s) for s in document["scalar_state"]
                ),
                skipped_steps=int(document["skipped_steps"]),
                payload=document["payload"],
                committed_at=str(document["committed_at"]),
                checksums={
                    str(name): np.frombuffer(bytes.fromhex(text), ">u4").astype(
                        np.uint32
                    )
                    for name, text in checksums.items()
                },
            )
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise StoreFormatError(
                f"{path}: expected the record of a committed step, found none that can "
                f"be read ({type(error).__name__}: {error}); restore the store from a "
                "checkpoint or a backup"
            ) from error
