"""A corpus and a model so small that a run takes a second or two."""

import contextlib
import json

import numpy as np
import pytest
from jaxinf_models import PRESETS, GPT2Config
from raw_stores import memory_directory

from jaxinf.train.__main__ import main

TINY = GPT2Config(256, 16, num_layers=1, num_heads=2, num_features=16)


def words_of(data):
    return ["--data", data, "--batch-size", 2, "--seq-len", 8]


@pytest.fixture
def tmp_path(place):
    """A directory in memory, so that commits wait for no drive."""
    return place


@pytest.fixture(scope="session")
def tiny():
    """Replaces the default preset while the context lasts."""

    @contextlib.contextmanager
    def patched():
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(PRESETS, "nano", TINY)
            yield

    return patched


@pytest.fixture(scope="session")
def text(tmp_path_factory):
    """A file of some 20 kB with structure to learn."""
    rng = np.random.default_rng(0)
    words = ["def ", "return ", "self.", "x = ", "(a, b)", "\n    ", "None", "\n"]
    path = tmp_path_factory.mktemp("text") / "words.txt"
    path.write_text("".join(rng.choice(words, 5000)))
    return path


@pytest.fixture(scope="session")
def run(text, tiny):
    """Runs the trainer in this process on a tiny model; returns the exit status."""

    def call(*words, data=text):
        with tiny():
            return main([str(word) for word in [*words_of(data), *words]])

    return call


@pytest.fixture(scope="session")
def lines():
    """Reads a log directory's `metrics.jsonl`."""

    def read(log_dir):
        text = (log_dir / "metrics.jsonl").read_text()
        assert text.endswith("\n")
        return [json.loads(line) for line in text.splitlines()]

    return read


@pytest.fixture(scope="session")
def losses(lines):
    """Reads steps and losses, in the file's order."""
    return lambda log_dir: [(line["step"], line["loss"]) for line in lines(log_dir)]


@pytest.fixture(scope="session")
def uninterrupted(run, losses):
    """Steps and losses of a run of 120 steps, in mode update, with the defaults."""
    with memory_directory() as root:
        assert run("--store", root / "store", "--steps", 120) == 0
        return losses(root / "store-log")
