"""Entropy of byte text: the best loss that byte frequencies alone can give.

Invariant: NumPy only; nats per byte, the unit of the trainer's loss; memory does not
grow with the text.
"""

import numpy as np

from jaxinf.typing import Array

_NUM_BYTES = 256
_SLICE = 1 << 22  # np.bincount makes a 64-bit copy of what it counts


def unigram_entropy(data: Array) -> float:
    """Empirical entropy H(x) of single bytes, in nats per byte.
        data: uint8 [n], n at least 1.

    Raises:
        TypeError: `data` is not a uint8 vector.
        ValueError: `data` is empty.
    """
    _check(data, "unigram_entropy", at_least=1)
    counts = np.zeros(_NUM_BYTES, np.int64)
    for start in range(0, data.size, _SLICE):
        counts += np.bincount(data[start : start + _SLICE], minlength=_NUM_BYTES)
    return _entropy(counts)


def bigram_entropy(data: Array) -> float:
    """Empirical conditional entropy H(x_t | x_{t-1}), in nats per byte.

    A loss below it is proof that a model uses more than the previous byte.
        data: uint8 [n], n at least 2.

    Raises:
        TypeError: `data` is not a uint8 vector.
        ValueError: `data` holds fewer than two bytes.
    """
    _check(data, "bigram_entropy", at_least=2)
    counts = np.zeros(_NUM_BYTES * _NUM_BYTES, np.int64)
    for start in range(0, data.size - 1, _SLICE):
        part = data[start : start + _SLICE + 1].astype(np.uint16)
        counts += np.bincount(part[:-1] << 8 | part[1:], minlength=counts.size)
    pairs = counts.reshape(_NUM_BYTES, _NUM_BYTES)
    return max(0.0, _entropy(counts) - _entropy(pairs.sum(axis=1)))


def _entropy(counts: Array) -> float:
    probabilities = counts[counts > 0] / counts.sum()
    return float(-np.sum(probabilities * np.log(probabilities))) + 0.0  # no -0.0


def _check(data: Array, where: str, *, at_least: int) -> None:
    if data.dtype != np.uint8 or data.ndim != 1:
        raise TypeError(
            f"{where}: expected a uint8 vector, got {data.dtype} of shape {data.shape}"
        )
    if data.size < at_least:
        raise ValueError(
            f"{where}: expected at least {at_least} byte(s), got {data.size}"
        )
