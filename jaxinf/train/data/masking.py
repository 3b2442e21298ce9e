"""Masks tokens for a masked language model and keeps them as targets.

As in BERT (Devlin et al. 2019, section 3.1), 15 % of the tokens are chosen. Of these,
80 % become the mask, 10 % a random token, and 10 % stay.

Invariant: the result is a function of the row and the generator alone.
"""

import dataclasses

import numpy as np

from jaxinf.train.data.packing import Row

_MASKED, _RANDOM = 0.8, 0.9  # the last tenth stays


@dataclasses.dataclass(frozen=True)
class Masking:
    """Chooses tokens of a row and masks them.

    Attributes:
      rate: share of a row's tokens to choose, at least one.
      special: ids that are never chosen, such as ends of documents.
    """

    rate: float
    mask: int
    special: tuple[int, ...]
    vocab_size: int

    def __call__(self, row: Row, rng: np.random.Generator) -> Row:
        """Masks a row; adds `targets`, and `weights` of 1 for chosen tokens."""
        tokens = row["tokens"]
        allowed = np.flatnonzero(~np.isin(tokens, self.special) & (row["segments"] > 0))
        if not allowed.size:  # a row of special ones; at least one token must count
            allowed = np.arange(tokens.size)
        num = max(1, round(self.rate * allowed.size))
        chosen = rng.permutation(allowed)[:num]
        fate = rng.random(num)
        hidden = tokens.copy()
        hidden[chosen[fate < _MASKED]] = self.mask
        is_random = (fate >= _MASKED) & (fate < _RANDOM)
        drawn = rng.integers(0, self.vocab_size, num, np.int32)
        hidden[chosen[is_random]] = drawn[is_random]
        weights = np.zeros(tokens.size, np.float32)
        weights[chosen] = 1
        return {**row, "tokens": hidden, "targets": tokens, "weights": weights}
