"""The trainer keeps checkpoints, and restores them."""

import json
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxinf.cli import main as jaxinf_main
from jaxinf.processes import Group
from jaxinf.train import evaluate
from jaxinf.train.config import TrainConfig
from jaxinf.train.evaluate import Best, Evaluation, best_of
from jaxinf.train.loop import train
from jaxinf.train.lora import model_of


@pytest.fixture
def config(tmp_path, tiny):
    """Makes configs of a tiny run, on a tiny model."""
    text = tmp_path / "text"
    text.write_bytes(bytes(range(32, 127)) * 100)

    def make(**changes):
        settings = {
            "store": tmp_path / "store",
            "log_dir": tmp_path / "log",
            "data": (str(text),),
            "batch_size": 1,
            "seq_len": 4,
            "warmup_steps": 2,
        }
        return TrainConfig(**(settings | changes))

    with tiny():
        yield make


def restore(config, name):
    words = ["checkpoint", "restore", str(config().store), name, "--discard-current"]
    assert jaxinf_main(words) == 0


def losses(path):
    lines = (path / "metrics.jsonl").read_text().splitlines()
    return {line["step"]: line["loss"] for line in map(json.loads, lines)}


@pytest.mark.long
def test_checkpoints_by_policy_and_back_to_one(config, tmp_path, capsys):
    options = {"checkpoint_every": 2}
    train(config(steps=11, **options))
    kept = sorted(int(p.name) for p in (tmp_path / "store/checkpoints").iterdir())
    assert kept == [8, 10, 11]
    assert "step 10: checkpoint 10" in capsys.readouterr().out
    first = losses(tmp_path / "log")
    restore(config, "8")
    train(config(steps=11, durability=3))
    assert "resuming at step 8" in capsys.readouterr().out
    assert losses(tmp_path / "log") == first
    train(config(steps=13, **options))  # step 12 is new, checkpoint 10 is there already
    kept = sorted(int(p.name) for p in (tmp_path / "store/checkpoints").iterdir())
    assert kept == [11, 12, 13]


@pytest.mark.long
def test_the_best_evaluated_step_is_kept(config, tmp_path):
    """Also by a run that was complete once: its best is replaced, or stays."""

    def losses_and_best():  # the losses after step 0
        lines = (tmp_path / "log" / "validation.jsonl").read_text().splitlines()
        found = {e["committed"]: e["loss"] for e in map(json.loads, lines[1:])}
        record = tmp_path / "store/checkpoints/best/commit.json"
        return found, json.loads(record.read_text())["step"]

    for steps in (4, 8):
        assert train(config(steps=steps, eval_every=2)) == 0
        found, best = losses_and_best()
        assert found[best] == min(found.values())


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ({"best": {"step": 2, "loss": 1.5}}, Best(2, 1.5)),
        ({"best": {"step": 1, "loss": 1.5}}, Best()),
        ({"best": {"step": 2, "loss": "x"}}, Best()),
        ({"best": {"step": 2, "loss": 10**400}}, Best()),
        ({"best": {"loss": 1.5}}, Best()),
        ({"best": 3}, Best()),
        (None, Best()),
    ],
)
def test_the_best_loss_is_what_the_last_commit_says(said, expected):
    held = SimpleNamespace(name="best", step=2)
    given = {"exists": True, "checkpoints": lambda: [held], "payload": said}
    alone = Group("alone")
    assert best_of(SimpleNamespace(step=4, **given), alone) == expected
    assert best_of(None, alone) == Best()


def test_processes_have_one_best():
    """Some had replaced theirs when they were killed."""
    payload = {"best": {"step": 5, "loss": 2.0}}

    def best_in_processes(*steps):
        stores = [
            SimpleNamespace(
                exists=True,
                step=10,
                payload=payload,
                checkpoints=lambda n=n: [SimpleNamespace(name="best", step=n)],
            )
            for n in steps
        ]
        own = [best_of(store, Group("alone")) for store in stores]
        return [best_of(s, SimpleNamespace(gather=lambda *_: own)) for s in stores]

    assert best_in_processes(5, 5) == [Best(5, 2.0)] * 2
    for steps in ((10, 10), (10, 5), (5, 10)):
        assert best_in_processes(*steps) == [Best()] * 2


def test_an_evaluation_weighs_batches_by_their_tokens(monkeypatch):
    scores = iter([(90.0, 30.0, 15.0), (2.0, 2.0, 1.0)])
    batches = [{"tokens": np.zeros((1, 4))}] * 2
    monkeypatch.setattr(evaluate, "one_epoch", lambda *_, **__: batches)
    data = SimpleNamespace(validation=None, row_map=None)
    found = evaluate.evaluator(
        TrainConfig(), data, lambda function: lambda params, batch: next(scores)
    )
    assert found(None) == Evaluation(92 / 32, 16 / 32)


def test_adapters_are_added_with_their_scale():
    layer = nnx.Linear(6, 5, use_bias=False, rngs=nnx.Rngs(0))
    graphdef, params = nnx.split(nnx.Dict(attn=layer))
    tree = nnx.to_pure_dict(params)
    a, b = jnp.full((6, 2), 0.25), jnp.full((2, 5), 0.5)
    tree["attn"] |= {"lora_a": a, "lora_b": b}
    x = jnp.arange(6.0)
    expected = layer(x) + (16 / 2) * (x @ a @ b)
    np.testing.assert_allclose(model_of(graphdef, tree).attn(x), expected, rtol=1e-6)
