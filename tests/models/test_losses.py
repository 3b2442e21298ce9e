"""Tasks: elements of a loss, separate documents, dropout, remat."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jaxinf_models import (
    GPT2Config,
    config_for,
    losses,
    make_model,
    score,
    split,
    task_loss,
)

TINY = GPT2Config(61, 16, num_layers=2, num_heads=2, num_features=8, dropout=0.5)


@pytest.fixture(scope="module")
def made():
    return split(make_model(TINY, rngs=nnx.Rngs(0)))


def tokens_of(shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).integers(0, 61, shape), jnp.int32)


def value_of(made, batch, **options):
    def value(params, batch):
        model = nnx.merge(made[0], params)
        return task_loss(model, "causal-lm", batch, **options)

    return jax.jit(jax.value_and_grad(value))(made[1], batch)


def assert_near(found, expected):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)


def test_what_has_no_weight_does_not_count(made):
    tokens, targets = tokens_of((2, 8)), tokens_of((2, 8), seed=1)
    weights = jnp.ones((2, 8)).at[:, 5:].set(0)
    weighted = {"tokens": tokens, "targets": targets, "weights": weights}
    short = {"tokens": tokens[:, :5], "targets": targets[:, :5]}
    assert_near(value_of(made, weighted), value_of(made, short))


@pytest.mark.parametrize("max_logits_bytes", [1000, 1 << 28])
def test_scores_add_up_over_batches(made, monkeypatch, max_logits_bytes):
    monkeypatch.setattr(losses, "MAX_LOGITS_BYTES", max_logits_bytes)
    rng = np.random.default_rng(0)
    batch = {
        "tokens": tokens_of((4, 12)),
        "targets": tokens_of((4, 12), seed=1),
        "weights": jnp.asarray(rng.integers(0, 2, (4, 12)), bool),
    }
    model = nnx.merge(*made)
    whole = score(model, "causal-lm", batch)
    halves = [
        score(model, "causal-lm", jax.tree.map(lambda a, h=h: a[h : h + 2], batch))
        for h in (0, 2)
    ]
    assert_near(whole, jax.tree.map(jnp.add, *halves))
    right = np.argmax(model(batch["tokens"]), axis=-1) == batch["targets"]
    assert whole.correct == np.sum(right & np.asarray(batch["weights"]))


def test_a_task_that_a_model_does_not_have():
    with pytest.raises(ValueError, match="expected one of gpt2's: causal-lm"):
        config_for(TINY, "masked-lm")
