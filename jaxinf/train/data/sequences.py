"""Token ids of an example, and those of many in flat arrays with a fingerprint.

Invariant: sequences are ordered by the SHA-256 of their content alone. This mixes them,
so that the held-out tail is like the rest.
"""

import dataclasses
import hashlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxinf.typing import Array


class Encoded(NamedTuple):
    """One example as ids.

    Attributes:
      tokens: uint8 to uint32 [n].
      is_learned: bool [n].
      label: -1 for none; a class's name until all are known.
      token_types: uint8 [n], the number of each token's text; None for one text.
      num_uncut: number of tokens before a cut; 0 if it is the number of tokens.
    """

    tokens: Array
    is_learned: Array
    label: int | str = -1
    token_types: Array | None = None
    num_uncut: int = 0

    @property
    def num_tokens(self) -> int:
        return self.num_uncut or self.tokens.size

    def digest(self) -> bytes:
        """SHA-256 of its content."""
        digest = hashlib.sha256(f"{self.tokens.dtype} {self.label} ".encode())
        digest.update(np.ascontiguousarray(self.tokens).data)
        digest.update(np.packbits(self.is_learned).data)
        if self.token_types is not None:
            digest.update(self.token_types.data)
        return digest.digest()


def all_of(tokens: Array) -> Array:
    """Returns True for each token, in no memory."""
    return np.broadcast_to(np.True_, tokens.shape)


@dataclasses.dataclass(frozen=True, eq=False)
class Sequences:
    """Concatenated sequences. Immutable and safe to share between threads.

    Attributes:
      is_learned: bool [all]; if every token is learned it takes no memory.
      ends: int64 [num], the end of each sequence.
      labels: int32 [num]; -1 for none.
      token_types: uint8 [all], as of `Encoded`; None where no sequence has them.
    """

    tokens: Array
    is_learned: Array
    ends: Array
    labels: Array
    token_types: Array | None = None

    @classmethod
    def of(cls, ordered: Sequence[Encoded]) -> "Sequences":
        """Concatenates examples in their order."""
        tokens = np.concatenate([e.tokens for e in ordered] or [np.zeros(0, np.uint8)])
        learned = [example.is_learned for example in ordered]
        types = [e.token_types for e in ordered if e.token_types is not None]
        is_all = all(map(np.all, learned))
        return cls(
            tokens=tokens,
            is_learned=all_of(tokens) if is_all else np.concatenate(learned),
            ends=np.cumsum([len(e.tokens) for e in ordered], dtype=np.int64),
            labels=np.array([example.label for example in ordered], np.int32),
            token_types=np.concatenate(types) if types else None,
        )

    def __len__(self) -> int:
        return len(self.ends)

    def part(self, number: int) -> slice:
        """Returns the place of a sequence's tokens."""
        return slice(self.ends[number - 1] if number else 0, self.ends[number])

    def __getitem__(self, number: int) -> tuple[Array, Array]:
        """Returns views of a sequence's tokens and of its `is_learned`."""
        part = self.part(number)
        return self.tokens[part], self.is_learned[part]

    def split(
        self, share: float, *, by_tokens: bool = False
    ) -> tuple["Sequences", "Sequences"]:
        """Splits off a tail of whole sequences, at least one of several.

        Args:
          by_tokens: whether to count tokens, which may cut a sequence.
        """
        if by_tokens:
            at = self.tokens.size - int(self.tokens.size * share)
        else:
            least = int(share > 0 and len(self) > 1)
            num = len(self) - max(least, int(len(self) * share))
            at = int(self.ends[num - 1]) if num else 0
        return self._between(0, at), self._between(at, self.tokens.size)

    def _between(self, start: int, stop: int) -> "Sequences":
        first = np.searchsorted(self.ends, start, side="right")
        last = np.searchsorted(self.ends, stop) + (start < stop)
        types = self.token_types
        return Sequences(
            self.tokens[start:stop],
            self.is_learned[start:stop],
            np.minimum(self.ends[first:last], stop) - start,
            self.labels[first:last],
            None if types is None else types[start:stop],
        )

    def fingerprint(self) -> str:
        """SHA-256 of everything, in hexadecimal."""
        digest = hashlib.sha256()
        for array in (self.tokens, self.is_learned, self.ends, self.labels):
            if array.strides == (0,):  # all are learned
                digest.update(b"all;")
                continue
            digest.update(f"{array.dtype} {array.size};".encode())
            digest.update(np.ascontiguousarray(array).data)
        if self.token_types is not None:
            digest.update(self.token_types.data)
        return digest.hexdigest()
