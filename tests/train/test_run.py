"""Whole runs: both modes, stopping and resuming, the output."""

import json
import re
import shlex
from functools import partial
from typing import Any

import jax
import numpy as np
import pytest
from families import family
from flax import nnx
from inject import raising
from jaxinf_models import ModelFiles, abstract_params, deferred_params
from small_stores import same

import jaxinf
from jaxinf import processes
from jaxinf.cli import main as jaxinf_main
from jaxinf.train import loop, modes
from jaxinf.train.lora import add_adapters, merge_model, parse_lora
from jaxinf.train.modes import materialize


def leaves_of(store):
    """Sizes of leaves by their paths."""
    leaves = json.loads((store / "jaxinf.json").read_text())["leaves"]
    return {
        "/".join(leaf["path"]): int(np.prod(leaf["shape"], dtype=int))
        for leaf in leaves
    }


def test_metrics_of_update_and_what_its_commit_says(run, lines, tmp_path):
    assert run("--store", tmp_path / "store", "--steps", 5) == 0
    found = lines(tmp_path / "store-log")
    assert [line["step"] for line in found] == [1, 2, 3, 4, 5]
    num_params = sum(leaves_of(tmp_path / "store").values())
    for line in found:
        assert "stream" not in line
        assert None not in line.values()
        assert line["tokens"] == 16
        assert line["learning_rate"] == pytest.approx(2e-3 * line["step"] / 51)
        assert 0 < line["update_s"] < line["step_s"]
        assert line["link_up_bytes"] == 4 * num_params
        assert line["link_down_bytes"] == 8 * num_params  # gradients and params
        assert line["drive_write_bytes"] >= 12 * num_params
        assert line["rss_bytes"] > 1 << 20
    with jaxinf.open_store(tmp_path / "store") as store:
        payload: Any = store.payload
    assert (payload["step"], payload["examples"]) == (5, 10)
    assert payload["loader"]["name"] == "grain"
    assert payload["loader"]["state"] == {"next_index": 5}
    assert payload["settings"]["seed"] == 0
    assert len(payload["data"]["sha256"]) == 64


FROZEN = ("--freeze", "w?e", "h0/mlp/*")
LORA = ("--lora", 2)


def frozen_and_trained(store):
    """Names of frozen leaves, and the number of params of the others, of TINY."""
    sizes = leaves_of(store)
    frozen = [name for name in sizes if name.startswith(("w", "h0/mlp/"))]
    if any("/lora_" in name for name in sizes):
        frozen = [name for name in sizes if "/lora_" not in name]
    return frozen, sum(n for name, n in sizes.items() if name not in frozen)


def test_frozen_leaves_move_nothing(run, lines, tmp_path):
    store = tmp_path / "store"
    assert run("--store", store, "--steps", 2, *LORA) == 0
    frozen, num_trained = frozen_and_trained(store)
    # The attention's matrices are [16, 48] and [16, 16].
    assert (len(frozen), num_trained) == (16, 2 * (16 + 48) + 2 * (16 + 16))
    for line in lines(tmp_path / "store-log"):
        assert line["link_up_bytes"] == 4 * num_trained
        assert line["link_down_bytes"] == 8 * num_trained


@pytest.mark.long
@pytest.mark.parametrize(("trained", "clip_norm"), [(FROZEN, 0), (LORA, 1)])
def test_frozen_leaves_in_all_modes(clip_norm, trained, run, losses, lines, tmp_path):
    words = (*trained, "--steps", 3, "--clip-norm", clip_norm)
    memory = ("--mode", "memory", "--log-dir", tmp_path / "m")
    assert run(*memory, *words) == 0
    for line in lines(tmp_path / "m"):
        assert line["update_s"] is line["commit_s"] is None
        assert line["drive_read_bytes"] == line["link_up_bytes"] == 0
    for mode in (("--mode", "update"), ("--mode", "stream", "--memory", "64MiB")):
        store = tmp_path / mode[1]
        assert run("--store", store, *mode, *words) == 0
        found = losses(tmp_path / f"{mode[1]}-log")
        np.testing.assert_allclose(found, losses(tmp_path / "m"), rtol=1e-6)
        num_trained = frozen_and_trained(store)[1]
        for line in lines(tmp_path / f"{mode[1]}-log"):
            assert line["drive_write_bytes"] < 3 * 4 * num_trained + 32 * 4096
            if mode[1] == "stream":  # gradients wait for the norm
                waited = 4 * num_trained if clip_norm else 0
                assert line["stream"]["spilled_memory_bytes"] == waited


