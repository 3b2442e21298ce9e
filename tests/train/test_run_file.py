"""A run as a file: read, written, and refused."""

import dataclasses
import json
import os
import shutil
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxinf
from jaxinf.cli import main as jaxinf_main
from jaxinf.command_line import UsageError
from jaxinf.train import run_file
from jaxinf.train.__main__ import main
from jaxinf.train.config import TrainConfig
from jaxinf.train.options import FLAGS
from jaxinf.train.run_file import NOT_IN_FILES, config_of, read_run, text_of_run

FULL = TrainConfig(
    store=Path("/a/store"),
    steps=7,
    mode="stream",
    memory=3 << 30,
    data=("/a/*.txt", '/b/"q"\\ é\n\t\x7f.jsonl'),
    tokenizer=Path("/a/tokenizer.json"),
    device_memory=12345,
    device_updates="auto",
    elastic=True,
    policy="keep",
    distributed="a:1,2,0",
    csd_root=(Path("/d0"), Path("/d{process}")),
    csd="emulated:buffers=2",
    durability=1024,
    state="int8",
    source=Path("/a/llama"),
    task="causal-lm",
    optimizer_args=("b2=0.95",),
    learning_rate=1e-05,
)


@pytest.fixture
def read(tmp_path):
    """Reads a text as a run's file."""

    def call(text, **options):
        path = tmp_path / "run.toml"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return read_run(path, **options)

    return call


@pytest.mark.parametrize("config", [FULL, TrainConfig(store=Path("/s"))])
def test_what_is_written_reads_back(read, config):
    assert read(text_of_run(config)) == config


@settings(max_examples=25)
@given(
    st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"])).map(
        lambda text: f"x{text}"
    ),
    st.floats(allow_nan=False),
    st.integers(-(1 << 63), (1 << 63) - 1),
)
def test_any_value_reads_back(tmp_path_factory, text, number, whole):
    path = tmp_path_factory.getbasetemp() / "any.toml"
    config = dataclasses.replace(
        FULL, compress=text, optimizer_args=(text,), clip_norm=number, seed=whole
    )
    path.write_text(text_of_run(config), encoding="utf-8", newline="")
    assert read_run(path) == config


def test_every_flag_can_be_in_a_file(read):
    text = [line for line in text_of_run(FULL).splitlines() if "=" in line]
    lines = [line.removeprefix("# ") for line in text]
    named = {line.split(" =")[0] for line in lines}
    assert named == {*FLAGS} - {*NOT_IN_FILES}
    known = [line for line in lines if not line.endswith("=")]  # the rest are none
    read("\n".join(known))


def test_paths_are_absolute(read, tmp_path, monkeypatch):
    folder = tmp_path / "of [a] run"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("HOME", "/home/me")
    (folder / "odd*.txt").touch()
    config = TrainConfig(
        store=Path("s"),
        tokenizer=Path("~/t.json"),
        data=("**/*.txt", "odd*.txt", "~/x", "/y"),
        csd_root=(Path("d"),),
        source=Path("../hf"),
    )
    text = text_of_run(config)
    monkeypatch.chdir("/")
    found = read(text)
    assert found.store == folder / "s"
    assert found.tokenizer == Path("/home/me/t.json")
    escaped = str(folder).replace("[a]", "[[]a]")
    data = (f"{escaped}/**/*.txt", f"{folder}/odd*.txt", "/home/me/x", "/y")
    assert found.data == data
    assert found.csd_root == (folder / "d",)
    assert found.source == folder / "../hf"


def test_a_name_that_is_no_text_is_left_to_its_flag(read):
    config = dataclasses.replace(FULL, store=Path(os.fsdecode(b"/a/\xff")))
    text = text_of_run(config)
    assert "# store = '\"/a/\\udcff\"' is not UTF-8; give --store" in text
    assert read(text) == dataclasses.replace(FULL, store=None)


