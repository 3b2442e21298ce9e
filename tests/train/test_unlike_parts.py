"""Parts of unlike weight, and an export of schedule-free params."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file

import jaxinf
from jaxinf.cli import main as jaxinf_main
from jaxinf.train.__main__ import main

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
