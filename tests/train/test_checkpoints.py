"""The trainer keeps checkpoints, and restores them."""

import json
from types import SimpleNamespace

import numpy as np
import pytest

from jaxinf.cli import main as jaxinf_main
from jaxinf.processes import Group
from jaxinf.train import evaluate
from jaxinf.train.config import TrainConfig
from jaxinf.train.evaluate import BestCheckpoint, Evaluation, find_best


@pytest.mark.long
def test_checkpoints_by_policy_and_back_to_one(run, losses, tmp_path, capsys):
    store, log = tmp_path / "store", tmp_path / "store-log"
    words = ("--store", store, "--checkpoint-every", 2, "--steps")

    def kept():
        return sorted(int(path.name) for path in (store / "checkpoints").iterdir())

    assert run(*words, 11) == 0
    assert kept() == [8, 10, 11]
    assert "step 10: checkpoint 10" in capsys.readouterr().out
    first = losses(log)
    restore = ["checkpoint", "restore", str(store), "8", "--discard-current"]
    assert jaxinf_main(restore) == 0
    assert run("--store", store, "--durability", 3, "--steps", 11) == 0
    assert "resuming at step 8" in capsys.readouterr().out
    assert losses(log) == first
    assert run(*words, 13) == 0  # step 12 is new, checkpoint 11 is there already
    assert kept() == [11, 12, 13]


@pytest.mark.long
def test_the_best_evaluated_step_is_kept(run, lines, tmp_path):
    """Also by a run that was complete once: its best is replaced, or stays."""
    for steps in (4, 8):
        words = ("--store", tmp_path / "store", "--eval-every", 2)
        assert run(*words, "--steps", steps) == 0
        evals = lines(tmp_path / "store-log", "validation.jsonl")
        found = {one["committed"]: one["loss"] for one in evals[1:]}
        record = tmp_path / "store/checkpoints/best/commit.json"
        best = json.loads(record.read_text())["step"]
        assert found[best] == min(found.values())


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ({"best": {"step": 2, "loss": 1.5}}, BestCheckpoint(2, 1.5)),
        ({"best": {"step": 1, "loss": 1.5}}, BestCheckpoint()),
        ({"best": {"step": 2, "loss": 10**400}}, BestCheckpoint()),
        ({"best": 3}, BestCheckpoint()),
        (None, BestCheckpoint()),
    ],
)
def test_the_best_loss_is_what_the_last_commit_says(said, expected):
    held = SimpleNamespace(name="best", step=2)
    given = {"exists": True, "checkpoints": lambda: [held], "payload": said}
    alone = Group("alone")
    assert find_best(SimpleNamespace(step=4, **given), alone) == expected
    assert find_best(None, alone) == BestCheckpoint()


def test_processes_have_one_best():
    """Some had replaced theirs when they were killed."""
    given = {"exists": True, "step": 10, "payload": {"best": {"step": 5, "loss": 2.0}}}

    def best_in_processes(*steps):
        stores = [
            SimpleNamespace(
                **given, checkpoints=lambda n=n: [SimpleNamespace(name="best", step=n)]
            )
            for n in steps
        ]
        own = [find_best(store, Group("alone")) for store in stores]
        return [find_best(s, SimpleNamespace(gather=lambda *_: own)) for s in stores]

    assert best_in_processes(5, 5) == [BestCheckpoint(5, 2.0)] * 2
    for steps in ((10, 10), (10, 5), (5, 10)):
        assert best_in_processes(*steps) == [BestCheckpoint()] * 2


def test_an_evaluation_weighs_batches_by_their_tokens(monkeypatch):
    scores = iter([(90.0, 30.0, 15.0), (2.0, 2.0, 1.0)])
    batches = [{"tokens": np.zeros((1, 4))}] * 2
    monkeypatch.setattr(evaluate, "epoch_batches", lambda *_, **__: batches)
    data = SimpleNamespace(validation=None, row_map=None)
    found = evaluate.make_evaluator(
        TrainConfig(), data, lambda function: lambda params, batch: next(scores)
    )
    assert found(None) == Evaluation(92 / 32, 16 / 32)