ROWS = [
    ("batch-sise = 8", "'batch-sise': no setting of a run's file; did you mean ba"),
    ("[train]\nsteps = 8", "'train': no setting of a run's file"),
    ("steps = 'ten'", "--steps"),
    ("steps = true", "steps: expected a number or a text, found True"),
    (f"steps = 0x{'f' * 9999}", "steps: expected a number of 64 bits, or"),
    (f"elastic = 0x{'f' * 9999}", "elastic: expected true or false, found a num"),
    (f"steps = 1{'0' * 9999}", "in TOML, such as steps = 100"),
    ("elastic = 1", "elastic: expected true or false, found 1"),
    ("store = 1979-05-27", "begin with -, found datetime.date(1979, 5, 27)"),
    ('store = "a\\u0000"', "store: expected a number of 64 bits, or"),
    ("data = ['--log-dir', '/x']", "does not begin with -, found '--log-dir'"),
    ("preset = '--log-dir'", "preset: expected a number of 64 bits, or"),
    ("data = [['a']]", "data: expected a number of 64 bits, or"),
    ("steps = [1, 2]", "steps: expected one value, found a list of 2"),
    ("state = 'fp16'", "run.toml: Invalid choice invalid choice 'fp16' for"),
    ("memory = 'much'", "expected a number of bytes such as 1GiB"),
    ("durability = 'now'", "--durability"),
    ("trace = true", "'trace': no setting of a run's file"),
    ("seq_len = 8\nseq-len = 8", "seq-len: set twice, once with - and once with _"),
    ("steps: 100", "in TOML, such as steps = 100 in a line, found: Expected"),
    ("a =" + "[" * 100_000, "in TOML, such as"),
    (b"store = '\xff'", "in TOML, such as steps = 100 in a line, found: 'utf"),
    ("#" * (1 << 21), "more than 1 MiB; is it the file?"),
    ('"a\\nb" = 1', "'a\\nb': no setting of a run's file"),
    ("help = true", "'help': no setting of a run's file"),
]


@pytest.mark.parametrize(("text", "expected"), ROWS, ids=range(len(ROWS)))
def test_refusals(read, text, expected):
    with pytest.raises(UsageError) as refused:
        read(text)
    assert expected in str(refused.value)
    assert str(refused.value).startswith("--config ")


def test_texts_that_are_taken(read):
    assert read(b"\xef\xbb\xbfsteps = 3\r\n").steps == 3
    assert read("batch_size = 3\nclip-norm = 1").batch_size == 3
    assert read("memory = 4096\ndurability = 3") == TrainConfig(
        memory=4096, durability=3
    )
    assert read("memory = 'none'") == read("") == TrainConfig()


def test_places_that_are_no_file(tmp_path):
    for path, expected in (
        ("no.toml", r"no.toml: expected a file with a run's settings in TOML"),
        ("", "Is a directory"),
        ("/dev/zero", "more than 1 MiB"),
    ):
        with pytest.raises(UsageError, match=expected):
            read_run(tmp_path / path)


@pytest.mark.long
def test_flags_win(run, losses, tmp_path, tiny):
    file, log, drive = (tmp_path / name for name in ("run.toml", "s-log", "drive"))
    drive.mkdir()
    lines = ["steps = 2", "seed = 5", f'store = "{tmp_path}/s"', 'data = ["/no/such"]']
    lines += ['csd-root = ["/no/such"]', 'memory = "64MiB"']
    file.write_text("\n".join(lines))
    assert run("--config", file, "--steps", 1, "--csd-root", drive) == 0
    first = losses(log)
    assert len(first) == 1
    assert any(drive.iterdir())
    text = (log / "config.toml").read_text()
    written = tomllib.loads(text)
    assert (written["csd-root"], written["seed"]) == ([str(drive)], 5)

    # The run's own file starts the same again.
    shutil.rmtree(tmp_path / "s")
    shutil.rmtree(drive)
    drive.mkdir()
    with tiny():
        assert main(["--config", str(log / "config.toml")]) == 0
    assert losses(log) == first
    assert (log / "config.toml").read_text() == text
    assert (log / "config.previous.toml").read_text() == text


# --- what a store keeps --------------------------------------------------------------


def held(**payload):
    """Returns a payload as a commit of the trainer has it."""
    return {"made_by": "jaxinf.train", "run": {}, **payload}


@pytest.fixture
def of_store(monkeypatch):
    """Returns the run of a command line beside a payload, and what is said."""

    def call(payload, *words):
        monkeypatch.setattr(run_file, "_payload_in", lambda store: (payload, ""))
        return config_of(["--store", "s", *map(str, words)])

    return call


HERE = Path("s")
ELSEWHERE = {
    "log-dir": "/x",
    "export-to": "file:///x",
    "track": "tensorboard",
    "csd": "smartssd:xclbin=/x",
    "csd-root": ["/x"],
    "state": "int8",
    "elastic": True,
    "device-updates": "3",
    "distributed": "10.0.0.1:1,2,0",
    "fsdp": True,
    "store": "/x",
    "config": "/x",
    "trace": True,
}


