"""A run as a file: read, written, and refused."""

import dataclasses
import os
import shutil
import tomllib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxinf.command_line import UsageError, flags_of
from jaxinf.train.__main__ import config_of, main
from jaxinf.train.config import TrainConfig
from jaxinf.train.options import Launch
from jaxinf.train.run_file import NOT_IN_FILES, read_run, text_of_run

FULL = TrainConfig(
    store=Path("/a/store"),
    steps=7,
    mode="stream",
    memory=3 << 30,
    data=("/a/*.txt", '/b/"q"\\ é\n\t\x7f.jsonl'),
    tokenizer=Path("/a/tokenizer.json"),
    device_memory=12345,
    device_updates=3,
    eval_batches=12,
    replan=True,
    remat=True,
    distributed=Launch("a:1", 2, 0),
    csd_root=(Path("/d0"), Path("/d{process}")),
    csd="emulated:buffers=2",
    durability=1024,
    state_tier=1 << 20,
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


@settings(max_examples=100)
@given(
    st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"])),
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
    defaults = {flag.name: flag for flag in flags_of(TrainConfig)}
    lines = [
        line.removeprefix("# ")
        for line in text_of_run(FULL).splitlines()
        if "=" in line
    ]
    named = {line.split(" =")[0] for line in lines}
    assert named == {*defaults} - {*NOT_IN_FILES}
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


def test_a_run_without_a_store_keeps_its_logs(read, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = text_of_run(TrainConfig(mode="memory"))
    monkeypatch.chdir("/")
    assert read(text).logs == tmp_path / "runs/memory"


def test_a_name_that_is_no_text_is_left_to_its_flag(read):
    config = dataclasses.replace(FULL, store=Path(os.fsdecode(b"/a/\xff")))
    text = text_of_run(config)
    assert "# store = '\"/a/\\udcff\"' is not UTF-8; give --store" in text
    assert read(text) == dataclasses.replace(FULL, store=None)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("batch-sise = 8", "'batch-sise': no setting of a run's file; did you mean ba"),
        ("qqq = 8", "'qqq': no setting of a run's file; --help-all lists them"),
        ("[train]\nsteps = 8", "'train': no setting of a run's file"),
        ("steps.a = 8", "steps: expected a whole number, found an object of 1"),
        ("steps = 'ten'", "steps: expected a whole number, found 'ten'"),
        ("steps = 10.0", "steps: expected a whole number, found 10.0"),
        ("steps = true", "steps: expected a whole number, found True"),
        ("steps = nan", "steps: expected a whole number, found nan"),
        ("steps = 9223372036854775808", "steps: expected a number of at most 64 bits"),
        (f"steps = 0x{'f' * 9999}", "steps: expected a number of at most 64 bits"),
        (f"clip-norm = 0x{'f' * 9999}", "clip-norm: expected a number of at most 64"),
        (f"replan = 0x{'f' * 9999}", "replan: expected a number of at most 64 bits"),
        (f"steps = 1{'0' * 9999}", "in TOML, such as steps = 100"),
        ("clip-norm = '1'", "clip-norm: expected a number, found '1'"),
        ("replan = 1", "replan: expected true or false, found 1"),
        ("store = 1", "store: expected a path in quotes, found 1"),
        (
            "store = 1979-05-27",
            "store: expected a path in quotes, found datetime.date(1979, 5, 27)",
        ),
        ("store = 07:32:00", "found datetime.time(7, 32)"),
        ('store = "a\\u0000"', "store: expected a text without NUL"),
        ("data = 'a'", "data: expected a list, found 'a'"),
        ("data = ['a', 1]", "data[1]: expected a text, found 1"),
        ("data = [['a']]", "data[0]: expected a text, found a list of 1"),
        ("mode = 'streem'", "expected one of update, stream, memory, found 'streem'"),
        ("mode = 'streem'", "did you mean stream?"),
        ("mode = 3", "mode: expected one of update, stream, memory, found 3"),
        ("state = 8", "state: expected one of fp32, bf16, int8, found 8"),
        ("memory = 'much'", "memory: 'much': expected a number of bytes such as 1GiB"),
        ("memory = 1.5", "memory: expected BYTES in quotes, or a number, found 1.5"),
        ("memory = '1e'", "memory: '1e': expected a number of bytes"),
        (f"memory = '{'9' * 400}'", "expected a number of bytes such as 1GiB"),
        ("state-tier = '2GiB'", "state-tier: '2GiB': expected host=BYTES, such"),
        ("durability = 'now'", "durability: 'now': expected step, checkpoint, or a n"),
        ("eval-batches = 0", "eval-batches: '0': expected all, or a number of batches"),
        ("restore = 'best'", "'restore': no setting of a run's file"),
        ("seq_len = 8\nseq-len = 8", "seq-len: set twice, once with - and once with _"),
        ("steps = 1\nsteps = 2", "found: Cannot overwrite a value"),
        ("steps: 100", "in TOML, such as steps = 100 in a line, found: Expected"),
        ("{}", "in TOML, such as"),
        ("a =" + "[" * 100_000, "in TOML, such as"),
        (
            b"store = '\xff'",
            "in TOML, such as steps = 100 in a line, found: 'utf",
        ),
        ("#" * (1 << 21), "expected at most 1 MiB; is it the file?"),
        ('"a\\nb" = 1', "'a\\nb': no setting of a run's file"),
        (f"{'x' * 999} = 1", f"'{'x' * 60}'…: no setting of a run"),
        ("a = 1\nsteps = 'b'", "a run's file; --help-all lists them\n  steps: "),
    ],
)
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
    assert read("memory = 'none'\nstate-tier = 'none'") == TrainConfig()
    assert read("eval-batches = 'all'").eval_batches == "all"
    assert read("") == TrainConfig()


@pytest.mark.parametrize("words", [["--steps", "1000"], ["--steps=1000"]])
def test_steps_take_the_place_of_epochs(tmp_path, words):
    """Also if they are as many as by default."""
    file = tmp_path / "run.toml"
    file.write_text("epochs = 2")
    config = config_of(["--config", str(file), *words])
    assert (config.steps, config.epochs) == (1000, None)
    assert config_of(["--config", str(file)]).epochs == 2


def test_places_that_are_no_file(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    for path, expected in (
        ("no.toml", "--config no.toml: expected a file with a run's settings in TOML"),
        ("folder", "Is a directory"),
        ("/dev/zero", "expected at most 1 MiB"),
    ):
        assert main(["--config", path, "--store", "s"]) == 2
        assert expected in capsys.readouterr().err
    assert [*tmp_path.iterdir()] == [tmp_path / "folder"]


@pytest.mark.long
def test_flags_win(run, losses, tmp_path, tiny, capsys):
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
    assert written["csd-root"] == [str(drive)]
    assert written["seed"] == 5

    # The run's own file starts the same again.
    shutil.rmtree(tmp_path / "s")
    shutil.rmtree(drive)
    drive.mkdir()
    with tiny():
        assert main(["--config", str(log / "config.toml")]) == 0
    assert losses(log) == first
    assert (log / "config.toml").read_text() == text
    assert (log / "config.previous.toml").read_text() == text

    capsys.readouterr()
    words = ["--config", file, "--mode", "memory", "--memory", "none"]
    assert run(*words, "--store", "None") == 2
    assert "--csd-root: --mode memory keeps nothing" in capsys.readouterr().err


@pytest.mark.long
def test_a_store_alone_goes_on_with_its_run(run, losses, tmp_path, tiny, capsys):
    store, words = tmp_path / "s", ("--seed", 5, "--learning-rate", "1e-3")
    assert run("--store", store, "--steps", 2, *words) == 0
    assert run("--store", tmp_path / "t", "--steps", 4, *words) == 0
    with tiny():
        assert main(["--store", str(store), "--steps", "3"]) == 0
        assert "s-log/config.toml" in capsys.readouterr().err
        assert main(["--store", str(store), "--steps", "4", "--clip-norm", "1"]) == 0
        assert losses(tmp_path / "s-log") == losses(tmp_path / "t-log")
        rate = ["--steps", "5", "--learning-rate", "2e-3"]
        assert main(["--store", str(store), *rate]) == 0
    assert "learning_rate 0.001 -> 0.002" in capsys.readouterr().out
    written = tomllib.loads((tmp_path / "s-log" / "config.toml").read_text())
    assert (written["steps"], written["learning-rate"]) == (5, 2e-3)
    assert (tmp_path / "s-log" / "config.4.toml").is_file()
