"""A corpus and a model so small that a run takes a second or two."""

import contextlib
import json

import numpy as np
import pytest
from jaxinf_models import MODELS, GPT2Config
from jaxinf_models.bert import BertConfig
from jaxinf_models.bloom import BloomConfig
from jaxinf_models.llama import LlamaConfig
from jaxinf_models.t5 import T5Config
from jaxinf_models.vit import ViTConfig
from raw_stores import memory_directory

from jaxinf.train.__main__ import main

TINY = {
    "gpt2": GPT2Config(256, 16, num_layers=1, num_heads=2, num_features=16),
    "bert": BertConfig(1, 2, 16, 32, 257, 16),
    "bloom": BloomConfig(257, 1, 2, 16),
    "llama": LlamaConfig(257, 16, 1, 2, 2, 16, 32),
    "t5": T5Config(257, 1, 1, 2, 16, 8, 32),
    "vit": ViTConfig(1, 2, 16, 32, 8, 4, num_channels=1, num_labels=4),
}


def words_of(data):
    return ["--data", data, "--batch-size", 2, "--seq-len", 8]


@pytest.fixture
def tmp_path(place):
    """A directory in memory, so that commits wait for no drive."""
    return place


@pytest.fixture(scope="session")
def tiny():
    """Replaces the smallest preset of each family while the context lasts."""

    @contextlib.contextmanager
    def patched():
        with pytest.MonkeyPatch.context() as patch:
            for name, config in TINY.items():
                patch.setitem(MODELS[name].presets, "nano", config)
            yield TINY

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
    def read(log_dir, name="metrics.jsonl"):
        text = (log_dir / name).read_text()
        assert text.endswith("\n")
        return [json.loads(line) for line in text.splitlines()]

    return read


@pytest.fixture(scope="session")
def losses(lines):
    return lambda log_dir: [(line["step"], line["loss"]) for line in lines(log_dir)]


@pytest.fixture(scope="session")
def uninterrupted(run, losses):
    """Steps and losses of a run of 120 steps, in mode update, with the defaults."""
    with memory_directory() as root:
        assert run("--store", root / "store", "--steps", 120) == 0
        return losses(root / "store-log")
