"""Evaluations alone, and before the first step."""

import json
import re

import jaxinf


def evaluated(log):
    lines = (log / "validation.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def files_of(path):
    return {file.name: file.read_bytes() for file in path.iterdir()}


def test_before_the_first_step_and_every_so_many(run, tmp_path):
    words = ("--store", tmp_path / "store", "--eval-every", 2)
    assert run(*words, "--steps", 2) == 0
    assert run(*words, "--steps", 3) == 0
    found = evaluated(tmp_path / "store-log")
    assert [line["step"] for line in found] == [0, 2, 3]
    assert found[0]["loss"] > found[1]["loss"]
    with jaxinf.open_store(tmp_path / "store") as store:
        assert [one.name for one in store.checkpoints()] == ["best"]


def test_alone_it_changes_nothing_of_the_run(run, tmp_path, capsys):
    store, log = tmp_path / "store", tmp_path / "store-log"
    words = ("--store", store, "--eval-every", 2, "--validation", 0.03)
    assert run(*words, "--steps", 2) == 0
    (said,) = re.findall("^validation loss.*", capsys.readouterr().out, re.MULTILINE)
    before = files_of(log)
    assert run(*words, "--steps", 4, "--eval-only") == 0
    out = capsys.readouterr().out
    assert re.findall("^validation loss.*", out, re.MULTILINE) == [said]
    assert "compiling" not in out
    assert files_of(log) == before
    with jaxinf.open_store(store) as opened:
        assert opened.step == 2


def test_alone_it_needs_something_to_evaluate(run, tmp_path, capsys):
    assert run("--store", tmp_path / "store", "--eval-only") == 2
    assert "--eval-only: expected a run in" in capsys.readouterr().err
    assert not (tmp_path / "store").exists()
    assert run("--mode", "memory", "--eval-only") == 2
    assert "--eval-only: expected --from" in capsys.readouterr().err
