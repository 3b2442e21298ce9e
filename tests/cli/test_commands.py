"""Command lines that are wrong, sizes, `jaxinf inspect`, and `jaxinf doctor`."""

import errno
import json
import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from inject import raising

from jaxinf.cli import directories
from jaxinf.errors import StoreIOError
from jaxinf.store import steps
from jaxinf.terminal import format_bytes, format_count, parse_bytes


@pytest.mark.parametrize(
    ("words", "advice"),
    [
        ("inspct a", "Available subcommands: train, inspect, verify,"),
        ("inspect", "STORE"),
        ("inspect a --jso", "--json"),
        ("store copy a b --state bf61", "'--state'. Expected one of"),
        ("doctor --size much", "expected a number of bytes"),
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
    run = partial(subprocess.run, capture_output=True, text=True)
    done = run([*words, "inspect", str(trained), "--json"])
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["step"] == 3
    done = run([*words, "inspect", "/nowhere"])
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


# --- jaxinf inspect -------------------------------------------------------------------


STORE_KEYS = (
    "store store_id created_by pinned warnings step committed_at skipped_steps "
    "num_params leaves state_bytes disk_bytes checkpoints drives writer member"
).split()


def test_document_of_a_store(trained, run_json):
    found = run_json("inspect", trained)
    assert list(found) == STORE_KEYS
    num_params = 300 * 128 + 129 + 1
    assert found["store"] == str(trained)
    assert (found["step"], found["skipped_steps"]) == (3, 0)
    assert found["num_params"] == num_params
    assert found["pinned"] is True
    assert found["writer"] is None
    assert found["warnings"] == []
    assert set(found["created_by"]) >= {"jaxinf", "jax", "optax"}
    names = ("params", "mu", "nu")
    assert found["state_bytes"] == dict.fromkeys(names, 4 * num_params)


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES])
def test_a_store_that_cannot_be_written_is_read(trained, code, run, monkeypatch):
    def refuse(directory):
        raise StoreIOError("no") from OSError(code, os.strerror(code))

    monkeypatch.setattr(steps, "pinned_step", refuse)
    result = run("inspect", trained, "--json")
    assert result.status == 0
    assert result.err.startswith("warning: ")
    assert "chunks may be of different steps" in result.err
    document = json.loads(result.out)
    assert document["pinned"] is False
    assert len(document["warnings"]) == 1


@pytest.mark.parametrize(
    ("name", "text", "part"),
    [
        ("gone", None, "found nothing"),
        ("file", None, "found a file"),
        ("", None, "found no jaxinf.json"),
        *(("", text, "jaxinf.json") for text in ("", "{", "[]", "\x00")),
    ],
)
def test_not_a_store(tmp_path, run, name, text, part):
    (tmp_path / "file").touch()
    if text is not None:
        (tmp_path / "jaxinf.json").write_text(text)
    result = run("inspect", tmp_path / name)
    assert (result.status, result.out) == (1, "")
    assert result.err.startswith("jaxinf: ")
    assert result.err.count("\n") == 1
    assert part in result.err


# --- jaxinf doctor --------------------------------------------------------------------


def looked(path, file_bytes=0):
    return directories.examine_directory(path, file_bytes, lambda done, total: None)


def test_a_usable_directory(tmp_path):
    seen = []

    def progress(done, total):
        seen.append((done, total, list(tmp_path.iterdir())))

    found = directories.examine_directory(tmp_path, 1 << 20, progress)
    assert found.is_usable
    assert not [problem for problem in found.problems if "links" in problem.what]
    assert seen[-1][:2] == (3 << 20, 3 << 20)
    assert not any(path.is_file() for *_, names in seen for path in names)
    assert "3.00 MiB moved" in found.facts["bandwidth"]
    assert list(tmp_path.iterdir()) == []


def test_a_cache_of_kernels_that_cannot_be_written(tmp_path, run, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("JAXINF_CACHE_DIR", str(tmp_path / "file" / "cache"))
    result = run("doctor", tmp_path, "--size", 0)
    assert f"{tmp_path}/file/cache: compiled kernels cannot be kept there" in result.out
    assert "remedy: name a directory that this user can write" in result.out


def test_several_paths_and_one_is_bad(tmp_path, run):
    (tmp_path / "file").touch()
    for name, what, remedy in (("gone", "nothing", "mkdir -p"), ("file", "a file", "")):
        [problem] = [p for p in looked(tmp_path / name).problems if p.is_fatal]
        assert f"found {what}" in problem.what
        assert remedy in problem.remedy
    result = run("doctor", tmp_path, "--size", "256KiB")
    assert result.status == 0
    for part in (str(tmp_path), "MB/s", "params/s with Adam", "jax ", "ready"):
        assert part in result.out
    result = run("doctor", tmp_path, tmp_path / "gone", tmp_path / "file")
    assert result.status == 1
    assert "cannot hold a store" in result.out


@pytest.mark.parametrize(
    ("name", "is_fatal"),
    [("direct_io", False), ("hard_links", True), ("locks", True)],
)
def test_what_a_file_system_lacks(tmp_path, name, is_fatal, monkeypatch):
    refuse = raising(OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP)))
    features = directories._FEATURES
    monkeypatch.setitem(features, name, (refuse, *features[name][1:]))
    found = looked(tmp_path)
    [problem] = [p for p in found.problems if "not supported" in p.what]
    assert problem.is_fatal is is_fatal
    assert "ext4" in problem.remedy


def test_memory_is_no_drive():
    found = looked(Path("/dev/shm"))
    assert found.facts["file system"] == "tmpfs"
    assert any("gone after a reboot" in problem.what for problem in found.problems)
