"""The loaded data of a run.

Invariant: immutable; rows are read by number, so there is no position to keep.
"""

import dataclasses
import hashlib
from collections.abc import Iterable

from jaxinf.train.data.loader import RowMap
from jaxinf.train.data.packing import Rows
from jaxinf.train.data.tokenizer import Tokenizer
from jaxinf.typing import Array, JsonValue


@dataclasses.dataclass(frozen=True, eq=False)
class TrainingData:
    """The data of a run. Immutable, safe to share between threads.

    Attributes:
      row_map: a random change of each row, such as masking.
      tokenizer: the texts' tokenizer; None for images.
      identity: data that must be the same in a resumed run.
      notes: remarks about the data for the user.
      held_out_tokens: ids of the held-out text, for statistics and prompts; empty if
        the task is not to continue text.
      seq_len: tokens in a row; 0 for images.
      prompt: ids for the model to continue, held out; None as above.
      example: the first example, decoded, what is learned in guillemets, and the
        fields of its record; empty for images.
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
    seq_len: int = 0
    prompt: Array | None = None
    example: str = ""


def digest_of(parts: Iterable[str]) -> str:
    """SHA-256 of several fingerprints, in hexadecimal."""
    return hashlib.sha256(" ".join(parts).encode()).hexdigest()
