"""Refusals of the trainer, with message and exit status."""

import json
import os
import re
import shutil
from types import SimpleNamespace

import numpy as np
import pytest

import jaxinf
from jaxinf.command_line import UsageError
from jaxinf.store import StoreDirectory, seal
from jaxinf.train.freezing import check_source
from jaxinf.train.lora import Lora
from jaxinf.train.resume import _read


@pytest.mark.long
def test_resume_with_other_settings_is_refused(run, losses, tmp_path, capsys):
    words = ("--store", tmp_path / "store")
    assert run(*words, "--steps", 2) == 0
    before = losses(tmp_path / "store-log")
    for change, expected in (
        (("--seed", 1), "--seed: the run has 0, this command 1"),
        (("--batch-size", 3), "--batch-size: the run has 2, this command 3"),
        (("--seq-len", 7), "--seq-len: the run has 8, this command 7"),
        (("--preset", "small"), "--preset: the run has nano, this command small"),
        (("--optimizer", "adam"), "--optimizer: the run has adamw, this command adam"),
        (("--dtype", "bfloat16"), "--dtype: the run has float32, this command bfl"),
        (("--freeze", "wte"), "--freeze: the run has [], this command ['wte']"),
        (("--lora", 2), "--lora: the run has None, this command 2"),
    ):
        assert run(*words, "--steps", 4, *change) == 1
        err = capsys.readouterr().err
        assert expected in err
        assert "at step 2" in err
        assert "another --store" in err
        assert "--from" not in err
    assert losses(tmp_path / "store-log") == before


@pytest.mark.parametrize(
    ("held", "own"),
    [
        ({}, {}),  # of a run from before these settings
        ({"freeze": [], "lora": "8", "lora_alpha": 16.0}, {"lora": "8"}),
        ({"freeze": [], "lora": "8", "lora_alpha": 32.0}, {"lora": "8,alpha=32"}),
    ],
)
def test_settings_of_before_are_those_of_now(held, own):
    payload = {"made_by": "jaxinf.train", "settings": held}
    read = _read(payload, SimpleNamespace(store="s"))["settings"]
    assert {name: read[name] for name in ("freeze", "lora")} == {
        "freeze": [],
        "lora": None,
        **own,
    }


@pytest.mark.long
def test_resume_of_another_programs_store_is_refused(run, tmp_path, capsys):
    assert run("--store", tmp_path / "store", "--steps", 2) == 0
    slot = (tmp_path / "store/current").resolve()
    record = json.loads((slot / "commit.json").read_text())
    (slot / "commit.json").write_bytes(seal(record | {"payload": None}))
    assert run("--store", tmp_path / "store", "--steps", 3) == 1
    assert "another program made it" in capsys.readouterr().err


@pytest.mark.long
def test_locked_store(run, tmp_path, capsys, monkeypatch):
    assert run("--store", tmp_path / "store", "--steps", 1) == 0
    with jaxinf.open_store(tmp_path / "store"):
        # As in another process, which knows nothing of the stores that are open here.
        monkeypatch.setattr("jaxinf.engine.open_stores._open", {})
        assert run("--store", tmp_path / "store", "--steps", 2) == 1
    err = capsys.readouterr().err
    assert "only writer" in err
    assert "Traceback" not in err


