"""Models and their losses, and the published sizes of presets."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jaxinf_models import (
    MODELS,
    GPT2Config,
    abstract_params,
    config_for,
    losses,
    make_model,
    num_params,
    score,
    split,
    task_loss,
)

TINY = GPT2Config(61, 16, num_layers=2, num_heads=2, num_features=8, dropout=0.5)
# Numbers of params, as those of the checkpoints on the hub.
PUBLISHED = {
    ("bert", "base"): 109_514_298,
    ("t5", "small"): 60_506_624,
    ("vit", "base"): 86_567_656,
    ("bloom", "560m"): 559_214_592,
    ("llama", "tinyllama-1.1b"): 1_100_048_384,
    ("llama", "llama2-7b"): 6_738_415_616,
    ("llama", "llama3.2-1b"): 1_235_814_400,
    ("llama", "qwen2.5-0.5b"): 494_032_768,
    ("llama", "qwen3-0.6b"): 596_049_920,
}


@pytest.fixture(scope="module")
def made():
    return split(make_model(TINY, rngs=nnx.Rngs(0)))


def tokens_of(shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).integers(0, 61, shape), jnp.int32)


def value_of(graphdef, params, batch):

    def value(params, batch):
        return task_loss(nnx.merge(graphdef, params), "causal-lm", batch)

    return jax.jit(jax.value_and_grad(value))(params, batch)


def assert_near(found, expected):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)


def test_no_token_sees_a_later_one(made):
    apply = jax.jit(lambda tokens: nnx.merge(*made)(tokens))
    tokens = tokens_of((2, 16))
    before, after = apply(tokens), apply(tokens.at[:, 9].set((tokens[:, 9] + 1) % 61))
    np.testing.assert_array_equal(before[:, :9], after[:, :9])
    assert not jnp.any(jnp.all(before[:, 9:] == after[:, 9:], axis=-1))
    with pytest.raises(ValueError, match=r"at most num_positions=16 .* got 17"):
        nnx.merge(*made)(tokens_of((1, 17)))


@pytest.mark.parametrize(("seq", "max_logits_bytes"), [(12, 1 << 28), (13, 1000)])
def test_loss_is_mean_cross_entropy(made, monkeypatch, seq, max_logits_bytes):
    """Whole or in slices (13 is a prime: one token a slice), with the same gradient."""
    monkeypatch.setattr(losses, "MAX_LOGITS_BYTES", max_logits_bytes)
    tokens, targets = tokens_of((2, seq)), tokens_of((2, seq), seed=1)
    weights = jnp.ones((2, seq)).at[:, 5:].set(0)

    def value(params):
        logits = nnx.merge(made[0], params)(tokens)
        each = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
        return each.mean(), each[:, :5].mean()

    whole = {"tokens": tokens, "targets": targets}
    for number, batch in enumerate((whole, whole | {"weights": weights})):
        reference = jax.value_and_grad(lambda params, n=number: value(params)[n])
        assert_near(value_of(*made, batch=batch), jax.jit(reference)(made[1]))


@pytest.mark.parametrize("max_logits_bytes", [1000, 1 << 28])
def test_scores_add_up_over_batches(made, monkeypatch, max_logits_bytes):
    monkeypatch.setattr(losses, "MAX_LOGITS_BYTES", max_logits_bytes)
    weights = np.random.default_rng(0).integers(0, 2, (4, 12))
    tokens, targets = tokens_of((4, 12)), tokens_of((4, 12), seed=1)
    batch = {"tokens": tokens, "targets": targets, "weights": weights == 1}
    model = nnx.merge(*made)
    whole = score(model, "causal-lm", batch)
    halves = [
        score(model, "causal-lm", jax.tree.map(lambda a, h=h: a[h : h + 2], batch))
        for h in (0, 2)
    ]
    assert_near(whole, jax.tree.map(jnp.add, *halves))
    right = np.argmax(model(tokens), axis=-1) == targets
    assert whole.correct == np.sum(right & batch["weights"])


def test_large_logits_are_never_whole():
    """A backward pass of GPT-2's vocabulary holds slices, not 412 MB of logits."""
    config = GPT2Config(50257, 1024, num_layers=1, num_heads=1, num_features=8)
    graphdef, params = abstract_params(config)
    tokens = jax.ShapeDtypeStruct((2, 1024), jnp.int32)
    batch = {"tokens": tokens, "targets": tokens}
    lowered = jax.jit(lambda *given: value_of(graphdef, *given)).lower(params, batch)
    text = lowered.as_text()
    assert "x512x50257xf32" in text
    assert "x1024x50257xf32" not in text


def test_refused_configs():
    for changes, message in (
        ({"num_heads": 3}, "num_heads=3 must divide num_features=8"),
        ({"num_layers": 0}, "num_layers: expected at least 1, got 0"),
        ({"dtype": "float16"}, "dtype: expected 'float32' or 'bfloat16', got 'flo"),
        ({"param_dtype": "int8"}, "param_dtype: expected"),
    ):
        with pytest.raises(ValueError, match=message):
            dataclasses.replace(TINY, **changes)
    with pytest.raises(ValueError, match="expected one of gpt2's: causal-lm"):
        config_for(TINY, "masked-lm")


@pytest.mark.parametrize("model", MODELS)
def test_presets(model):
    family = MODELS[model]
    assert "nano" in family.presets
    for name, preset in family.presets.items():
        if (model, name) in PUBLISHED:
            assert num_params(preset) == PUBLISHED[model, name]
        for task in family.tasks:
            assert type(config_for(preset, task, num_labels=3)) is family.config_type
