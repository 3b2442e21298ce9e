"""Numbers: parts of unlike weight, schedule-free params, NaN that is let through."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from safetensors.numpy import load_file

import jaxinf
from jaxinf.cli import main as jaxinf_main
from jaxinf.train.__main__ import main

pytestmark = pytest.mark.optimized

WEIGHTS = np.array([1, 1, 63, 63], np.float32)
BATCH = {"x": np.linspace(-1, 1, 24, dtype=np.float32).reshape(4, 6), "w": WEIGHTS}
PARAMS = {"w": jnp.linspace(0.5, 1.5, 6)}


def mean_loss(params, batch):
    errors = (batch["x"] @ params["w"] - 1) ** 2
    return jnp.sum(batch["w"] * errors) / jnp.sum(batch["w"])


def test_parts_of_a_batch_weigh_as_they_are_told(open_store):
    step = jaxinf.stream(
        mean_loss,
        optax.sgd(0.1),
        open_store(),
        memory_bytes=256 << 20,
        micro_batches=2,
        weights=lambda part: jnp.sum(part["w"]),
    )
    step.load(PARAMS, batch=BATCH)
    found, _ = step(BATCH)
    loss, gradients = jax.value_and_grad(mean_loss)(PARAMS, BATCH)
    assert float(found) == pytest.approx(float(loss), rel=1e-6)
    expected = PARAMS["w"] - 0.1 * gradients["w"]
    np.testing.assert_allclose(step.params(PARAMS)["w"], expected, rtol=1e-6)


T5 = {
    "model_type": "t5",
    "vocab_size": 257,
    "num_layers": 1,
    "num_decoder_layers": 1,
    "num_heads": 2,
    "d_model": 32,
    "d_kv": 16,
    "d_ff": 32,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 16,
    "tie_word_embeddings": True,
    "feed_forward_proj": "relu",
    "layer_norm_epsilon": 1e-6,
    "decoder_start_token_id": 0,
    "dropout_rate": 0.0,
}
PLAIN_SGD = (
    "--optimizer",
    "sgd",
    "--optimizer-args",
    "momentum=0",
    "--learning-rate",
    1,
)
PLAIN_SGD += ("--warmup-steps", 0, "--clip-norm", 0)


@pytest.mark.long
def test_each_token_weighs_the_same_with_micro_batches(place):
    (place / "config.json").write_text(json.dumps(T5))
    pairs = [{"prompt": "a", "response": "b"}, {"prompt": "c", "response": "d" * 63}]
    data = place / "pairs.jsonl"
    data.write_text("".join(json.dumps(one) + "\n" for one in pairs))
    words = ("--preset", place / "config.json", "--data", data)
    words += ("--validation", data, "--mode", "stream", "--memory", "64MiB")
    words += (*PLAIN_SGD, "--batch-size", 2, "--seq-len", 64, "--steps", 1)
    losses, params = [], []
    for count in (1, 2):
        store = place / f"parts-{count}"
        own = ("--micro-batches", count, "--store", store)
        assert main([str(word) for word in (*words, *own)]) == 0
        line = (place / f"parts-{count}-log" / "metrics.jsonl").read_text()
        losses.append(json.loads(line)["loss"])
        out = place / f"out-{count}"
        export = ("checkpoint", "export", store, out, "--format", "huggingface")
        assert jaxinf_main([str(word) for word in export]) == 0
        params.append(load_file(out / "model.safetensors"))
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)
    for name, values in params[0].items():
        np.testing.assert_allclose(params[1][name], values, rtol=1e-5, atol=1e-6)


@pytest.mark.long
def test_an_export_of_a_schedule_free_run_is_of_x(place):
    """x = (y - (1 - b1) z) / b1; y is what the store trains, b1 is 0.9."""
    (place / "text.txt").write_text("hello world, this is text\n" * 200)
    (place / "config.json").write_text(
        json.dumps(
            {"model_type": "gpt2", "n_layer": 1, "n_head": 2, "n_embd": 16}
            | {"n_positions": 16, "vocab_size": 256}
        )
    )
    words = ("--preset", place / "config.json", "--data", place / "text.txt")
    words += ("--optimizer", "schedule_free_sgd", "--learning-rate", 1)
    words += ("--warmup-steps", 0, "--batch-size", 2, "--seq-len", 8, "--steps", 6)
    words += ("--store", place / "s")
    assert main([str(word) for word in words]) == 0
    export = ("checkpoint", "export", place / "s", place / "out")
    export += ("--format", "huggingface")
    assert jaxinf_main([str(word) for word in export]) == 0
    found = load_file(place / "out" / "model.safetensors")
    with jaxinf.open_store(place / "s") as store:
        y, z = (store.read(state, "wte") for state in ("params", "z"))
    x = (y - (1 - 0.9) * z) / 0.9
    assert np.abs(x - y).max() > 1e-3
    (name,) = [name for name in found if name.endswith("wte.weight")]
    np.testing.assert_allclose(found[name], x, atol=1e-6)


def test_a_nan_that_is_let_through_is_named(open_store, caplog, recwarn, capfd):
    store = open_store()
    tx = optax.apply_if_finite(optax.adam(1e-2), max_consecutive_errors=1)
    tx = jaxinf.smart_update(tx, store, nonfinite="allow")
    params = PARAMS
    state, update = tx.init(params), jax.jit(tx.update)
    for _ in range(3):
        updates, state = update({"w": jnp.full(6, jnp.nan)}, state, params)
        params = optax.apply_updates(params, updates)
    store.wait(state)
    assert np.isnan(store.read("params", "w")).all()
    printed = capfd.readouterr()
    said = [caplog.text, printed.out, printed.err, *(str(w.message) for w in recwarn)]
    assert any("NaN" in text and "w" in text and "step" in text for text in said)


def adamw_bits(tx, others):
    params = {"w": jnp.linspace(-1.0, 1.0, 4), **others}
    state, update = tx.init(params), jax.jit(tx.update)
    for n in range(1, 21):
        gradients = jax.tree.map(
            lambda p, n=n: (p * 0.37 + 0.01 * n).astype(p.dtype), params
        )
        updates, state = update(gradients, state, params)
        params = jax.jit(optax.apply_updates)(params, updates)
    return np.asarray(params["w"])


def test_a_leaf_without_elements_changes_no_bit(open_store):
    """XLA drops it, so it does not count as a use of what divides the moments."""
    tx, others = optax.adamw(1e-2), {"empty": jnp.zeros((0, 3))}
    found = adamw_bits(jaxinf.smart_update(tx, open_store()), others)
    np.testing.assert_array_equal(found, adamw_bits(tx, others))


def test_an_integer_leaf_changes_no_bit_of_the_others(open_store):
    """In optax's own program it is a second use of what divides the moments."""
    tx, key = optax.adamw(1e-2), {"key": jax.random.PRNGKey(1)}
    found = adamw_bits(jaxinf.smart_update(tx, open_store()), key)
    np.testing.assert_array_equal(found, adamw_bits(tx, {}))
