"""Runs in mode stream: like other modes, resumed, on every model, refused."""

import json
import re

import numpy as np
import pytest
from jaxinf_models import MODELS
from jaxinf_models.bert import BertConfig
from jaxinf_models.bloom import BloomConfig
from jaxinf_models.llama import LlamaConfig
from jaxinf_models.t5 import T5Config
from jaxinf_models.vit import ViTConfig
from small_pictures import write_pictures

STREAM = ("--mode", "stream", "--memory", "256MiB")
FIELDS = ["fetched_drive_bytes", "fetched_memory_bytes", "spilled_memory_bytes"]
FIELDS += ["spilled_drive_bytes", "offloaded_drive_bytes", "offloaded_host_bytes"]
FIELDS += ["prefetch_hit_rate"]
FIELDS += ["waited_params_s", "waited_values_s", "waited_device_s"]
FIELDS += ["waited_updates_s", "dispatched_s"]
PAIRS = [{"prompt": f"{n}+1=", "response": str(n + 1)} for n in range(60)]
TINY = {
    "bert": BertConfig(1, 2, 16, 32, 257, 16),
    "t5": T5Config(257, 1, 1, 2, 16, 8, 32),
    "vit": ViTConfig(1, 2, 16, 32, 8, 4, num_channels=1),
    "llama": LlamaConfig(257, 16, 1, 2, 2, 16, 32),
    "bloom": BloomConfig(257, 1, 2, 16),
}


@pytest.mark.long
def test_a_run_goes_on_in_other_modes(
    run, losses, lines, uninterrupted, tmp_path, capsys
):
    where = ("--store", tmp_path / "store")
    assert run(*where, *STREAM, "--steps", 2) == 0
    assert "compiling …" in capsys.readouterr().out
    assert run(*where, *STREAM, "--steps", 4) == 0
    assert "resuming at step 2" in capsys.readouterr().out
    assert run(*where, "--mode", "update", "--steps", 6) == 0
    assert run(*where, *STREAM, "--steps", 7) == 0
    log = tmp_path / "store-log"
    np.testing.assert_allclose(losses(log), uninterrupted[:7], rtol=1e-4)
    found = lines(log)
    assert ["stream" in line for line in found] == [True] * 4 + [False] * 2 + [True]
    params = json.loads((tmp_path / "store/jaxinf.json").read_text())["leaves"]
    num_bytes = 4 * sum(np.prod(leaf["shape"], dtype=int) for leaf in params)
    for line in found[:4]:
        missing = {name for name, value in line.items() if value is None}
        assert missing <= {"gradient_norm"}
        streamed = line["stream"]
        assert list(streamed) == FIELDS
        # Each at least once: params may stay in memory between their programs.
        assert num_bytes <= streamed["fetched_drive_bytes"] < 3 * num_bytes
        assert streamed["spilled_memory_bytes"] == num_bytes
        assert streamed["spilled_drive_bytes"] == 0
        assert 0 <= streamed["prefetch_hit_rate"] <= 1
        waited = [streamed[name] for name in FIELDS if name.startswith("waited")]
        assert 0 < sum(waited) <= line["step_s"]


@pytest.mark.long
def test_checkpoints_and_skipped_steps(run, losses, tmp_path, capsys):
    """A learning rate at which the second step's gradient is not finite."""
    words = ("--store", tmp_path / "store", *STREAM, "--nonfinite", "skip")
    words += ("--optimizer", "sgd", "--learning-rate", "1e38", "--clip-norm", "0")
    words += ("--warmup-steps", "0", "--checkpoint-every", 1)
    assert run(*words, "--steps", 3) == 0
    out = capsys.readouterr().out
    assert "step 1: checkpoint 1" in out
    assert "step 2: skipped" in out
    assert "step 2: checkpoint" not in out
    assert [step for step, _ in losses(tmp_path / "store-log")] == [1, 2, 3]
    assert (tmp_path / "store/checkpoints/1").exists()


@pytest.mark.long
@pytest.mark.parametrize("model", TINY)
def test_every_model_streams(run, losses, tmp_path, model):
    data, words = tmp_path / "pairs.jsonl", ["--model", model, "--steps", 3]
    pairs = PAIRS
    if model == "bert":
        words += ["--task", "masked-lm"]
        pairs = [{"text": pair["prompt"]} for pair in PAIRS]
    data.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    if model == "vit":
        data = write_pictures(tmp_path / "images")
        words += ["--seq-len", "none"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(MODELS[model].presets, "nano", TINY[model])
        assert run("--store", tmp_path / "update", *words, data=data) == 0
        assert run("--store", tmp_path / "stream", *STREAM, *words, data=data) == 0
    found, expected = (
        losses(tmp_path / f"{mode}-log") for mode in ("stream", "update")
    )
    np.testing.assert_allclose(found, expected, rtol=1e-4)


@pytest.mark.long
def test_a_memory_too_small_is_refused_before_a_step(run, tmp_path, capsys):
    words = ("--store", tmp_path / "store", "--mode", "stream", "--steps", 1)
    assert run(*words, "--memory", "64KiB") == 1
    told = capsys.readouterr().err
    assert "--memory: init_fn: leaf wte takes 66372 bytes to make, found 65536" in told
    assert not (tmp_path / "store").exists()
    (works,) = re.findall(r"--memory (\d+MiB) works", told)
    assert run(*words, "--memory", works) == 0
