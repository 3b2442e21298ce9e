"""``jaxinf plan``, as a user sees it."""

import json
import re
import sys

import pytest
from raw_stores import memory_directory

from jaxinf.train.help import started_as

GPU = {
    "host_bytes": 64e9,
    "device_bytes": 24e9,
    "drive_bytes_per_s": 5e9,
    "drive_rated_write_bytes": 1.2e15,
    "link_bytes_per_s": 25e9,
    "operations_per_s": 5e13,
    "params_per_s": 1e9,
    "commit_s": 0.01,
}
CPU = {**GPU, "device_bytes": None, "link_bytes_per_s": None}
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
    """A current directory with a text, models and machines."""
    with memory_directory() as folder:
        (folder / "text.txt").write_text("some text " * 500)
        for name, document in (("tiny", TINY), ("8b", LLAMA_8B)):
            (folder / f"{name}.json").write_text(json.dumps(document))
        for name, document in (("gpu", GPU), ("cpu", CPU)):
            (folder / f"{name}.machine").write_text(json.dumps(document))
        monkeypatch.chdir(folder)
        yield folder


SMALL = ("tiny.json", "--data", "text.txt", "--seq-len", 8)


def machine(place, **changes):
    (place / "other.machine").write_text(json.dumps({**CPU, **changes}))
    return "--machine", "other.machine"


def test_a_config_alone(place, run):
    before = sorted(place.iterdir())
    found = run("plan", *SMALL)
    assert found.status == 0, found.err
    for part in ("host    needed", "disk    needed", "there is", "read and", "unknown"):
        assert part in found.out
    assert "drive_bytes_per_s" in found.out
    assert "jaxinf doctor --json FILE" in found.out
    assert sorted(place.iterdir()) == before


def test_a_run_file_and_flags_that_win(place, run_json):
    text = 'preset = "tiny.json"\ndata = ["text.txt"]\nseq-len = 8\n'
    (place / "run.toml").write_text(text)
    plain = run_json("plan", "run.toml")
    for words in (("--config", "run.toml"), SMALL):
        assert run_json("plan", *words)["step"] == plain["step"]
    coded = run_json("plan", "run.toml", "--state", "int8")
    assert coded["step"]["drive_write_bytes"] < plain["step"]["drive_write_bytes"]


def test_time_and_its_terms(place, run_json):
    found = run_json("plan", *SMALL, *machine(place, drive_bytes_per_s=1e4))
    step, time = found["step"], found["time"]
    moved = step["drive_read_bytes"] + step["drive_write_bytes"]
    assert time["terms_s"]["drives"] == pytest.approx(moved / 1e4)
    assert time["limit"] == "drives"
    alone = {"programs": step["operations"] / 5e13, "commit": 0.01}
    assert time["alone_s"] == pytest.approx(alone)
    assert time["step_s"] == pytest.approx(moved / 1e4 + sum(alone.values()))
    life = 1.2e15 / step["drive_write_bytes"] * time["step_s"]
    assert time["life_s"] == pytest.approx(life)


def test_without_clipping_programs_and_updates_share_the_processor(place, run_json):
    slow = machine(place, operations_per_s=1e7, params_per_s=1e4)
    time = run_json("plan", *SMALL, *slow, "--clip-norm", 0)["time"]
    terms = time["terms_s"]
    own = terms["programs"] + terms["updates"]
    assert time["step_s"] == pytest.approx(own + 0.01)
    words = ("--machine", "gpu.machine", "--clip-norm", 0)
    time = run_json("plan", *SMALL, *words)["time"]
    assert time["step_s"] == pytest.approx(max(time["terms_s"].values()) + 0.01)


def test_drives_share_what_a_step_moves(place, run_json):
    words = ("plan", *SMALL, "--machine", "cpu.machine", "--csd-root", "gone/a")
    one = run_json(*words)["time"]["terms_s"]["drives"]
    two = run_json(*words, "--csd-root", "gone/b")["time"]["terms_s"]["drives"]
    assert two == pytest.approx(one / 2)


def test_memory_that_is_too_small(place, run, run_json):
    few = machine(place, host_bytes=1000)
    found = run("plan", *SMALL, *few)
    assert found.status == 1, found.err
    assert re.search(r"does not fit: the host needs .*, has 0.98 KiB; give", found.out)
    assert run_json("plan", *SMALL, *few, status=1)["fits"] is False


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
def test_an_8b_model_does_not_fit_a_device_of_24_gb(place, run):
    found = run("plan", "8b.json", "--data", "text.txt", "--machine", "gpu.machine")
    assert found.status == 1
    [needed] = re.findall(r"does not fit: the device needs (\d+) GiB", found.out)
    assert int(needed) > 3 * 4 * 8e9 / 2**30


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--distributed",), "one process is planned; leave it out"),
        (("--machine", "gone"), "No such file"),
        (("--lr", 1), "write --learning-rate"),
    ],
)
def test_refusals(place, run, words, message):
    found = run("plan", *SMALL, *words)
    assert found.status == 2
    assert message in found.err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "no JSON"),
        ("[]", "expected an object, found a list of 0"),
        ('{"host_byte": 1}', "expected no key 'host_byte'"),
        ('{"host_bytes": 1, "host_bytes": 2}', "a key comes twice"),
        ('{"host_bytes": -1}', "host_bytes: expected a number > 0.0, found -1"),
        ('{"host_bytes": 0}', "expected a number > 0.0"),
        ('{"host_bytes": true}', "found True"),
        ('{"host_bytes": "1"}', "found '1'"),
        ('{"commit_s": NaN}', "no JSON"),
        ('{"commit_s": 1e999}', "no JSON"),
        ('{"commit_s": 1%s}' % ("0" * 5000), "commit_s" if sys.flags.dev_mode else ""),
        ("[" * 100_000, "expected nesting of at most"),
        ("\udcff", "no JSON"),
    ],
)
def test_a_machine_that_is_none(place, run, text, message):
    (place / "bad").write_bytes(text.encode(errors="surrogateescape"))
    found = run("plan", *SMALL, "--machine", "bad")
    assert found.status == 2
    assert "--machine bad: expected numbers of a machine" in found.err
    assert message in found.err


@pytest.mark.parametrize("text", ["{", '{"model_type": "rwkv"}', "[1]"])
def test_a_broken_config(place, run, text):
    (place / "tiny.json").write_text(text)
    found = run("plan", *SMALL)
    assert found.status in (1, 2)
    assert "tiny.json" in found.err
    assert "Traceback" not in found.err


def test_help_is_short(run):
    short = re.findall(r"(?m)^  (--[\w-]+)", run("plan", "--help").out)
    assert short[:2] == ["--machine", "--json"]
    assert len(short) == 2 + 12
    long = re.findall(r"(?m)^  (--[\w-]+)", run("plan", "--help-all").out)
    assert {*short} < {*long}


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
