"""``jaxinf plan``, as a user sees it."""

import json
import re

import pytest

from jaxinf.cli import plan
from jaxinf.terminal import format_bytes

TINY = {"model_type": "gpt2", "vocab_size": 256, "n_positions": 16, "n_layer": 2}
TINY |= {"n_head": 2, "n_embd": 32}


@pytest.fixture
def place(place, monkeypatch):
    (place / "text.txt").write_text("some text " * 500)
    (place / "tiny.json").write_text(json.dumps(TINY))
    monkeypatch.chdir(place)
    return place


SMALL = ("tiny.json", "--data", "text.txt", "--seq-len", 8)


def test_a_config_alone(place, run):
    before = sorted(place.iterdir())
    found = run("plan", *SMALL)
    assert found.status == 0, found.err
    for part in ("host    needed", "disk    needed", "there is", "read and", "wear  "):
        assert part in found.out
    assert "not known; give --drive-rate, which 'jaxinf doctor' measures" in found.out
    assert sorted(place.iterdir()) == before


def test_a_run_file_and_flags_that_win(place, run, run_json):
    text = 'preset = "tiny.json"\ndata = ["text.txt"]\nseq-len = 8\n'
    (place / "run.toml").write_text(text)
    plain = run_json("plan", "run.toml")
    for words in (("--config", "run.toml"), SMALL):
        assert run_json("plan", *words)["step"] == plain["step"]
    (place / "folder").mkdir()
    (place / "folder/config.json").write_text(json.dumps(TINY))
    assert run_json("plan", "folder", *SMALL[1:])["step"] == plain["step"]
    said = run("plan", "--from", "folder", *SMALL[1:]).err
    assert "a config.json alone; to plan for its model: jaxinf plan folder" in said
    coded = run_json("plan", "run.toml", "--state", "int8")
    assert coded["step"]["drive_write_bytes"] < plain["step"]["drive_write_bytes"]


def test_drives_share_what_a_step_moves(place, run, run_json):
    words = ("plan", *SMALL, "--drive-rate", "1KiB", "--csd-root", "gone/a")
    one = run_json(*words)
    moved = one["step"]["drive_read_bytes"] + one["step"]["drive_write_bytes"]
    assert one["drives_s"] == pytest.approx(moved / 1024)
    said = run(*words).out
    assert re.search(r"lasts [\d,]+ such runs, at least [\d,]+ days\n", said)
    assert f"at least {moved / 1024:.3g} s a step" in said
    assert "gone/a: not here, its space is not known" in said
    written = one["written_bytes_per_drive"]
    assert written == 1000 * one["step"]["drive_write_bytes"]
    two = run_json(*words, "--csd-root", "gone/b")
    assert two["drives_s"] == pytest.approx(one["drives_s"] / 2)
    assert two["written_bytes_per_drive"] == written // 2
    (place / "n0").mkdir()
    (place / "n1").mkdir()
    said = run("plan", *SMALL, "--csd-root", "n0", "--csd-root", "n1").out
    assert "n0 and n1 are one drive, and counted as one\n" in said


def test_gradients_that_wait_for_their_norm_are_named(place, run, run_json):
    words = ("plan", "--data", "text.txt", "--mode", "stream", "--memory", "26MiB")
    step = run_json(*words)["step"]
    plain = run_json(*words, "--clip-norm", 0)["step"]
    for name in ("disk_bytes", "drive_write_bytes"):
        assert 0 < step["spilled_bytes"] <= step[name] - plain[name]
    said = run(*words).out
    size = format_bytes(step["spilled_bytes"])
    assert f"and of the disk, {size} are gradients that wait for --clip-norm" in said


@pytest.mark.parametrize("mode", [(), ("--mode", "stream", "--memory", "256MiB")])
def test_a_gpu_that_is_not_here(place, run_json, mode):
    found = run_json("plan", *SMALL, *mode, "--gpu-memory", "1GiB")["tiers"]["device"]
    assert 0 < found["needed_bytes"] < found["there_bytes"] == 1 << 30


def test_updates_beside_a_gpu_read_the_params_too(place, run_json):
    (place / "wide.json").write_text(json.dumps(TINY | {"n_embd": 512}))
    words = ("plan", "wide.json", *SMALL[1:], "--memory", "8MiB")
    gpu = run_json(*words, "--gpu-memory", "1GiB")["step"]["drive_read_bytes"]
    assert 2 * gpu == 3 * run_json(*words)["step"]["drive_read_bytes"] > 0


@pytest.mark.parametrize("mode", [(), ("--mode", "stream", "--memory", "64MiB")])
def test_checkpoints_write_what_stays_in_memory(place, run_json, mode):
    words = ("plan", *SMALL, *mode, "--durability", "checkpoint", "--steps", 100)
    written = [
        run_json(*words, *more)["step"]["drive_write_bytes"]
        for more in ((), ("--checkpoint-every", 10), ("--checkpoint-every", 2))
    ]
    assert written[0] < written[1] < written[2]


def test_what_does_not_fit(place, run, run_json, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(plan, "MACHINE_MEMORY_BYTES", 1000)
        found = run("plan", *SMALL)
        assert run_json("plan", *SMALL, status=1)["fits"] is False
        streamed = run("plan", *SMALL, "--mode", "stream", "--memory", "64MiB").out
    assert re.search("host    needed .* of --memory 64.0 MiB, beside up to", streamed)
    assert "give a smaller --memory\n" in streamed
    assert found.status == 1, found.err
    advice = "has 0.98 KiB; give --mode stream --memory 1MiB\n"
    assert re.search(f"does not fit: the host needs .*, {advice}", found.out)
    usage = type("Usage", (), {"free": 1 << 20})
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage)
    found = run("plan", *SMALL, "--store", "new")
    assert found.status == 1
    assert "does not fit: the disk needs" in found.out
    assert "give --state int8, --lora or --freeze, more drives" in found.out
    assert "--state int8" not in run("plan", *SMALL, "--state", "int8").out
