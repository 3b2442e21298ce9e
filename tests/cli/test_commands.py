import json
import re
import subprocess
import sys
from functools import partial
from importlib import metadata
from pathlib import Path

import jax
import pytest

import jaxinf
from jaxinf.cli import main
from jaxinf.terminal import format_bytes, format_count, parse_bytes


def test_help_is_readable(run):
    for words in (["--help"], ["inspect", "--help"], ["doctor", "--help"], []):
        result = run(*words)
        assert result.status == 0
        assert "usage: jaxinf" in result.out
    assert "--json" in run("inspect", "--help").out
    assert "1GiB" in run("doctor", "--help").out


@pytest.mark.parametrize(
    ("words", "advice"),
    [
        (["inspct", "a"], "Available subcommands: train, inspect, verify,"),
        (["inspect"], "STORE"),
        (["inspect", "a", "b"], "b"),
        (["inspect", "a", "--jso"], "--json"),
        (["checkpoint", "sav", "a"], "Available subcommands: save, list,"),
        (["checkpoint", "save"], "STORE"),
        (["store"], "copy"),
        (["store", "copy", "a", "b", "--state", "bf61"], "'--state'. Expected one of"),
        (["doctor", "--size", "much"], "expected a number of bytes"),
        (["doctor", "--size", "-1"], ""),
        (["doctor", "--sizes=3"], "Perhaps you meant: --size BYTES"),
    ],
    ids=lambda words: " ".join(words) if isinstance(words, list) else "",
)
def test_a_wrong_command_line_is_told_what_is_right(words, advice, run):
    result = run(*words)
    assert (result.status, result.out) == (2, "")
    assert advice in " ".join(re.sub("[│─╭╮╰╯]", " ", result.err).split())
    assert "Traceback" not in result.err


def test_version(run):
    assert run("--version").out == f"jaxinf {jaxinf.__version__}\n"


def test_console_script():
    [script] = metadata.entry_points(group="console_scripts", name="jaxinf")
    assert script.load() is main


@pytest.mark.long
def test_in_a_process_of_its_own(trained):
    script = Path(sys.executable).with_name("jaxinf")
    code = "import sys, jaxinf.cli; sys.exit(jaxinf.cli.main())"
    words = [str(script)] if script.exists() else [sys.executable, "-c", code]
    done = subprocess.run(
        [*words, "inspect", str(trained.path), "--json"], capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["step"] == 3
    done = subprocess.run(
        [*words, "inspect", "/nowhere"], capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("jaxinf: /nowhere: expected")


@pytest.mark.long
def test_a_reader_that_leaves_early(trained):
    command = f"{sys.executable} -m jaxinf inspect {trained.path} --json | head -c 9"
    done = subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, check=True
    )
    assert done.stderr == ""


def test_sizes():
    texts = {"0": 0, "4096": 4096, "1KiB": 1024, "1.5 MiB": 3 << 19, "2g": 2 << 30}
    for text, num_bytes in {**texts, "1GB": 10**9, "7 b": 7}.items():
        assert parse_bytes(text) == num_bytes
    for text in ("", "GiB", "1 XiB", "-1", "1e9", "nan"):
        with pytest.raises(ValueError, match="expected a number of bytes such as 1GiB"):
            parse_bytes(text)
    shown = {0: "0 B", 999: "999 B", 1000: "0.98 KiB", 1493277696: "1.39 GiB"}
    assert [format_bytes(n) for n in shown] == [*shown.values()]
    shown = {0: "0", 999: "999", 1500: "1.5 k", 124439808: "124 M", 3.4e9: "3.4 G"}
    assert [format_count(n) for n in shown] == [*shown.values()]


@pytest.mark.parametrize("value", ["4 elephants", 0, 1.5, "0B"])
def test_sizes_that_functions_refuse(value, tmp_path):
    for make in (
        partial(jaxinf.open_store, tmp_path / "store"),
        partial(jaxinf.stream_function, lambda p, b: p, tmp_path / "store"),
    ):
        with pytest.raises(ValueError, match=f"memory_bytes={value!r}: expected"):
            make(memory_bytes=value)


def test_sizes_as_text(tmp_path):
    with jaxinf.open_store(tmp_path / "one", memory_bytes="96MiB") as store:
        assert store._engine.options.memory_bytes == 96 << 20
    with jaxinf.stream_function(
        jax.tree.map,
        tmp_path / "two",
        memory_bytes="1GiB",
        device_memory_bytes="0.5GiB",
    ) as made:
        found = made._options
    assert (found.memory_bytes, found.device_memory_bytes) == (1 << 30, 1 << 29)
