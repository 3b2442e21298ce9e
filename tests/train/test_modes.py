"""Options of a run in each mode: compression, averages, exports, updates, a trace."""

import gzip
import json
import re

import numpy as np
import pytest
import safetensors.numpy

import jaxinf
from jaxinf.cli import main
from jaxinf.streaming.update import device_updates
from jaxinf.train.config import TrainConfig

STREAM = ("--mode", "stream", "--memory", "256MiB")


@pytest.mark.long
@pytest.mark.optimized
def test_update_has_the_bits_of_memory_and_resumes(run, losses, tmp_path):
    compress = ("--compress", "top_k:0.1,error_feedback=true,warmup_steps=2")
    store = ("--store", tmp_path / "store", *compress)
    assert run(*store, "--steps", 3) == 0
    assert run(*store, "--steps", 8) == 0
    split = ("--mode", "memory", "--log-dir", tmp_path / "log")
    assert run(*split, *compress, "--steps", 8) == 0
    assert losses(tmp_path / "store-log") == losses(tmp_path / "log")
    manifest = json.loads((tmp_path / "store/jaxinf.json").read_text())
    assert all("error_feedback" in leaf["states"][-1] for leaf in manifest["leaves"])


# --- averages -----------------------------------------------------------------------


@pytest.mark.long
def test_a_run_with_an_average(run, lines, tmp_path):
    store = tmp_path / "store"
    words = [*STREAM, "--ema", "0.5,every=2", "--eval-every", 4]
    assert run("--store", store, "--steps", 8, *words) == 0
    assert run("--store", store, "--steps", 12, *words) == 0
    assert run(*STREAM, "--store", tmp_path / "plain", "--steps", 12) == 0
    logs = tmp_path / "store-log", tmp_path / "plain-log"
    average, params = (lines(log, "validation.jsonl") for log in logs)
    assert [line["step"] for line in average] == [0, 4, 8, 12]
    assert average[-1]["loss"] != params[-1]["loss"]
    best = min(average[1:], key=lambda line: line["loss"])["committed"]
    with jaxinf.open_store(store) as opened:
        held = {kept.name: kept.step for kept in opened.checkpoints()}
        assert held["best"] == best
        leaf = opened._manifest.leaves[0].name
        assert np.any(opened.read("average", leaf) != opened.read("params", leaf))


@pytest.mark.long
def test_a_schedule_free_run_is_evaluated_by_its_average(
    run, lines, tmp_path, monkeypatch
):
    """In each mode by x, and it trains on from y; an export is of x, too."""

    def losses(name, *words):
        place = ("--log-dir", tmp_path / name, "--steps", 6, "--eval-every", 3)
        rate = ("--optimizer", "schedule_free_sgd", "--learning-rate", 1)
        assert run(*place, *rate, "--warmup-steps", 0, *words) == 0
        return [line["loss"] for line in lines(tmp_path / name, "validation.jsonl")]

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
    assert losses("stream", *STREAM, "--store", tmp_path / "s") == pytest.approx(
        expected, rel=1e-5
    )
    monkeypatch.setattr(TrainConfig, "evaluates_average", False)
    of_y = losses("y", "--mode", "memory")
    assert abs(of_y[-1] - expected[-1]) > 1e-3


def test_a_failed_export_is_in_the_exit_status(run, tmp_path, capsys, caplog):
    (tmp_path / "out/4").mkdir(parents=True)
    (tmp_path / "out/4/other").touch()
    words = ("--store", tmp_path / "store", "--export-to", f"file://{tmp_path}/out")
    assert run(*words, "--checkpoint-every", 4, "--steps", 5) == 3
    assert "exports of step 4 failed: exit status 3" in capsys.readouterr().out
    assert caplog.text.count("step 4 is not exported to") == 1
    with jaxinf.open_store(tmp_path / "store") as store:
        assert store.step == 5


