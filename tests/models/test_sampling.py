"""Sampling with keys and values of earlier tokens, for each language model."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jaxinf_models import BloomConfig, GPT2Config, LlamaConfig, generate, make_model
from jaxinf_models.layers import Past

LENGTH = 12
CONFIGS = {
    "gpt2": GPT2Config(32, 16, num_layers=2, num_heads=2, num_features=8),
    "bloom": BloomConfig(32, 2, 2, 8),
    "llama": LlamaConfig(32, 16, 2, 4, 2, 16, 24, window=3, qk_norm=True),
}


@pytest.fixture(params=CONFIGS)
def model(request):
    return make_model(CONFIGS[request.param], rngs=nnx.Rngs(0))


def test_tokens_that_follow_others_have_the_hidden_values_of_the_whole(model):
    config = model.config
    tokens = jax.random.randint(jax.random.key(1), (2, LENGTH), 0, 32)
    expected = model.hidden(tokens)
    heads = getattr(config, "num_kv_heads", config.num_heads)
    room = jnp.zeros((2, LENGTH, heads, config.num_features // config.num_heads))
    held = [(room, room)] * config.num_layers
    found = []
    for start, stop in ((0, 5), (5, 6), (6, 7), (7, LENGTH)):
        pasts = [Past(*one, jnp.int32(start)) for one in held]
        found.append(model.continued(tokens[:, start:stop], pasts))
        held = [(past.keys, past.values) for past in pasts]
    np.testing.assert_allclose(jnp.concatenate(found, axis=1), expected, atol=2e-5)


def test_greedy_tokens_are_the_likeliest(model):
    prompt = jax.random.randint(jax.random.key(2), (1, 3), 0, 32)
    draw = {"key": jax.random.key(0), "temperature": 0, "max_context": 8}
    out = generate(model, prompt, 10, **draw)
    text = np.asarray(prompt)
    for _ in range(10):
        logits = model.head(model.hidden(jnp.asarray(text[:, -8:])))
        text = np.append(text, np.argmax(logits[:, -1:], axis=-1), axis=1)
    np.testing.assert_array_equal(out, text[:, 3:])


def test_sampling_stops_when_every_sequence_has_ended():
    model = make_model(CONFIGS["gpt2"], rngs=nnx.Rngs(0))
    prompt = jnp.array([[1, 2], [3, 4]])
    whole = np.asarray(generate(model, prompt, 9, key=jax.random.key(0)))
    end = next(n for n in whole[0] if n in whole[1])  # drawn in both
    last = max(list(row).index(end) for row in whole)
    found = generate(model, prompt, 9, key=jax.random.key(0), end=int(end))
    np.testing.assert_array_equal(found, whole[:, : last + 1])
    assert last < 8
