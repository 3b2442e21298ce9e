"""Refusals of the trainer, with message and exit status."""

import os
from types import SimpleNamespace

import pytest
from inject import raising
from raw_stores import edit

import jaxinf
from jaxinf.store import StoreDirectory


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
        assert all(x in err for x in (expected, "at step 2", "another --store"))
        assert "--from" not in err
    assert losses(tmp_path / "store-log") == before


@pytest.mark.long
def test_resume_of_another_programs_store_is_refused(run, tmp_path, capsys):
    assert run("--store", tmp_path / "store", "--steps", 2) == 0
    edit(tmp_path / "store/current/commit.json", payload=None)
    assert run("--store", tmp_path / "store", "--steps", 3) == 1
    assert "another program made it" in capsys.readouterr().err


def test_failing_drive_is_one_message(run, tmp_path, capfd, monkeypatch):
    fail = raising(jaxinf.StoreSpaceError("/mnt: no room left at all"))
    monkeypatch.setattr(StoreDirectory, "prepare_write", fail)
    assert run("--store", tmp_path / "store", "--steps", 3) == 1
    err = capfd.readouterr().err
    assert err == "jaxinf.train: /mnt: no room left at all\n"


USAGE = (
    ("", "--store: expected a directory"),
    ("--steps -3", "--steps: expected at least 0, got -3"),
    ("--seq-len 17", "--seq-len: expected at most 16"),
    ("--learning-rate nan", "--learning-rate: expected more than 0"),
    ("--micro-batches 3", "multiple of the 1 JAX devices x 3 micro-batches, got 2"),
    ("--optimizer sgd", "--learning-rate: expected"),
    ("--mode memory", "--store: --mode memory keeps nothing"),
    ("--log-dir s/log", "--log-dir"),
    ("--log-dir /proc/1/zz", "--log-dir /proc/1/zz: expected"),
    (f"--log-dir /{300 * 'a'}", "aaa: expected a directory, or a place for one"),
    ("--csd-root /nowhere", "CSD root /nowhere"),
    ("--clip-norm inf", "--clip-norm: expected a finite number, got inf"),
    ("--csd-root ~nobody-here", "--csd-root ~nobody-here: exp"),
    ("--preset tiny", "--preset: expected one of gpt2's"),
    ("--freeze wte h7/*", "--freeze h7/*: expected a patt"),
    ("--freeze *", "--freeze *: expected patterns that leave"),
    ("--lora 2:c_attn", "there are 'h*/attn/proj/kernel', 'h*/attn/qkv/kernel'"),
    ("--lora 2,alpha=0", "--lora '2,alpha=0': expected"),
    ("--policy offload", "--policy offload: --mode update do"),
    ("--lora 2 --freeze wte", "leave --freeze out"),
    ("--ema 1.5", "--ema 1.5: ema: decay=1.5: expected a number from 0 to 1"),
    ("--ema 0.9,decay=1", "expected DECAY, such as 0.999"),
    ("--mode stream", "--memory: expected the bytes"),
    ("--device-memory 1GiB", "--device-memory: --mode update does not have"),
    ("--mode stream --memory 1GiB --optimizer dog --learning-rate 1",
     "(--mode memory trains with it)"),
    ("--compress random:0.1", "--compress 'random:0.1': expected top_k:RATIO"),
    ("--compress top_k:0.1,error_feedback=true --durability 5",
     "--compress …,error_feedback=true: each step commits its error feedback, expected "
     "--durability step, found"),
    ("--compress top_k:0.1,error_feedback=true --mode stream --memory 1GiB",
     "give --clip-norm 0, or leave error feedback"),
    ("--export-to file:///a", "--export-to: expected --checkpoint-every K"),
    ("--checkpoint-every 2 --export-to s3://key:secret@bucket/a",
     "export_to: s3://…: expected s3://BUCKET/PATH alone"),
)  # fmt: skip


@pytest.mark.parametrize(
    ("words", "expected"), USAGE, ids=[words for words, _ in USAGE]
)
def test_usage_errors(run, tmp_path, capsys, monkeypatch, words, expected):
    monkeypatch.chdir(tmp_path)
    assert run(*(("--store", "s") if words else ()), *words.split()) == 2
    err = " ".join(capsys.readouterr().err.split())
    assert expected in err
    assert "secret" not in err
    assert not (tmp_path / "s").exists()


def test_a_first_start_that_fails_leaves_no_file(run, tmp_path, monkeypatch):
    room = SimpleNamespace(f_bavail=1, f_frsize=4096)
    monkeypatch.setattr(os, "statvfs", lambda path: room)
    assert run("--store", tmp_path / "store", "--steps", 2) == 1
    assert not [*tmp_path.iterdir()]
