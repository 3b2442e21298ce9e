"""Tasks for fine-tuning, divided by file, and a table of two of them, made small."""

from collections import Counter

import finetune_quality as quality
import finetune_tasks as tasks
import pytest

from jaxinf.train.data.files import standard_library_files
from jaxinf.train.data.tokenizer import open_tokenizer

pytestmark = pytest.mark.long

SIDES = ("train", "validation")


@pytest.fixture
def few_files(monkeypatch):
    """Modules of two packages in place of the whole library."""
    found = standard_library_files()
    few = [one for one in found if one.parent.name in ("asyncio", "email")]
    monkeypatch.setattr(tasks, "standard_library_files", lambda: few)


def test_tasks_are_divided_by_file_and_have_no_example_twice(few_files, tmp_path):
    tasks.make(tmp_path / "one")
    tasks.make(tmp_path / "two")
    for task in tasks.TASKS:
        sides = {side: tasks.read_task(tmp_path / "one", task, side) for side in SIDES}
        files = [{r["file"] for r in records} for records in sides.values()]
        assert not files[0] & files[1]
        keys = [tasks.key_of(r) for records in sides.values() for r in records]
        assert len({*keys}) == len(keys) > 100
        tokenizer = open_tokenizer(tmp_path / "one/gpt2")
        encoded = [tokenizer.encode("", key, is_whole=False) for key in keys]
        assert max(ids.size for ids in encoded) <= tasks.SEQ_LEN
        counts = Counter(r["label"] for r in sides["validation"])
        assert max(counts.values()) <= 4000 // len(counts)
        labels = {r["label"] for r in sides["validation"]}
        assert labels == {r["label"] for r in sides["train"]}
        for side, records in sides.items():
            assert tasks.read_task(tmp_path / "two", task, side) == records
            assert {("text_pair" in r) for r in records} == {task in tasks.PAIRS}
    text = (tmp_path / "one/pretraining.txt").read_text()
    held = next(f for f in tasks.functions() if tasks.side_of(f.file) == "validation")
    assert held.text not in text


def test_a_small_table(few_files, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(quality, "RATIOS", (0.02,))
    sizes = {"n_embd": 32}
    monkeypatch.setattr(quality, "MODEL", quality.MODEL | sizes)
    place = tmp_path / "place"

    def run(part):
        words = ["--seeds", 1, "--steps", 4, "--most", 200, "--layers", 1]
        words += ["--pretraining-steps", 3, "--part", part]
        quality.main(["run", str(place), *map(str, words)])

    monkeypatch.setattr(tasks, "TASKS", ("inside",))
    run("pretraining")
    run("tasks")
    results = place / "results.jsonl"
    before = results.read_text()
    run("tasks")
    assert results.read_text() == before, "runs that are there are not repeated"
    lines = quality.read(results)
    assert len(lines) == 2
    held = len(tasks.read_task(place / "tasks", "inside", "validation"))
    assert sum(n for _, n in lines[0]["right"].values()) == held
    capsys.readouterr()
    quality.main(["table", str(place)])
    table = capsys.readouterr().out
    assert "| inside | 1, pretrained, 4 | top_k:0.02,error_feedback=true | " in table
    assert "2 runs" in table
