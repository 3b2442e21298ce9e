"""``jaxinf plan``, as a user sees it."""

import json
import re
import sys

import pytest
from raw_stores import memory_directory

from jaxinf.cli import plan
from jaxinf.train.messages import started_as

TINY = {"model_type": "gpt2", "vocab_size": 256, "n_positions": 16, "n_layer": 2}
TINY |= {"n_head": 2, "n_embd": 32}
LLAMA_8B = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
}


@pytest.fixture
def place(monkeypatch):
    """A current directory with a text and models."""
    with memory_directory() as folder:
        (folder / "text.txt").write_text("some text " * 500)
        for name, document in (("tiny", TINY), ("8b", LLAMA_8B)):
            (folder / f"{name}.json").write_text(json.dumps(document))
        monkeypatch.chdir(folder)
        yield folder


SMALL = ("tiny.json", "--data", "text.txt", "--seq-len", 8)


def test_a_config_alone(place, run):
    before = sorted(place.iterdir())
    found = run("plan", *SMALL)
    assert found.status == 0, found.err
    for part in ("host    needed", "disk    needed", "there is", "read and"):
        assert part in found.out
    assert "'jaxinf doctor' measures it, and --drive-rate takes it" in found.out
    assert sorted(place.iterdir()) == before


def test_a_run_file_and_flags_that_win(place, run_json):
    text = 'preset = "tiny.json"\ndata = ["text.txt"]\nseq-len = 8\n'
    (place / "run.toml").write_text(text)
    plain = run_json("plan", "run.toml")
    for words in (("--config", "run.toml"), SMALL):
        assert run_json("plan", *words)["step"] == plain["step"]
    coded = run_json("plan", "run.toml", "--state", "int8")
    assert coded["step"]["drive_write_bytes"] < plain["step"]["drive_write_bytes"]


def test_drives_share_what_a_step_moves(place, run, run_json):
    words = ("plan", *SMALL, "--drive-rate", "1KiB", "--csd-root", "gone/a")
    one = run_json(*words)
    moved = one["step"]["drive_read_bytes"] + one["step"]["drive_write_bytes"]
    assert one["drives_s"] == pytest.approx(moved / 1024)
    assert f"at least {moved / 1024:.3g} s a step" in run(*words).out
    two = run_json(*words, "--csd-root", "gone/b")
    assert two["drives_s"] == pytest.approx(one["drives_s"] / 2)


def test_memory_that_is_too_small(place, run, run_json, monkeypatch):
    monkeypatch.setattr(plan, "MACHINE_MEMORY_BYTES", 1000)
    found = run("plan", *SMALL)
    assert found.status == 1, found.err
    assert re.search(r"does not fit: the host needs .*, has 0.98 KiB; give", found.out)
    assert run_json("plan", *SMALL, status=1)["fits"] is False


def test_a_disk_that_is_too_small(place, run, monkeypatch):
    usage = type("Usage", (), {"free": 1 << 30})
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage)
    small = ("plan", *SMALL, "--store", "new")
    assert run(*small).status == 0
    usage.free = 1 << 20
    found = run(*small)
    assert found.status == 1
    assert "does not fit: the disk needs" in found.out
    assert "--state int8" in found.out


@pytest.mark.long
def test_an_8b_model_does_not_fit_a_device_of_24_gb(place, run, monkeypatch):
    monkeypatch.setattr(plan, "_device_bytes", lambda: 24 * 10**9)
    found = run("plan", "8b.json", "--data", "text.txt")
    assert found.status == 1
    [needed] = re.findall(r"does not fit: the device needs (\d+) GiB", found.out)
    assert int(needed) > 3 * 4 * 8e9 / 2**30


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--distributed",), "one process is planned; leave it out"),
        (("--drive-rate", "0"), "--drive-rate: expected at least 1 B"),
        (("--lr", 1), "write --learning-rate"),
    ],
)
def test_refusals(place, run, words, message):
    found = run("plan", *SMALL, *words)
    assert found.status == 2
    assert message in found.err


@pytest.mark.parametrize("text", ["{", '{"model_type": "rwkv"}', "[1]"])
def test_a_broken_config(place, run, text):
    (place / "tiny.json").write_text(text)
    found = run("plan", *SMALL)
    assert found.status in (1, 2)
    assert "tiny.json" in found.err
    assert "Traceback" not in found.err


def test_help_names_the_trainers(run):
    found = run("plan", "--help")
    assert found.status == 0
    for part in ("--drive-rate", "--json", "jaxinf train --help"):
        assert part in found.out


@pytest.mark.parametrize(
    ("started", "command"),
    [
        ("/x/jaxinf/train/__main__.py", "-m jaxinf.train"),
        ("/x/jaxinf/__main__.py", "-m jaxinf train"),
        ("/x/bin/jaxinf", "jaxinf train"),
    ],
)
def test_the_command_to_resume_is_the_one_that_started(started, command, monkeypatch):
    monkeypatch.setattr(sys, "argv", [started])
    assert started_as().endswith(command)
