"""Every task from data to best checkpoint, stopped and resumed to the bit."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hub_folders import write_pictures
from jaxinf_models import GPT2Config, make_model, split

from jaxinf.train.__main__ import main
from jaxinf.train.config import TrainConfig
from jaxinf.train.step import make_loss_fn, micro_batch_weight

PAIRS = [{"prompt": f"{n}+1=", "response": str(n + 1)} for n in range(60)]
TEXTS = [{"text": f"number {n} of {n % 7}", "label": n % 3} for n in range(60)]


@pytest.fixture
def task(tmp_path, tiny):
    """Runs the trainer in this process on a tiny model; returns the exit status."""
    files = {"images": write_pictures(tmp_path / "images")}
    plain = [{"text": record["text"]} for record in TEXTS]
    for name, records in (("pairs", PAIRS), ("texts", TEXTS), ("plain", plain)):
        files[name] = tmp_path / f"{name}.jsonl"
        files[name].write_text("".join(json.dumps(r) + "\n" for r in records))

    def call(model, data, *words):
        place = ["--data", files.get(data, data), "--batch-size", 4]
        if model != "vit":
            place += ["--seq-len", 12]
        with tiny():
            return main([str(word) for word in ("--model", model, *place, *words)])

    return call


CLASSES = ("--task", "classification")


@pytest.mark.long
@pytest.mark.parametrize(
    ("model", "data", "words"),
    [
        ("gpt2", "pairs", ()),
        ("bloom", "pairs", ()),
        ("bert", "plain", ("--task", "masked-lm")),
        ("vit", "images", ()),
        ("t5", "pairs", ()),
        ("bert", "texts", CLASSES),
        ("llama", "texts", CLASSES),
    ],
)
def test_stopped_and_resumed_is_uninterrupted(
    task, losses, tmp_path, model, data, words
):
    assert task(model, data, "--store", tmp_path / "whole", "--steps", 6, *words) == 0
    for steps in (2, 6):
        where = ("--store", tmp_path / "parts")
        assert task(model, data, *where, "--steps", steps, *words) == 0
    assert losses(tmp_path / "parts-log") == losses(tmp_path / "whole-log")
    assert len(losses(tmp_path / "parts-log")) == 6
    words = ("--mode", "stream", "--memory", "256MiB", *words)
    assert task(model, data, "--store", tmp_path / "s", "--steps", 6, *words) == 0
    expected = losses(tmp_path / "whole-log")
    np.testing.assert_allclose(losses(tmp_path / "s-log"), expected, rtol=1e-4)


@pytest.mark.parametrize(
    ("model", "data", "words", "expected"),
    [
        ("vit", "texts", (), "texts.jsonl: expected images, in a folder"),
        ("vit", "images", ("--tokenizer", "x"), "--tokenizer: the model takes images"),
        ("gpt2", "pairs", ("--task", "masked-lm"), "expected one of gpt2's, causal-lm"),
        ("gpt2", "pairs", ("--tokenizer", "x"), "--tokenizer x: expected a folder"),
        ("gpt2", "pairs", ("--seed", 2**32), "--seed: expected less than 2**32"),
        ("gpt2", "pairs", ("--batch-size", 2**62), "expected fewer than 2**31 tok"),
    ],
)
def test_refused_before_the_store_is_made(
    task, tmp_path, capsys, model, data, words, expected
):
    assert task(model, data, "--store", tmp_path / "store", *words) == 2
    assert expected in capsys.readouterr().err
    assert not (tmp_path / "store").exists()


# --- resuming -------------------------------------------------------------------------


@pytest.mark.long
def test_a_part_of_which_no_token_is_learned_weighs_nothing():
    config = GPT2Config(32, 8, num_layers=1, num_heads=1, num_features=8)
    graphdef, params = split(make_model(config, rngs=nnx.Rngs(0)))
    tokens = jnp.ones((2, 8), jnp.int32)
    part = {"tokens": tokens, "targets": tokens, "weights": jnp.zeros((2, 8))}
    loss_fn = make_loss_fn(TrainConfig(micro_batches=2), graphdef)
    step = jax.jit(jax.value_and_grad(loss_fn))
    loss, gradients = step(params, part)
    assert loss == micro_batch_weight(part) == 0
    assert not any(leaf.any() for leaf in jax.tree.leaves(gradients))
    part["weights"] = part["weights"].at[1].set(1)
    assert micro_batch_weight(part) == 8
    assert step(params, part)[0] > 1
    assert micro_batch_weight({"labels": jnp.arange(4)}) == 1  # as that of each part
