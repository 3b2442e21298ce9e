"""Tasks for fine-tuning, divided by file, and a table of two of them, made small."""

import json
from collections import Counter
from dataclasses import asdict
from pathlib import Path

import finetune_quality as quality
import finetune_results as tables
import finetune_tasks as tasks
import glue
import numpy as np
import pyarrow as pa
import pytest

from jaxinf.command_line import UsageError
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
        encoded = tokenizer.encode([("", key) for key in keys], is_whole=False)
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
    monkeypatch.setitem(quality.MODELS, "gpt2", quality.MODELS["gpt2"] | sizes)
    place = tmp_path / "place"

    def run(part):
        words = ["--seeds", 1, "--steps", 4, "--most", 200, "--layers", 1]
        words += ["--pretraining-steps", 3, "--part", part]
        quality.main(["run", str(place), *map(str, words)])

    for part in ("pretraining-gpt2", "inside"):
        run(part)
    results = place / "results.jsonl"
    before = results.read_text()
    run("inside")
    assert results.read_text() == before, "runs that are there are not repeated"
    lines = tables.read(results)
    assert len(lines) == 2
    held = len(tasks.read_task(place / "tasks", "inside", "validation"))
    assert sum(n for _, n in lines[0]["right"].values()) == held
    capsys.readouterr()
    quality.main(["table", str(place)])
    table = capsys.readouterr().out
    assert "| inside | gpt2 of 1, pretrained, 0.0005, 4 | 2 % | 1 | " in table
    assert "2 runs" in table
    config = quality.folder_of(place, "gpt2", 1) / "config.json"
    sent = [quality.sent_bytes(place, config, v) for v in ("dense", "top_k:0.02")]
    assert 0.005 < sent[1] / sent[0] < 0.025


@pytest.mark.parametrize(
    ("text", "expected"),
    [('{"version": 4, "run', "one that is cut"), ('{"version": 3}', "of version 4")],
)
def test_results_that_cannot_be_gone_on_with(tmp_path, text, expected):
    file = tmp_path / "results.jsonl"
    file.write_text(json.dumps({"version": 4}) + "\n" + text + "\n")
    with pytest.raises(SystemExit, match=f"results.jsonl:2: .*{expected}"):
        tables.read(Path(file))


def test_intervals_are_paired():
    """Files differ much more than two variants do on the same file."""
    rng = np.random.default_rng(0)
    files = [f"f{n}" for n in range(40)]
    hard = rng.integers(10, 100, len(files))
    base = {
        s: {f: [int(n), 100] for f, n in zip(files, hard, strict=True)} for s in (0, 1)
    }
    less = {
        s: {f: [n - 2, 100] for f, (n, _) in own.items()} for s, own in base.items()
    }
    mean, low, high = tables.interval(tables.difference(less, base))
    assert mean == pytest.approx(-2) == low == high
    mean, low, high = tables.interval(base)
    assert mean == pytest.approx(hard.mean())
    assert high - low > 5


def test_tables_of_given_counts(tmp_path, capsys):
    """A task is kept that pretraining makes better; it loses less than from scratch."""
    files = [f"f{n}" for n in range(20)]
    shares = {("pretrained", "dense"): 80, ("pretrained", "top_k:0.02"): 79}
    shares |= {("scratch", "dense"): 60, ("scratch", "top_k:0.02"): 50}

    def counts(share):
        return {file: [share + number % 3, 100] for number, file in enumerate(files)}

    linear = {"largest class": counts(10), "linear": counts(70)}
    lines: list[dict] = [{"baselines": "next", "right": linear}]
    runs = [("next", *key, share) for key, share in shares.items()]
    runs += [("inside", "pretrained", "dense", 50)]
    runs += [("inside", "pretrained", "top_k:0.02", 47)]
    runs = [(*run, 1.0) for run in runs]
    runs += [("next", "pretrained", "dense", 77, 3.0)]
    runs += [("next", "pretrained", "top_k:0.02", 83, 3.0)]
    for task, start, variant, share, factor in runs:
        run = tables.Run(task, variant, 0, 1, start=start, factor=factor)
        lines.append({"run": asdict(run), "right": counts(share)})
    results = tmp_path / "results.jsonl"
    results.write_text(
        "".join(json.dumps({"version": tables.VERSION} | one) + "\n" for one in lines)
    )
    quality.main(["table", str(tmp_path)])
    table = capsys.readouterr().out
    assert "| +10.00 [+10.00, +10.00] | +20.00 [+20.00, +20.00] | yes |" in table
    assert "| -1.00 [-1.00, -1.00], loses less than 1.35 |" in table
    assert "| -10.00 [-10.00, -10.00], loses more than 1.35 |" in table
    assert "1, 2 %, no feedback, 1 seeds: less dense -2.00 [-2.00, -2.00]" in table
    assert "0.0005, 2 %, no feedback: pretrained loses less by +9.00 [+9.00, " in table
    assert "0.0015, dense less the usual rate: -3.00 [-3.00, -3.00]" in table
    assert "at 0.0015 less dense at 0.0005: +3.00 [+3.00, +3.00]" in table


