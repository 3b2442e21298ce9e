"""The trainer keeps an average, evaluates it, and exports it."""

import json

import numpy as np
import pytest
import safetensors.numpy

import jaxinf
from jaxinf.cli import main
from jaxinf.train.config import TrainConfig


def validation(log_dir):
    return [
        json.loads(line)
        for line in (log_dir / "validation.jsonl").read_text().splitlines()
    ]


@pytest.mark.long
@pytest.mark.parametrize("mode", [[], ["--mode", "stream", "--memory", "256MiB"]])
def test_a_run_with_an_average(run, tmp_path, mode):
    store, evaluated = tmp_path / "store", ["--eval-every", 4]
    words = [*mode, "--ema", "0.5,every=2", *evaluated]
    assert run("--store", store, "--steps", 8, *words) == 0
    assert run("--store", store, "--steps", 12, *words) == 0
    assert run(*mode, "--store", tmp_path / "plain", "--steps", 12) == 0
    average, params = (validation(tmp_path / f"{n}-log") for n in ("store", "plain"))
    assert [line["step"] for line in average] == [0, 4, 8, 12]
    assert average[-1]["loss"] != params[-1]["loss"]
    best = min(average[1:], key=lambda line: line["loss"])["committed"]
    with jaxinf.open_store(store) as opened:
        held = {kept.name: kept.step for kept in opened.checkpoints()}
        assert held["best"] == best
        leaf = opened._manifest.leaves[0].name
        assert np.any(opened.read("average", leaf) != opened.read("params", leaf))


@pytest.mark.long
def test_a_schedule_free_run_is_evaluated_by_its_average(run, tmp_path, monkeypatch):
    """In each mode by x, and it trains on from y; an export is of x, too."""

    def losses(name, *words):
        place = ("--log-dir", tmp_path / name, "--steps", 6, "--eval-every", 3)
        rate = ("--optimizer", "schedule_free_sgd", "--learning-rate", 1)
        assert run(*place, *rate, "--warmup-steps", 0, *words) == 0
        return [line["loss"] for line in validation(tmp_path / name)]

    expected = losses("memory", "--mode", "memory")
    store = ("--store", tmp_path / "store")
    assert losses("update", *store) == pytest.approx(expected, rel=1e-5)
    with jaxinf.open_store(tmp_path / "store") as opened:
        assert opened.checkpoints()[-1].name == "best"
        y, z = (opened.read(state, "wte") for state in ("params", "z"))
    export = ["checkpoint", "export", str(tmp_path / "store"), str(tmp_path / "hf")]
    assert not main([*export, "--format", "huggingface"])
    tensors = safetensors.numpy.load_file(tmp_path / "hf" / "model.safetensors")
    (x,) = [values for name, values in tensors.items() if name.endswith("wte.weight")]
    assert np.abs(x - y).max() > 1e-3
    np.testing.assert_allclose(x, (y - (1 - 0.9) * z) / 0.9, atol=1e-6)
    streamed = ("--mode", "stream", "--memory", "256MiB", "--store", tmp_path / "s")
    assert losses("stream", *streamed) == pytest.approx(expected, rel=1e-5)
    monkeypatch.setattr(TrainConfig, "evaluates_average", False)
    of_y = losses("y", "--mode", "memory")
    assert abs(of_y[-1] - expected[-1]) > 1e-3
