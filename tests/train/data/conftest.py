"""Data so small that it can be written out."""

import json

import pytest

from jaxinf.train.config import TrainConfig
from jaxinf.train.data.images import load_images
from jaxinf.train.data.texts import load_texts


@pytest.fixture
def write(tmp_path):
    def call(name, content):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, list):
            content = "".join(json.dumps(record) + "\n" for record in content)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return call


@pytest.fixture
def load():
    """Loads data from paths, with arguments of `TrainConfig` and `load_texts`."""

    def call(*paths, task="causal-lm", seq_len=8, image_shape=None, **options):
        names = ("max_tokens", "num_types")
        own = {name: options.pop(name) for name in names if name in options}
        given = TrainConfig(data=tuple(str(path) for path in paths), **options)
        if image_shape is not None:
            return load_images(given, image_shape)
        return load_texts(given, task=task, seq_len=seq_len, **own)

    return call
