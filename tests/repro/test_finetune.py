"""Tasks for fine-tuning, divided by file, and a table of two of them, made small."""

import finetune_quality as quality
import finetune_tasks as tasks
import pytest

from jaxinf.train.data.files import standard_library_files

pytestmark = pytest.mark.long


@pytest.fixture
def few_files(monkeypatch):
    """Modules of two packages in place of the whole library."""
    found = standard_library_files()
    few = [one for one in found if one.parent.name in ("asyncio", "email")]
    monkeypatch.setattr(tasks, "standard_library_files", lambda: few)


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
