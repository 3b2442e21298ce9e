"""Entropies of distributions whose entropy is known."""

import numpy as np
import pytest

from jaxinf.train import entropy
from jaxinf.train.entropy import bigram_entropy, unigram_entropy


def test_uniform_bytes():
    data = np.tile(np.arange(256, dtype=np.uint8), 50)
    assert unigram_entropy(data) == pytest.approx(np.log(256), abs=1e-12)
    # Each byte tells the next one.
    assert bigram_entropy(data) == pytest.approx(0.0, abs=1e-12)


def test_constant():
    data = np.zeros(1000, np.uint8)
    assert unigram_entropy(data) == 0.0
    assert bigram_entropy(data) == 0.0


def test_skewed_bytes():
    data = np.array([7] * 3 + [255], np.uint8)
    expected = -(0.75 * np.log(0.75) + 0.25 * np.log(0.25))
    assert unigram_entropy(data) == pytest.approx(expected, abs=1e-12)


def test_markov_chain():
    """Stay with probability 0.9: H(x) = ln 2, H(x_t | x_{t-1}) = H(0.9)."""
    switches = np.random.default_rng(0).random(400_000) < 0.1
    data = (np.cumsum(switches) % 2 * 200).astype(np.uint8)
    expected = -(0.9 * np.log(0.9) + 0.1 * np.log(0.1))
    assert unigram_entropy(data) == pytest.approx(np.log(2), abs=1e-3)
    assert bigram_entropy(data) == pytest.approx(expected, abs=5e-3)


def test_bigram_by_hand():
    """0 is followed by 1, 1, 2; then H = 3/5 H(1/3), as 1 and 2 lead to 0."""
    data = np.array([0, 1, 0, 1, 0, 2], np.uint8)
    third = -(np.log(1 / 3) / 3 + np.log(2 / 3) * 2 / 3)
    assert bigram_entropy(data) == pytest.approx(0.6 * third, abs=1e-12)


@pytest.mark.parametrize("num_bytes", [2, 1023, 1024, 1025, 4097])
def test_slices_do_not_show(monkeypatch, num_bytes):
    data = np.random.default_rng(num_bytes).integers(0, 256, num_bytes, np.uint8)
    whole = unigram_entropy(data), bigram_entropy(data)
    monkeypatch.setattr(entropy, "_SLICE", 1024)
    assert (unigram_entropy(data), bigram_entropy(data)) == whole
