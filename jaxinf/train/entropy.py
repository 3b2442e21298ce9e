"""Entropy of byte text: the best loss that byte frequencies alone can give.

Invariant: nats per byte, the unit of the trainer's loss; memory does not grow with the
text.
"""

from collections.abc import Iterator

import numpy as np

from jaxinf.typing import Array

_NUM_BYTES = 256
_SLICE = 1 << 22  # np.bincount makes a 64-bit copy of what it counts


def unigram_entropy(data: Array) -> float:
    """Returns the entropy H(x) of single bytes, uint8 [n], n at least 1."""
    parts = (np.bincount(part, minlength=_NUM_BYTES) for part in _slices(data, 0))
    return _entropy(sum(parts, np.zeros(_NUM_BYTES, np.int64)))


def bigram_entropy(data: Array) -> float:
    """Returns the entropy H(x_t | x_{t-1}) of bytes, uint8 [n], n at least 2.

    A loss below it is proof that a model uses more than the previous byte.
    """
    counts = np.zeros(_NUM_BYTES * _NUM_BYTES, np.int64)
    for part in _slices(data, 1):
        wide = part.astype(np.uint16)
        counts += np.bincount(wide[:-1] << 8 | wide[1:], minlength=counts.size)
    first = counts.reshape(_NUM_BYTES, _NUM_BYTES).sum(axis=1)
    return max(0.0, _entropy(counts) - _entropy(first))


def _slices(data: Array, overlap: int) -> Iterator[Array]:
    for start in range(0, data.size - overlap, _SLICE):
        yield data[start : start + _SLICE + overlap]


def _entropy(counts: Array) -> float:
    probabilities = counts[counts > 0] / counts.sum()
    return float(-np.sum(probabilities * np.log(probabilities))) + 0.0  # no -0.0
