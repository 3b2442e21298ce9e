"""Batches: every row once an epoch, one number for a position, shares of one batch."""

import numpy as np
import pytest

from jaxinf.train.data.loader import endless_batches, epoch_batches, iterate_from
from jaxinf.train.data.rows import make_masking


class Numbers:
    """Rows that contain their own number."""

    def __init__(self, num):
        self.num = num

    def __len__(self):
        return self.num

    def __getitem__(self, number):
        return {"number": np.int32(number), "row": np.full(3, number, np.int32)}


def noisy(row, rng):
    return {**row, "noise": rng.integers(0, 1 << 30, 4)}


def assert_same(one, other):
    assert set(one) == set(other)
    for name in one:
        assert one[name].dtype == other[name].dtype
        np.testing.assert_array_equal(one[name], other[name])


def test_batches_golden():
    """Fixed for good: a resumed run must see the batches of the interrupted one.

    Regenerate: `endless_batches(Numbers(1000), batch_size=4, seed=9)[5]["number"]`.
    """
    batches = endless_batches(Numbers(1000), batch_size=4, seed=9, row_map=noisy)
    assert batches[5]["number"].tolist() == [204, 741, 607, 987]
    noise = [827919079, 483971743, 137068898, 154486675]
    assert batches[5]["noise"][0].tolist() == noise


def test_any_position_resumes_at_the_very_next_batch():
    def make():
        return endless_batches(Numbers(7), batch_size=3, seed=2**32 - 1, row_map=noisy)

    iterator = iterate_from(make(), 0)
    seen = [next(iterator) for _ in range(9)]
    for number in range(9):
        assert_same(make()[number], seen[number])
        resumed = iterate_from(make(), number)
        for expected in seen[number:]:
            assert_same(next(resumed), expected)


def test_processes_share_the_batches_of_one():
    def make(batch_size=8, num=10, shard=(0, 1)):
        return endless_batches(
            Numbers(num), batch_size=batch_size, seed=3, row_map=noisy, shard=shard
        )

    whole, shards = make(), [make(shard=(n, 4)) for n in range(4)]
    for number in range(5):
        parts = [shard[number] for shard in shards]
        for name, expected in whole[number].items():
            together = np.concatenate([part[name] for part in parts])
            np.testing.assert_array_equal(together, expected)


def test_every_row_comes_once_an_epoch():
    """In training in another order each time, in an evaluation always in the same."""
    batches = endless_batches(Numbers(12), batch_size=3, seed=0)
    epochs = [
        np.concatenate([batches[4 * epoch + n]["number"] for n in range(4)])
        for epoch in range(3)
    ]
    assert all(sorted(epoch) == list(range(12)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    options = {"batch_size": 4, "seed": 2, "row_map": noisy}
    one, other = (epoch_batches(Numbers(10), **options) for _ in range(2))
    assert [len(one[n]["number"]) for n in range(3)] == [4, 4, 2]
    assert sorted(np.concatenate([one[n]["number"] for n in range(3)])) == [*range(10)]
    for n in range(3):
        assert_same(one[n], other[n])


# --- masking --------------------------------------------------------------------------


def test_masking_shares():
    mask = make_masking(mask=255, special=(0,), vocab_size=100)
    tokens = np.tile(np.arange(100, dtype=np.int32), 200)  # a hundredth are ends
    row = {"tokens": tokens, "segments": np.ones_like(tokens)}
    masked = mask(row, np.random.Generator(np.random.Philox(1)))
    chosen = masked["weights"] == 1
    hidden = masked["tokens"]
    np.testing.assert_array_equal(masked["targets"], tokens)
    np.testing.assert_array_equal(hidden[~chosen], tokens[~chosen])
    assert chosen.sum() == round(0.15 * 19_800)
    assert not chosen[tokens == 0].any()
    assert (hidden[chosen] == 255).mean() == pytest.approx(0.8, abs=0.03)
    assert (hidden[chosen] == tokens[chosen]).mean() == pytest.approx(0.1, abs=0.03)
    assert hidden.dtype == np.int32


@pytest.mark.parametrize("tokens", [[5], [0, 0], [7, 0]])
def test_something_is_always_asked_and_padding_never(tokens):
    mask = make_masking(mask=255, special=(0,), vocab_size=100)
    row = {"tokens": np.array([*tokens, 3, 3, 3, 3], np.int32)}
    row["segments"] = np.array([1] * len(tokens) + [0] * 4, np.int32)
    masked = mask(row, np.random.Generator(np.random.Philox(1)))
    assert masked["weights"].sum() == masked["weights"][: len(tokens)].sum() == 1
