"""Evaluations before the first step, and every so many."""

import json

import jaxinf


def evaluated(log):
    lines = (log / "validation.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def test_before_the_first_step_and_every_so_many(run, tmp_path):
    words = ("--store", tmp_path / "store", "--eval-every", 2)
    assert run(*words, "--steps", 2) == 0
    assert run(*words, "--steps", 3) == 0
    found = evaluated(tmp_path / "store-log")
    assert [line["step"] for line in found] == [0, 2, 3]
    assert found[0]["loss"] > found[1]["loss"]
    with jaxinf.open_store(tmp_path / "store") as store:
        assert [one.name for one in store.checkpoints()] == ["best"]
