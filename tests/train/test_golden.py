"""A run that an earlier version trained goes on as that version went on.

``tests/golden/trained.tar.gz`` holds the store after 3 steps, its data, and
``record.json``: the losses of all 6 steps, and who wrote it. The next losses show that
the run's own settings and its place in the data are read; they agree to some digits, as
sums of floats depend on the CPU. If they were meant to change, say so in the changelog,
and write the store anew: ``python tests/train/test_golden.py``.
"""

import json
import sys
import tarfile
import tempfile
from pathlib import Path

import numpy as np
import pytest
from jaxinf_models import PRESETS, GPT2Config

import jaxinf
from jaxinf.train.__main__ import main

GOLDEN = Path(__file__).parents[1] / "golden" / "trained.tar.gz"
TINY = GPT2Config(256, 16, num_layers=1, num_heads=2, num_features=16)
WORDS = ["the ", "drive ", "of ", "a ", "model ", "step ", "and ", "Größe ", "\n"]
SETTINGS = "--batch-size 2 --seq-len 16 --learning-rate 0.03 --schedule cosine "
SETTINGS += "--warmup-steps 1 --seed 7 --validation 0.2"


def trained(place, *words):
    files = [*SETTINGS.split()]
    files += ["--store", place / "store", "--log-dir", place / "log"]
    files += ["--data", place / "data.jsonl"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(PRESETS, "nano", TINY)
        return main([str(word) for word in [*files, *words]])


def losses(place):
    lines = (place / "log" / "metrics.jsonl").read_text().splitlines()
    return {line["step"]: line["loss"] for line in map(json.loads, lines)}


def unpacked(place):
    with tarfile.open(GOLDEN) as archive:
        archive.extractall(place, filter="data")
    return json.loads((place / "record.json").read_text())


def make(place):
    draw = np.random.default_rng(3)
    texts = ["".join(draw.choice(WORDS, draw.integers(2, 40))) for _ in range(40)]
    lines = [json.dumps({"text": text}) for text in texts]
    (place / "data.jsonl").write_text("\n".join(lines))
    assert trained(place, "--steps", 3) == 0
    for lock in (place / "store").glob("*lock"):  # they name a process
        lock.unlink()
    with tarfile.open(GOLDEN, "w:gz") as archive:
        archive.add(place / "store", "store")
        archive.add(place / "data.jsonl", "data.jsonl")
        assert trained(place, "--steps", 6) == 0
        record = {"jaxinf": jaxinf.__version__, "losses": losses(place)}
        (place / "record.json").write_text(json.dumps(record))
        archive.add(place / "record.json", "record.json")


def test_the_golden_run_goes_on_from_its_step_and_batch(tmp_path, capsys):
    record = unpacked(tmp_path)
    assert trained(tmp_path, "--steps", 6) == 0
    assert "resuming at step 3" in capsys.readouterr().out
    found = losses(tmp_path)
    assert [*found] == [4, 5, 6]
    for step, loss in found.items():
        assert loss == pytest.approx(record["losses"][str(step)], rel=1e-4), step


def test_the_golden_run_goes_on_with_no_other_data(tmp_path, capsys):
    unpacked(tmp_path)
    data = tmp_path / "data.jsonl"
    data.write_text(data.read_text().replace("drive", "Drive", 1))
    assert trained(tmp_path, "--steps", 6) == 1
    assert "--data: the run has" in capsys.readouterr().err


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        make(Path(folder))
    print(f"written: {GOLDEN}, {GOLDEN.stat().st_size} bytes", file=sys.stderr)
