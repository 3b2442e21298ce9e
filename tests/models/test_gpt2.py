"""GPT-2: shapes, causality, tying, published sizes, precision, loss."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jaxinf_models import (
    GPT2,
    GPT2Config,
    abstract_params,
    loss,
    losses,
    split,
)

TINY = GPT2Config(61, 16, num_layers=2, num_heads=2, num_features=8)


@functools.cache
def initialised(config, seed):
    """Draws params in one jit: op by op it takes longer than most tests."""
    return split(GPT2(config, rngs=nnx.Rngs(seed)))


def build(config=TINY, seed=0):
    return nnx.merge(*initialised(config, seed))


def tokens_of(shape, config=TINY, seed=0):
    rng = np.random.default_rng(seed)
    return jnp.asarray(rng.integers(0, config.vocab_size, shape), jnp.int32)


@functools.partial(jax.jit, static_argnums=0)
def apply(graphdef, params, tokens):
    return nnx.merge(graphdef, params)(tokens)


def logits_of(model, tokens):
    """Like `model(tokens)`, but compiled, which is much faster."""
    return apply(*split(model), tokens)


def replace(config, **changes):
    return dataclasses.replace(config, **changes)


def test_sequence_beyond_num_positions():
    with pytest.raises(ValueError, match=r"at most num_positions=16 .* got 17"):
        build()(tokens_of((1, 17)))


def test_causality():
    model, tokens = build(), tokens_of((2, 16))
    changed = tokens.at[:, 9].set((tokens[:, 9] + 1) % 61)
    before, after = logits_of(model, tokens), logits_of(model, changed)
    np.testing.assert_array_equal(before[:, :9], after[:, :9])
    assert not jnp.any(jnp.all(before[:, 9:] == after[:, 9:], axis=-1))


@pytest.mark.parametrize("param_dtype", ["float32", "bfloat16"])
def test_bfloat16_compute(param_dtype):
    config = replace(TINY, dtype="bfloat16", param_dtype=param_dtype)
    model, tokens = build(config), tokens_of((2, 16))
    graphdef, params = split(model)
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype(param_dtype)}
    assert jax.eval_shape(model.hidden, tokens).dtype == jnp.bfloat16
    logits = apply(graphdef, params, tokens)
    assert logits.dtype == jnp.float32
    # The same params in fp32: bfloat16 keeps 8 bits, logits here are about 0.1.
    as_fp32 = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), params)
    exact = apply(abstract_params(TINY)[0], as_fp32, tokens)
    np.testing.assert_allclose(logits, exact, atol=5e-3)
    grads = jax.eval_shape(
        jax.grad(lambda p: loss(nnx.merge(graphdef, p), tokens, tokens)), params
    )
    assert {leaf.dtype for leaf in jax.tree.leaves(grads)} == {jnp.dtype(param_dtype)}


@pytest.mark.parametrize(("seq", "max_logits_bytes"), [(12, 1 << 28), (13, 1000)])
def test_loss_is_mean_cross_entropy(monkeypatch, seq, max_logits_bytes):
    """Whole or in slices (13 is a prime: one token a slice), with the same gradient."""
    monkeypatch.setattr(losses, "MAX_LOGITS_BYTES", max_logits_bytes)
    graphdef, params = split(build())
    x, y = tokens_of((2, seq), seed=1), tokens_of((2, seq), seed=2)

    def reference(params):
        logits = nnx.merge(graphdef, params)(x)
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

    def ours(params):
        return loss(nnx.merge(graphdef, params), x, y)

    found = jax.jit(jax.value_and_grad(ours))(params)
    expected = jax.jit(jax.value_and_grad(reference))(params)
    assert (found[0].dtype, found[0].shape) == (jnp.float32, ())
    for got, want in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6)


def test_large_logits_are_never_whole():
    """A backward pass of GPT-2's vocabulary holds slices, not 412 MB of logits."""
    config = GPT2Config(50257, 1024, num_layers=1, num_heads=1, num_features=8)
    graphdef, params = abstract_params(config)
    tokens = jax.ShapeDtypeStruct((2, 1024), jnp.int32)

    def value(params, tokens):
        return loss(nnx.merge(graphdef, params), tokens, tokens)

    lowered = jax.jit(jax.grad(value)).lower(params, tokens)
    text = lowered.as_text()
    assert "x512x50257xf32" in text
    assert "x1024x50257xf32" not in text


def test_config_refusals():
    for changes, message in (
        ({"num_heads": 3}, "num_heads=3 must divide num_features=8"),
        ({"num_layers": 0}, "num_layers: expected at least 1, got 0"),
        ({"dtype": "float16"}, "dtype: expected 'float32' or 'bfloat16', got 'flo"),
        ({"param_dtype": "int8"}, "param_dtype: expected"),
    ):
        with pytest.raises(ValueError, match=message):
            replace(TINY, **changes)
