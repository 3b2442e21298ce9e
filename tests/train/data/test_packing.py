"""Sequences and their rows: every token once, no document lost or joined."""

import functools

import jax
import numpy as np
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st
from jaxinf_models import GPT2Config, abstract_params, make_model, score, split

from jaxinf.train.data.rows import (
    Encoded,
    all_learned,
    fingerprint,
    make_labelled,
    make_pairs,
    make_windows,
    pack_examples,
)

documents = st.lists(
    st.lists(st.integers(1, 200), min_size=2, max_size=12), min_size=1, max_size=12
)


def encoded(lists, learned=None, labels=None):
    learned = learned or [[True] * len(ids) for ids in lists]
    labels = labels or [-1] * len(lists)
    return [
        Encoded(np.array(ids, np.uint8), np.array(mask, np.bool_), label)
        for ids, mask, label in zip(lists, learned, labels, strict=True)
    ]


def rows_of(rows):
    return [rows[number] for number in range(len(rows))]


@given(documents, st.integers(1, 9))
def test_causal_windows(lists, seq_len):
    rows = rows_of(make_windows(encoded(lists), seq_len, is_causal=True))
    flat = np.concatenate(lists)
    owner = np.repeat(range(len(lists)), [len(ids) for ids in lists])
    assert len(rows) == (flat.size - 1) // seq_len
    for number, row in enumerate(rows):
        part = slice(number * seq_len, (number + 1) * seq_len)
        after = slice(part.start + 1, part.stop + 1)
        np.testing.assert_array_equal(row["tokens"], flat[part])
        np.testing.assert_array_equal(row["targets"], flat[after])
        np.testing.assert_array_equal(row["weights"], owner[part] == owner[after])
        own = owner[part]
        np.testing.assert_array_equal(row["segments"], own - own[0] + 1)
        assert {row[n].dtype for n in row} == {np.dtype("int32"), np.dtype("float32")}


@given(documents, st.integers(1, 9))
def test_windows_without_targets(lists, seq_len):
    rows = rows_of(make_windows(encoded(lists), seq_len, is_causal=False))
    flat = np.concatenate(lists)
    assert len(rows) == flat.size // seq_len
    read = np.concatenate([*(row["tokens"] for row in rows), []])
    np.testing.assert_array_equal(read, flat[: len(rows) * seq_len])
    assert all(set(row) == {"tokens", "segments"} for row in rows)


@given(documents, st.integers(2, 16))
def test_packed_rows_hold_every_document_once(lists, seq_len):
    learned = [[i % 2 == 0 for i in ids] for ids in lists]
    rows = rows_of(pack_examples(encoded(lists, learned), seq_len, pad=255))
    found = []
    for row in rows:
        assert {array.shape for array in row.values()} == {(seq_len,)}
        is_padding = row["segments"] == 0
        assert (row["tokens"][is_padding] == 255).all()
        assert not row["weights"][is_padding].any()
        for segment in range(1, row["segments"].max() + 1):
            place = np.flatnonzero(row["segments"] == segment)
            assert place[-1] - place[0] == place.size - 1  # in one piece
            tokens, targets = row["tokens"][place], row["targets"][place]
            np.testing.assert_array_equal(tokens[1:], targets[:-1])
            np.testing.assert_array_equal(row["weights"][place], targets % 2 == 0)
            found.append([*tokens.tolist(), int(targets[-1])])
    assert sorted(found) == sorted(ids[: seq_len + 1] for ids in lists)


@functools.cache
def tiny_scores():
    config = GPT2Config(256, 16, num_layers=1, num_heads=2, num_features=16)
    params = jax.jit(lambda: split(make_model(config, rngs=nnx.Rngs(0)))[1])()
    graphdef, _ = abstract_params(config)

    @jax.jit
    def scores(row):
        batch = {name: array[None] for name, array in row.items()}
        return score(nnx.merge(graphdef, params), "causal-lm", batch)

    return scores


@pytest.mark.parametrize("kind", ["packed", "windows"])
def test_documents_of_a_row_do_not_see_each_other(kind):
    """A row's loss is the loss of its separate documents."""
    scores, seq_len = tiny_scores(), 13
    lists = [[5, 6, 7, 8, 0], [9, 1, 2, 0], [3, 4, 3, 4, 0]]
    if kind == "packed":
        (together,) = rows_of(pack_examples(encoded(lists), seq_len, pad=0))
    else:
        (together,) = rows_of(make_windows(encoded(lists), seq_len, is_causal=True))
    alone = [pack_examples(encoded([ids]), seq_len, pad=0)[0] for ids in lists]
    whole, parts = scores(together), [scores(row) for row in alone]
    assert whole.weight == sum(len(ids) - 1 for ids in lists)
    np.testing.assert_allclose(whole.loss, sum(p.loss for p in parts), rtol=1e-5)
    mixed = scores({**together, "segments": np.ones_like(together["segments"])})
    assert abs(mixed.loss - whole.loss) > 1e-4


def test_pairs():
    rows = make_pairs([encoded([[5, 6, 7, 8], [9, 1]])], 3, pad=0, start=7)
    row = rows[0]
    assert row["tokens"].tolist() == [5, 6, 7]
    assert row["decoder_tokens"].tolist() == [7, 9, 1]
    assert row["targets"].tolist() == [9, 1, 0]
    assert row["weights"].tolist() == [1, 1, 0]
    assert row["segments"].tolist() == [1, 1, 1]
    assert row["decoder_segments"].tolist() == [1, 1, 0]


def test_single():
    (part,) = encoded([[5, 6]], labels=[3])
    part = part._replace(token_types=np.array([0, 1], np.uint8))
    row = make_labelled([part], 4, pad=9)[0]
    assert row["tokens"].tolist() == [5, 6, 9, 9]
    assert row["segments"].tolist() == [1, 1, 0, 0]
    assert row["token_types"].tolist() == [0, 1, 0, 0]
    assert row["labels"] == 3


def test_the_fingerprint_is_of_flat_arrays():
    """Stores have it: it is the same however the examples are held."""
    parts = encoded([[1, 2], [3]])
    known = "af86cf64"
    assert fingerprint(parts).startswith(known)
    whole = [part._replace(is_learned=all_learned(part.tokens)) for part in parts]
    assert fingerprint(whole).startswith(known)
    for other in (
        encoded([[1, 2], [4]]),
        encoded([[1], [2, 3]]),
        encoded([[1, 2], [3]], [[True, False], [True]]),
        encoded([[1, 2], [3]], labels=[-1, 0]),
    ):
        assert not fingerprint(other).startswith(known)
