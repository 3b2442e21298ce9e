"""A run as a file: read, written, and refused."""

import dataclasses
import tomllib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxinf.command_line import UsageError
from jaxinf.train.__main__ import main
from jaxinf.train.config import FLAGS, TrainConfig
from jaxinf.train.run_file import NOT_IN_FILES, format_run, parse_config, read_run_file

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
        return read_run_file(path, **options)

    return call


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
    own = {"compress": text, "optimizer_args": (text,), "clip_norm": number}
    for one in (FULL, TrainConfig(store=Path("/s"))):
        config = dataclasses.replace(one, **own, seed=whole)
        path.write_text(format_run(config), encoding="utf-8", newline="")
        assert read_run_file(path) == config


def test_every_flag_can_be_in_a_file(read):
    text = [line for line in format_run(FULL).splitlines() if "=" in line]
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
    text = format_run(config)
    monkeypatch.chdir("/")
    found = read(text)
    assert found.store == folder / "s"
    assert found.tokenizer == Path("/home/me/t.json")
    escaped = str(folder).replace("[a]", "[[]a]")
    data = (f"{escaped}/**/*.txt", f"{folder}/odd*.txt", "/home/me/x", "/y")
    assert found.data == data
    assert found.csd_root == (folder / "d",)
    assert found.source == folder / "../hf"


ROWS = [
    ("batch-sise = 8", "'batch-sise': no setting of a run's file; did you mean ba"),
    ("[train]\nsteps = 8", "'train': no setting of a run's file"),
    ("trace = true", "'trace': no setting of a run's file"),
    ('"a\\nb" = 1', "'a\\nb': no setting of a run's file"),
    ("steps = 'ten'", "--steps"),
    ("steps = true", "steps: expected a number, or a text without NUL that"),
    ("steps = [1, 2]", "steps: expected one value, found a list of 2"),
    ("elastic = 1", "elastic: expected true or false, found 1"),
    ("store = 1979-05-27", "begin with -, found datetime.date(1979, 5, 27)"),
    ('store = "a\\u0000"', "store: expected a number, or a text without NUL"),
    ("data = ['--log-dir', '/x']", "does not begin with -, found '--log-dir'"),
    ("data = [['a']]", "data: expected a number, or a text"),
    ("state = 'fp16'", "run.toml: Invalid choice invalid choice 'fp16' for"),
    ("memory = 'much'", "expected a number of bytes such as 1GiB"),
    ("seq_len = 8", "'seq_len': no setting of a run's file; did you mean seq-len"),
    ("steps: 100", "in TOML, such as steps = 100 in a line, found: Expected"),
    (f"steps = 1{'0' * 9999}", "in TOML, such as steps = 100"),
    (f"elastic = 0x{'f' * 9999}", "elastic: expected true or false, found a num"),
    ("a =" + "[" * 100_000, "in TOML, such as"),
    (b"store = '\xff'", "in TOML, such as steps = 100 in a line, found: 'utf"),
]


@pytest.mark.parametrize(("text", "expected"), ROWS, ids=range(len(ROWS)))
def test_refusals(read, text, expected):
    with pytest.raises(UsageError) as refused:
        read(text)
    assert expected in str(refused.value)
    assert str(refused.value).startswith("--config ")
    with pytest.raises(UsageError, match=r"no.toml: expected a file with a run's"):
        read_run_file(Path("/no.toml"))


def test_texts_that_are_taken(read):
    assert read(b"\xef\xbb\xbfsteps = 3\r\n").steps == 3
    assert read("batch-size = 3\nclip-norm = 1").batch_size == 3
    assert read("memory = 4096\ndurability = 3") == TrainConfig(
        memory=4096, durability=3
    )
    assert read("memory = 'none'") == read("") == TrainConfig()


def test_flags_take_values_back(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text('tokenizer = "/t"\nlora = "8,alpha=3"\nseq-len = 9\nsteps = 2')
    words = ["--config", str(file), "--tokenizer", "none", "--lora=none"]
    words += ["--seq_len", "None", "--steps=1000"]
    config = parse_config(words)
    assert dataclasses.replace(config, run_file=None) == TrainConfig()
    names = ("tokenizer", "policy", "learning-rate", "memory", "distributed")
    file.write_text("\n".join(f"{name} = 'none'" for name in names))
    assert read_run_file(file) == TrainConfig()


@pytest.mark.long
def test_the_file_of_a_run_goes_on_with_it(run, losses, tmp_path, tiny, capsys):
    words = ("--seed", 5, "--learning-rate", "1e-3")
    for name, steps in (("s", 2), ("t", 4)):
        assert run("--store", tmp_path / name, "--steps", steps, *words) == 0
    log = tmp_path / "s-log"
    file = str(log / "config.toml")
    with tiny():
        assert main(["--config", file, "--steps", "4"]) == 0
        assert losses(log) == losses(tmp_path / "t-log")
        capsys.readouterr()
        assert main(["--config", file, "--steps=5", "--learning-rate", "2e-3"]) == 0
        assert "learning_rate 0.001 -> 0.002" in capsys.readouterr().out
    written = tomllib.loads((log / "config.toml").read_text())
    found = [written[name] for name in ("steps", "learning-rate", "seed")]
    assert found == [5, 2e-3, 5]
    assert (log / "config.4.toml").is_file()