@pytest.mark.long
def test_a_run_whose_updates_the_device_shares(run, tmp_path, monkeypatch, capsys):
    words = ("--store", tmp_path / "s", *STREAM, "--steps", 2, "--device-updates", 2)
    assert run(*words) == 1
    assert "expected more subgroups that the device can" in capsys.readouterr().err
    monkeypatch.setattr(device_updates, "MIN_ELEMENTS", 256)
    assert run(*words) == 0
    record = json.loads((tmp_path / "s/current/commit.json").read_text())
    assert record["device_updates"] == 2


@pytest.mark.long
def test_a_trace_has_steps_and_what_threads_and_drives_did(run, lines, tmp_path):
    assert run("--store", tmp_path / "s", "--steps", 9, *STREAM, "--trace") == 0
    (path,) = (tmp_path / "s-log" / "trace").rglob("perfetto_trace.json.gz")
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    names = [one["name"] for one in events if one.get("ph") == "X"]
    assert names.count("step") == 3
    for kind in ("update", "write"):
        assert any(name.startswith(kind) for name in names), kind
    for line in lines(tmp_path / "s-log"):
        phases, memory = line["phases"], line["memory"]
        assert {*phases} >= {"read", "update", "write", "wait", "program", "commit"}
        assert min(phases.values()) >= 0
        assert phases["program"] <= line["step_s"] + 1e-3
        assert phases["update"] > 0
        assert {*line["drives"]} == {str(tmp_path / "s")}
        assert all(0 <= share <= 1 for share in line["drives"].values())
        assert memory["host"] == line["rss_bytes"]
        assert min(memory["buffers"], memory["drives"]) > 0


# --- from one mode to another ---------------------------------------------------------


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
        assert streamed.keys() > {"offloaded_host_bytes", "dispatched_s"}
        # Each at least once: params may stay in memory between their programs.
        assert num_bytes <= streamed["fetched_drive_bytes"] < 3 * num_bytes
        assert streamed["spilled_memory_bytes"] == num_bytes
        assert streamed["spilled_drive_bytes"] == 0
        assert 0 <= streamed["prefetch_hit_rate"] <= 1
        waited = [streamed[name] for name in streamed if name.startswith("waited")]
        assert 0 < sum(waited) <= line["step_s"]


@pytest.mark.long
def test_a_memory_too_small_is_refused_before_a_step(run, tmp_path, capsys):
    words = ("--store", tmp_path / "store", "--mode", "stream", "--steps", 1)
    assert run(*words, "--memory", "64KiB") == 1
    told = capsys.readouterr().err
    assert "--memory: init_fn: leaf wte takes 64.8 KiB to make, found 64.0 KiB" in told
    assert not (tmp_path / "store").exists()
    (works,) = re.findall(r'--memory="(\d+MiB)" works', told)
    assert run(*words, "--memory", works) == 0


@pytest.mark.cards
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_losses_on_emulated_cards_are_the_hosts(run, losses, lines, tmp_path, dtype):
    words = ["--param-dtype", dtype]
    for number in range(4):
        (tmp_path / f"csd{number}").mkdir()
        words += ["--csd-root", tmp_path / f"csd{number}"]
    cards = [*words, "--csd", "emulated", "--store", tmp_path / "cards"]
    assert run(*words, "--store", tmp_path / "host", "--steps", 6) == 0
    assert run(*cards, "--steps", 3) == 0
    assert run(*cards, "--steps", 6) == 0
    assert losses(tmp_path / "cards-log") == losses(tmp_path / "host-log")
    leaves = json.loads((tmp_path / "cards/jaxinf.json").read_text())["leaves"]
    num_params = sum(np.prod(leaf["shape"], dtype=int) for leaf in leaves)
    item_bytes = 4 if dtype == "float32" else 2
    for line in lines(tmp_path / "cards-log"):
        assert line["link_down_bytes"] == item_bytes * num_params  # gradients alone
        assert line["link_up_bytes"] == item_bytes * num_params
