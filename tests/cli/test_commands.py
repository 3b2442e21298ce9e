import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import jaxinf
from jaxinf.terminal import format_bytes, format_count, parse_bytes


@pytest.mark.parametrize(
    ("words", "advice"),
    [
        ("inspct a", "Available subcommands: train, inspect, verify,"),
        ("inspect", "STORE"),
        ("inspect a --jso", "--json"),
        ("checkpoint sav a", "Available subcommands: save, list,"),
        ("store", "copy"),
        ("store copy a b --state bf61", "'--state'. Expected one of"),
        ("doctor --size much", "expected a number of bytes"),
        ("doctor --sizes=3", "Perhaps you meant: --size BYTES"),
    ],
)
def test_a_wrong_command_line_is_told_what_is_right(words, advice, run):
    result = run(*words.split())
    assert (result.status, result.out) == (2, "")
    assert advice in " ".join(re.sub("[│─╭╮╰╯]", " ", result.err).split())
    assert "Traceback" not in result.err
    assert "usage: jaxinf" in run().out


@pytest.mark.long
def test_in_a_process_of_its_own(trained):
    script = Path(sys.executable).with_name("jaxinf")
    code = "import sys, jaxinf.cli; sys.exit(jaxinf.cli.main())"
    words = [str(script)] if script.exists() else [sys.executable, "-c", code]
    done = subprocess.run(
        [*words, "inspect", str(trained), "--json"], capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["step"] == 3
    done = subprocess.run(
        [*words, "inspect", "/nowhere"], capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("jaxinf: /nowhere: expected")


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


def test_sizes_as_text(tmp_path):
    with jaxinf.open_store(tmp_path / "one", memory_bytes="96MiB") as store:
        assert store._engine.options.memory_bytes == 96 << 20
    for value in ("4 elephants", 0, 1.5, "0B"):
        with pytest.raises(ValueError, match=f"memory_bytes={value!r}: expected"):
            jaxinf.open_store(tmp_path / "two", memory_bytes=value)