def test_failing_drive_is_one_message(run, tmp_path, capfd, monkeypatch):
    def fail(*_, **__):
        raise jaxinf.StoreSpaceError("/mnt: no room left at all")

    monkeypatch.setattr(StoreDirectory, "prepare_write", fail)
    assert run("--store", tmp_path / "store", "--steps", 3) == 1
    err = capfd.readouterr().err
    assert err == "jaxinf.train: /mnt: no room left at all\n"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ((), "--store: expected a directory"),
        (("--store", "s", "--steps", -3), "at least 1, got -3; 0 imports what --from"),
        (("--store", "s", "--seq-len", 17), "--seq-len: expected at most 16"),
        (("--store", "s", "--epochs", 1, "--steps", 3), "--epochs says how long"),
        (("--store", "s", "--epochs", 0), "--epochs: expected more than 0"),
        (
            ("--store", "s", "--micro-batches", 3),
            "a divisor of the --batch",
        ),
        (("--store", "s", "--optimizer", "sgd"), "--learning-rate: expected"),
        (("--store", "s", "--restore", "1"), "write jaxinf checkpoint restore"),
        (("--store", "s", "--optimizer", "adamix"), "did you mean"),
        (("--store", "s", "--optimizer-args", "b3=1"), "adamw has no b3"),
        (("--mode", "memory", "--store", "s"), "--store: --mode memory keeps nothing"),
        (("--mode", "memory", "--memory", "1GiB"), "--memory: --mode memory"),
        (("--store", "s", "--log-dir", "s/log"), "--log-dir"),
        (("--store", "s", "--log-dir", "/proc/1/zz"), "--log-dir /proc/1/zz: expected"),
        (("--store", "s", "--log-dir", "/dev/full"), "--log-dir /dev/full: expected"),
        (("--store", "s", "--csd-root", "/nowhere"), "CSD root /nowhere"),
        (("--store", "s", "--learning-rate", "nan"), "--learning-rate: expected more"),
        (
            ("--store", "s", "--learning-rate", "inf"),
            "--learning-rate: expected more than 0, and fin",
        ),
        (("--store", "~nobody-here/s"), "--store ~nobody-here/s: expected the home of"),
        (
            ("--store", "s", "--csd-root", "~nobody-here"),
            "--csd-root ~nobody-here: exp",
        ),
        (("--store", "s", "--preset", "tiny"), "--preset: expected one of gpt2's"),
        (("--store", "s", "--freeze", "wte", "h7/*"), "--freeze h7/*: expected a patt"),
        (("--store", "s", "--freeze", "*"), "--freeze *: expected patterns that leave"),
        (
            ("--store", "s", "--lora", "2:w*"),
            "none that it matches; there are 'h0/a",
        ),
        (("--store", "s", "--lora", "17"), "--lora 17: expected a rank of at most 16"),
        (("--store", "s", "--lora", "0"), "--lora '0': expected a rank from 1 on"),
        (
            ("--store", "s", "--lora", "2,alpha=0"),
            "--lora '2,alpha=0': expected",
        ),
        (("--store", "s", "--policy", "offload"), "--policy offload: --mode update do"),
        (("--store", "s", "--lora", "2", "--freeze", "wte"), "leave --freeze out"),
    ],
)
def test_usage_errors(run, tmp_path, capsys, monkeypatch, words, expected):
    monkeypatch.chdir(tmp_path)
    assert run(*words) == 2
    err = capsys.readouterr().err
    assert expected in err
    assert not list(tmp_path.glob("s*"))


@pytest.mark.parametrize(
    "words",
    [
        ("--mod", "stream"),
        ("--mode", "streamed"),
        ("--memory", "much"),
        ("--steps", "ten"),
    ],
    ids=" ".join,
)
def test_unknown_values_exit_2(run, tmp_path, capsys, words):
    with pytest.raises(SystemExit) as status:
        run("--store", tmp_path / "store", *words)
    assert status.value.code == 2
    err = " ".join(re.sub("[│─╭╮╰╯]", " ", capsys.readouterr().err).split())
    assert words[0] in err
    if words[0] == "--mod":
        assert "Perhaps you meant: --mode" in err
    if words[0] == "--mode":
        assert "Expected one of" in err


def test_data_that_matches_nothing(run, tmp_path, capsys):
    assert run("--store", tmp_path / "s", data=tmp_path / "no/*.txt") == 2
    assert "found no file" in capsys.readouterr().err
    short = tmp_path / "short.txt"
    short.write_text("abc")
    assert run("--store", tmp_path / "s", data=short) == 2
    assert "name more text" in capsys.readouterr().err


def test_leaves_that_a_checkpoint_lacks_are_not_frozen():
    frozen = Lora(2).frozen(trains_head=False)
    with pytest.raises(UsageError, match="--lora: 'head/kernel' are not in DIR"):
        check_source(frozen, {"head": {"kernel": np.ones(2)}}, "DIR")
    check_source(frozen, {"head": {"lora_a": np.ones(2)}}, "DIR")


def files_below(folder):
    """Returns the content of all files, and the names of all directories."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in folder.rglob("*")
    }


def test_a_start_beside_drives_that_hold_the_run_changes_nothing(run, tmp_path, capsys):
    store, drive = tmp_path / "store", tmp_path / "drive"
    drive.mkdir()
    words = ["--store", store, "--csd-root", drive]
    assert run(*words, "--steps", 2) == 0
    shutil.rmtree(store)
    store.mkdir()
    before = files_below(tmp_path)
    capsys.readouterr()
    assert run(*words, "--steps", 3) == 1
    said = "".join(capsys.readouterr().err.split())
    assert str(store) in said
    assert str(drive) in said
    assert files_below(tmp_path) == before


def test_a_first_start_that_fails_leaves_no_file(run, tmp_path, monkeypatch):
    monkeypatch.setattr(
        os, "statvfs", lambda path: SimpleNamespace(f_bavail=1, f_frsize=4096)
    )
    assert run("--store", tmp_path / "store", "--steps", 2) == 1
    assert files_below(tmp_path) == {}
