"""The trainer keeps an average, evaluates it, and exports it."""

import json

import numpy as np
import pytest
import safetensors.numpy

import jaxinf
from jaxinf.cli import main


def validation(log_dir):
    return [
        json.loads(line)
        for line in (log_dir / "validation.jsonl").read_text().splitlines()
    ]


@pytest.mark.long
@pytest.mark.parametrize(
    "mode",
    [
        [],
        pytest.param(
            ["--mode", "stream", "--memory", "256MiB"], marks=pytest.mark.long
        ),
    ],
)
def test_a_run_with_an_average(run, tmp_path, mode):
    store, evaluated = tmp_path / "store", ["--eval-every", 4]
    words = [*mode, "--ema", "0.5,every=2", *evaluated]
    assert run("--store", store, "--steps", 8, *words) == 0
    assert run("--store", store, "--steps", 12, *words) == 0
    assert run(*mode, "--store", tmp_path / "plain", "--steps", 12) == 0
    average, params = (validation(tmp_path / f"{n}-log") for n in ("store", "plain"))
    assert [line["step"] for line in average] == [4, 8, 12]
    assert average[-1]["loss"] != params[-1]["loss"]
    best = min(average, key=lambda line: line["loss"])["committed"]
    with jaxinf.open_store(store) as opened:
        held = {kept.name: kept.step for kept in opened.checkpoints()}
        assert held["best"] == best
        leaf = opened._manifest.leaves[0].name
        held = opened.read("average", leaf)
        assert np.any(held != opened.read("params", leaf))
    export = ["checkpoint", "export", str(store), str(tmp_path / "hf"), "--average"]
    assert not main([*export, "--format", "huggingface"])
    tensors = safetensors.numpy.load_file(tmp_path / "hf" / "model.safetensors")
    assert any(
        held.size == t.size and np.array_equal(np.sort(t, None), np.sort(held, None))
        for t in tensors.values()
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--ema", "1.5"], "--ema 1.5: ema: decay=1.5: expected a number from 0 to 1"),
        (["--ema", "0.9,decay=1"], "expected DECAY, such as 0.999"),
        (["--ema", "0.9", "--mode", "memory"], "--ema: --mode memory keeps nothing"),
    ],
)
def test_flags_that_are_refused(run, tmp_path, capsys, words, message):
    place = [] if "memory" in words else ["--store", tmp_path / "store"]
    assert run(*place, "--steps", 2, *words) == 2
    assert message in " ".join(capsys.readouterr().err.split())