@pytest.mark.long
def test_adapters_are_resumed_and_exported(run, tmp_path):
    """By an import that reads base weights from a folder, as a user begins."""
    assert run("--store", tmp_path / "base", "--steps", 1) == 0
    export = ("checkpoint", "export")
    words = (*export, tmp_path / "base", tmp_path / "first", "--format", "huggingface")
    assert jaxinf_main([*map(str, words)]) == 0
    start = ("--from", tmp_path / "first", "--lora", "2,alpha=8")
    start = (*start, "--learning-rate", 0.1)
    for name, steps in (("whole", (4,)), ("resumed", (2, 4))):
        for last in steps:
            assert run(*start, "--store", tmp_path / name, "--steps", last) == 0
    files, held = ModelFiles.of_folder(tmp_path / "first"), []
    graphdef, like = abstract_params(files.config)
    like = jax.eval_shape(partial(add_adapters, parse_lora("2")), like)
    for name in ("whole", "resumed"):
        with jaxinf.open_store(tmp_path / name) as opened:
            held.append(opened.params(like=like))
    same(*held)
    assert np.any(held[0]["h0"]["attn"]["qkv"]["lora_b"])
    words = (*export, tmp_path / "whole", tmp_path / "merged", *words[-2:])
    assert jaxinf_main([*map(str, words)]) == 0
    files = ModelFiles.of_folder(tmp_path / "merged")
    merged = materialize(deferred_params(files, files.config, 0))
    tokens = np.arange(16, dtype=np.int32).reshape(2, 8)
    found = nnx.merge(graphdef, merged)(tokens)
    expected = merge_model(graphdef, held[0], 8)(tokens)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    before = merge_model(graphdef, _without_lora(held[0]))(tokens)
    assert np.abs(before - expected).max() > 1e-3


def _without_lora(params):
    kept = {k: v for k, v in params.items() if k not in ("lora_a", "lora_b")}
    return {k: _without_lora(v) if isinstance(v, dict) else v for k, v in kept.items()}


def test_report(run, lines, tmp_path, capsys):
    store = tmp_path / "a store"
    assert run("--store", store, "--steps", 4, "--eval-every", 2) == 0
    out = capsys.readouterr().out
    assert f"jaxinf inspect {shlex.quote(str(store))}" in out
    order = r"after.*step 1/4.*step 2: validation loss \d\.\d+, perplexity [\d,.]+, "
    order += r"[\d.]+ % right\nstep 2: checkpoint best\n"
    assert re.search(f"compiling …\nready {order}", out, re.S)
    evals = lines(tmp_path / "a store-log", "validation.jsonl")
    assert [line["step"] for line in evals] == [0, 2, 4]
    config = json.loads((tmp_path / "a store-log/config.json").read_text())
    assert (config["steps"], config["store"]) == (4, str(store))
    with jaxinf.open_store(store) as opened:
        assert [one.name for one in opened.checkpoints()] == ["best"]


# A learning rate at which the second step's gradient is not finite.
EXPLODING = ("--optimizer", "sgd", "--learning-rate", "1e38", "--clip-norm", "0")
EXPLODING += ("--warmup-steps", "0", "--steps", "4")


def test_a_step_that_other_processes_do_not_compute(run, tmp_path, capsys, monkeypatch):
    """JAX would say more of it at the exit, so the process ends without."""
    error = jax.errors.JaxRuntimeError("Gloo: Connection reset\nand more")

    class Several(processes.Group):
        def __init__(self, *words):
            super().__init__(*words)
            self.is_alone = False

    class Failing(modes.InMemoryTraining):
        def compile_step(self, batch):
            return raising(error)

    monkeypatch.setattr(loop, "Group", Several)
    monkeypatch.setattr(loop, "InMemoryTraining", Failing)
    assert run("--store", tmp_path / "store", "--steps", 1) == 1
    said = capsys.readouterr().err
    assert "expected all processes to compute it, found: Gloo: Connection reset" in said
    assert said.count("\n") == 1
    assert isinstance(processes.silent_groups.pop(), Several)


MODES = ["memory", "update", "stream"]


@pytest.mark.parametrize("mode", family(MODES, short=["update"]))
def test_nonfinite(run, losses, tmp_path, capsys, mode):
    """A step that is skipped has no checkpoint of its own."""
    log, place = tmp_path / "log", ()
    if mode != "memory":
        place += ("--store", tmp_path / "store", "--checkpoint-every", 1)
    if mode == "stream":
        place += ("--memory", "256MiB")
    words = ("--mode", mode, *place, *EXPLODING, "--log-dir", log)
    assert run(*words) == 1
    err = capsys.readouterr().err
    assert "NaN or Inf in" in err
    assert "Traceback" not in err
    assert [step for step, _ in losses(log)] == [1]
    assert run(*words, "--nonfinite", "skip") == 0
    out = capsys.readouterr().out
    assert "step 2: skipped" in out
    assert "step 3: checkpoint" not in out  # the resumed step has one
    assert ("resuming at step 1" in out) == (mode != "memory")
    assert [step for step, _ in losses(log)] == [1, 2, 3, 4]