def write_tsv(path, *rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join("\t".join(row) + "\n" for row in rows))


def sentences(count, label=None):
    rows = [
        (f'a "film {n}', str(n % 2) if label is None else label) for n in range(count)
    ]
    return ("sentence", "label"), *rows


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        (
            (("sentence", "label"), ("good", "-1")),
            "dev.tsv:2: .* test splits have no la",
        ),
        ((("sentence", "label"), ("1", "good")), "found 'good'; .*the line is shifted"),
        (
            (("sentence", "label"), ("good",)),
            "dev.tsv:2: expected 2 columns .* found 1",
        ),
        ((("text", "label"), ("good", "1")), "found no sentence"),
        (None, "expected SST-2/dev.tsv, or split validation of sst2 .* found neither"),
    ],
)
def test_glue_that_is_refused(tmp_path, rows, expected):
    if rows:
        write_tsv(tmp_path / "SST-2/dev.tsv", *rows)
    with pytest.raises(UsageError, match=expected):
        list(glue.records(tmp_path, "SST-2", 0))


def test_glue_as_distributed(tmp_path):
    names = ("index", "sentence1", "sentence2", "gold_label")
    write_tsv(
        tmp_path / "MNLI/dev_mismatched.tsv", names, ("0", 'a "b', "c", "neutral")
    )
    [found] = glue.records(tmp_path, "MNLI", 1)
    assert found == {"text": 'a "b', "text_pair": "c", "label": 1}
    write_tsv(tmp_path / "SST-2/train.tsv", *sentences(300), ("broken",))
    assert len(list(glue.records(tmp_path, "SST-2", None))) == 300


def write_saved(folder, **splits):
    """Writes columns by split as `save_to_disk` of `datasets` does."""
    for split, columns in splits.items():
        table, part = pa.table(columns), folder / split
        part.mkdir(parents=True)
        with pa.ipc.new_stream(part / "data.arrow", table.schema) as out:
            out.write_table(table)
        state = {"_data_files": [{"filename": "data.arrow"}]}
        (part / "state.json").write_text(json.dumps(state))
        (part / "dataset_info.json").write_text("{}")
    (folder / "dataset_dict.json").write_text(json.dumps({"splits": [*splits]}))


def test_glue_as_saved(tmp_path):
    columns = {"premise": ["a"], "hypothesis": ["b"], "label": [2], "idx": [0]}
    write_saved(tmp_path / "mnli", train=columns, validation_mismatched=columns)
    expected = {"text": "a", "text_pair": "b", "label": 2}
    assert [*glue.records(tmp_path, "MNLI", None)] == [expected]
    assert [*glue.records(tmp_path, "MNLI", 1)] == [expected]
    with pytest.raises(
        UsageError, match=r"validation_matched of mnli .* found train, "
    ):
        list(glue.records(tmp_path, "MNLI", 0))
    write_saved(tmp_path / "sst2", train={"sentence": ["a"], "label": [-1]})
    with pytest.raises(UsageError, match="test splits have no la"):
        list(glue.records(tmp_path, "SST-2", None))


def test_glue_on_random_weights(tmp_path, capsys, monkeypatch):
    sizes = {"hidden_size": 32, "intermediate_size": 64}
    monkeypatch.setitem(quality.MODELS, "bert", quality.MODELS["bert"] | sizes)
    tasks.write_tokenizer(tmp_path / "tasks", ["words"])
    (tmp_path / "tasks/pretraining.txt").write_text("words " * 2000)
    quality.pretrain(tmp_path, "bert", 1, 1)
    folder = quality.folder_of(tmp_path, "bert", 1)
    names = ("sentence1", "sentence2", "gold_label")
    rows = [
        (f"one {n}", f"two {n}", glue.TASKS["MNLI"].labels[n % 3]) for n in range(9)
    ]
    for part in ("train", "dev_matched", "dev_mismatched"):
        write_tsv(tmp_path / f"glue/MNLI/{part}.tsv", names, *rows)
    for part in ("train", "dev"):
        write_tsv(tmp_path / f"glue/SST-2/{part}.tsv", *sentences(12))
    words = [tmp_path / "glue", "--from", folder / "weights", "--steps", 2]
    words += ["--seq-len", 32]
    words += ["--results", tmp_path / "results.jsonl", "--batch-size", 4]
    words += ["--task", "MNLI", "--task", "SST-2"]
    words += ["--variant", "dense", "--variant", "top_k:0.02"]
    for _ in range(2):
        glue.main([str(word) for word in words])
    lines = tables.read(tmp_path / "results.jsonl", glue.VERSION)
    assert [len(line["accuracy"]) for line in lines] == [2, 2, 1, 1]
