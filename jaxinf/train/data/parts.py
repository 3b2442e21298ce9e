"""What a run learns from, once it is read.

Invariant: immutable; rows are read by number, so that nothing has a position.
"""

import dataclasses
import hashlib
from collections.abc import Iterable

from jaxinf.train.data.loader import RowMap
from jaxinf.train.data.packing import Rows
from jaxinf.train.data.tokenizers import Tokenizer
from jaxinf.typing import Array, JsonValue

__all__ = ["TrainingData", "digest_of"]


@dataclasses.dataclass(frozen=True, eq=False)
class TrainingData:
    """Everything that a run learns from. Immutable, safe to share between threads.

    Attributes:
      train: rows to learn.
      validation: rows held out.
      row_map: a random change of each row, such as masking.
      tokenizer: of the texts; None for images.
      num_labels: classes, for classification.
      description: sizes, for people.
      identity: what a resumed run must have the same.
      notes: what the user should know of the data.
      held_out_tokens: the text held out as ids, for statistics and prompts; empty
        where the task is not to go on with text.
    """

    train: Rows
    validation: Rows
    row_map: RowMap | None
    tokenizer: Tokenizer | None
    num_labels: int | None
    description: str
    identity: dict[str, JsonValue]
    notes: tuple[str, ...]
    held_out_tokens: Array | None


def digest_of(parts: Iterable[str]) -> str:
    """SHA-256 of several fingerprints, in hexadecimal."""
    return hashlib.sha256(" ".join(parts).encode()).hexdigest()
