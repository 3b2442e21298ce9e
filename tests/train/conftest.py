"""A corpus and a model so small that a run takes a second or two."""

import json

import numpy as np
import pytest
from jaxinf_models import PRESETS, GPT2Config

from jaxinf.train.__main__ import main

TINY = GPT2Config(256, 16, num_layers=1, num_heads=2, num_features=16)


@pytest.fixture
def text(tmp_path):
    """A file of some 20 kB with structure to learn."""
    rng = np.random.default_rng(0)
    words = ["def ", "return ", "self.", "x = ", "(a, b)", "\n    ", "None", "\n"]
    path = tmp_path / "text" / "words.txt"
    path.parent.mkdir()
    path.write_text("".join(rng.choice(words, 5000)))
    return path


@pytest.fixture
def run(text, monkeypatch):
    """Runs the trainer in this process on a tiny model; returns the exit status."""
    monkeypatch.setitem(PRESETS, "nano", TINY)

    def call(*words, data=text):
        fixed = ["--data", data, "--batch-size", 2, "--seq-len", 8, "--sample-bytes", 8]
        return main([str(word) for word in [*fixed, *words]])

    return call


def lines(log_dir):
    """What `metrics.jsonl` holds."""
    text = (log_dir / "metrics.jsonl").read_text()
    assert text.endswith("\n")
    return [json.loads(line) for line in text.splitlines()]


def losses(log_dir):
    """By step, in the file's order."""
    return [(line["step"], line["loss"]) for line in lines(log_dir)]