@pytest.mark.parametrize("mark", ["-", "_"])
@pytest.mark.parametrize("name", ELSEWHERE)
def test_a_stores_word_leads_nowhere_else(of_store, name, mark):
    run = {name.replace("-", mark): ELSEWHERE[name], "seed": 3}
    config, said = of_store(held(run=run))
    assert config == TrainConfig(store=HERE, seed=3)
    assert f"ignored, for this version has no such flags '{name}'" in said


def test_each_flag_is_kept_or_leads_elsewhere():
    """A new flag is in neither, so that somebody decides."""
    assert {*FLAGS} == run_file._KEPT | {*ELSEWHERE}


def test_what_a_store_keeps_reads_back(of_store, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = dataclasses.replace(FULL, data=("a*.txt",), lora="8:x", ema="0.5")
    payload = json.loads(json.dumps(held(**run_file.kept_in_store(config))))
    found, said = of_store(payload)
    for name, field in FLAGS.items():
        expected = field.default
        if name in run_file._KEPT:
            expected = getattr(config, field.name)
        if name == "data":
            expected = (str(tmp_path / "a*.txt"),)
        if name == "store":
            expected = HERE
        assert getattr(found, field.name) == expected, name
    assert said == (
        f"settings of the run in s; it reads --data {tmp_path}/a*.txt, --tokenizer "
        "/a/tokenizer.json, --from /a/llama; give again, if you want them --csd"
    )


def test_flags_that_change_a_run_are_named(of_store):
    run = {"steps": 7, "seed": 2, "epochs": 2.0, "data": ["/a"], "preset": "small"}
    config, said = of_store(
        held(run=run | {"\x1b": 1}), "--steps", 9, "--seed=2", "--data", "/b"
    )
    given = {"steps": 9, "seed": 2, "data": ("/b",)}
    assert config == TrainConfig(store=HERE, preset="small", **given)
    assert "settings of the run in s; flags change --data, --steps" in said
    assert "no such flags '\\x1b'" in said
    config, _ = of_store(held(run=run), "--from", "/m", "--epochs", 3)
    assert (config.preset, config.steps, config.seed) == ("nano", 1000, 2)


def test_another_mode_drops_what_it_lacks(of_store):
    run = {"mode": "stream", "memory": "1GiB", "policy": "keep", "device-memory": "9"}
    config, said = of_store(held(run=run), "--mode", "update")
    assert (config.memory, config.policy) == (1 << 30, "keep")
    assert config.device_memory is None
    assert "--mode update has no --device-memory" in said
    assert "flags change --mode" in said
    assert of_store(held(run=run), "--mode", "stream")[0].policy == "keep"
    config, said = of_store(held(run={"policy": "offload"}), "--mode", "update")
    assert config.policy is None
    assert "--mode update has no --policy" in said


@pytest.mark.parametrize(
    ("run", "expected"),
    [
        ({"steps": "ten"}, "--steps"),
        ({"mode": "x"}, "--mode"),
        ({"batch_size": 1 << 999}, "batch-size: expected a number of 64 bits, or"),
        ({"memory": [[1]]}, "memory: expected one value, found a list of 1"),
        ({"data": ["a\0"]}, "data: expected a number of 64 bits, or"),
        ({"data": ["a", "--log-dir", "/x"]}, "begin with -, found '--log-dir'"),
        ({"freeze": ["-x"]}, "NUL, that does not begin with -"),
        ({"preset": "--log-dir=/x"}, "preset: expected a number of 64 bits, or"),
        ({"mode": "stream" * 999}, "of at most 4,096 characters"),
    ],
)
def test_a_wrong_value_is_named_with_its_store(of_store, run, expected):
    with pytest.raises(UsageError) as refused:
        of_store(held(run=run))
    assert "s: settings of the run, which flags replace: " in str(refused.value)
    assert expected in str(refused.value)
    (name,) = run
    if name == "steps":
        of_store(held(run=run), "--steps", 3)  # the remedy


@pytest.mark.parametrize("run", [None, 3, [], "x"])
def test_a_payload_without_settings(of_store, run):
    with pytest.raises(UsageError, match="s: expected the settings of its run in"):
        of_store(held(run=run))
    config = TrainConfig(store=HERE, data=("/b",))
    assert of_store(held(run=run), "--data", "/b") == (config, "")
    assert of_store({"made_by": "me"}) == (TrainConfig(store=HERE), "")


def test_what_a_commit_cannot_keep_is_asked_again(of_store):
    names = tuple(f"/corpus/{n}.txt" for n in range(2000))
    for lost in ({"data": names}, {"data": ("/\udcff",)}):
        kept = run_file.kept_in_store(TrainConfig(**lost, seed=3, csd="emulated"))
        assert kept == {"run": {"seed": 3}, "run_had": ["data", "csd"]}
        _, said = of_store(held(**kept))
        assert "give again, if you want them --csd, --data" in said
        config, _ = of_store(held(**kept), "--data", "/b")
        assert config == TrainConfig(store=HERE, data=("/b",), seed=3)
    kept = run_file.kept_in_store(TrainConfig(steps=0))["run"]
    assert isinstance(kept, dict)
    assert "steps" not in kept


def test_a_store_that_cannot_be_read_blocks_nothing(tmp_path):
    words = ["--store", str(tmp_path)]
    assert config_of(words) == (TrainConfig(store=tmp_path), "")
    (tmp_path / "jaxinf.json").write_text("{}")
    config, said = config_of(words)
    assert config == TrainConfig(store=tmp_path)
    assert "settings of the run are not known" in said


def test_flags_take_values_back(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text('tokenizer = "/t"\nlora = "8,alpha=3"\nseq-len = 9\nepochs = 2')
    words = ["--config", str(file), "--tokenizer", "none", "--lora=none"]
    words += ["--seq_len", "None", "--steps=1000"]  # in the place of epochs
    config, _ = config_of(words)
    assert dataclasses.replace(config, run_file=None) == TrainConfig()
    names = ("tokenizer", "policy", "learning-rate", "memory", "distributed")
    file.write_text("\n".join(f"{name} = 'none'" for name in names))
    assert read_run(file) == TrainConfig()


@pytest.mark.long
def test_a_store_alone_goes_on_with_its_run(run, losses, tmp_path, tiny, capsys):
    """Also a copy of it, whatever the log directory has; as it is after a change."""
    store, words = tmp_path / "s", ("--seed", 5, "--learning-rate", "1e-3")
    words = (*words, "--log-dir", tmp_path / "logs")
    assert run("--store", store, "--steps", 2, *words) == 0
    words = (*words, "--log-dir", tmp_path / "t-log")
    assert run("--store", tmp_path / "t", "--steps", 4, *words) == 0
    (tmp_path / "s-log").mkdir()
    (tmp_path / "s-log/config.toml").write_text("seed = 9")
    with tiny():
        assert main(["--store", str(store), "--steps", "3"]) == 0
        err = capsys.readouterr().err
        assert f"settings of the run in {store}; flags change --steps; it" in err
        assert err.endswith("if you want them --log-dir\n")
        copy = tmp_path / "copy"
        assert jaxinf_main(["store", "copy", str(store), str(copy)]) == 0
        for place in (store, copy):
            assert main(["--store", str(place), "--steps", "4", "--clip-norm=1"]) == 0
            found = losses(place.with_name(f"{place.name}-log"))
            assert found[-1] == losses(tmp_path / "t-log")[-1]
        rate = ["--steps", "5", "--learning-rate", "2e-3"]
        assert main(["--store", str(store), *rate]) == 0
        assert "learning_rate 0.001 -> 0.002" in capsys.readouterr().out
        assert main(["--store", str(store), "--steps", "6"]) == 0
    written = tomllib.loads((tmp_path / "s-log" / "config.toml").read_text())
    assert (written["steps"], written["learning-rate"]) == (6, 2e-3)
    assert (tmp_path / "s-log" / "config.5.toml").is_file()


@pytest.mark.long
def test_a_store_at_step_0_has_its_run(run, tmp_path, tiny, capsys, monkeypatch):
    store = tmp_path / "s"
    with monkeypatch.context() as patch:
        patch.setattr("jaxinf.train.loop._TrainingRun.go", lambda run: 2)  # a signal
        assert run("--store", store, "--steps", 2, "--seed", 5) == 130
    with jaxinf.open_store(store) as opened:
        assert opened.step == 0
        payload: Any = opened.payload
        assert payload["run"]["steps"] == 2
    with tiny():
        assert main(["--store", str(store)]) == 0
    out, err = capsys.readouterr()
    assert "2 of 2 x 8 bytes, seed 5" in out
    assert f"settings of the run in {store}; it reads --data " in err
