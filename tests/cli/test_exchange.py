"""``jaxinf checkpoint export STORE``."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import safetensors.numpy

import jaxinf
from jaxinf.cli import main

PARAMS = {"w": jnp.arange(6000.0).reshape(60, 100), "b": jnp.ones(3)}


@pytest.fixture
def store(tmp_path):
    """A closed store at step 2, with a checkpoint of step 1."""
    params = PARAMS
    with jaxinf.open_store(tmp_path / "store") as opened:
        tx = jaxinf.smart_update(optax.adam(0.1), opened)
        state = tx.init(params)
        for _ in range(2):
            updates, state = tx.update(params, state, params)
            params = optax.apply_updates(params, updates)
            if opened.step == 1:
                opened.checkpoint()
    return tmp_path / "store"


def master(path):
    with jaxinf.open_store(path) as opened:
        return opened.step, opened.params(like=PARAMS)


def same(one, other):
    jax.tree.map(np.testing.assert_array_equal, one, other)
    return True


def test_params_for_others(store, tmp_path, capsys):
    words = ["checkpoint", "export", str(store)]
    for url in (f"file://{tmp_path}/out", "s3://bucket/out"):
        assert main([*words, url, "--format", "safetensors"]) == 2
        assert "expected a directory, found a URL" in capsys.readouterr().err
    assert main([*words, str(tmp_path / "out"), "--average"]) == 2
    assert "--average goes with --format" in capsys.readouterr().err
    assert main([*words, str(tmp_path / "out"), "--format", "safetensors"]) == 0
    found = safetensors.numpy.load_file(tmp_path / "out" / "model.safetensors")
    assert same(found, master(store)[1])


def test_a_new_store_is_as_it_was(store, tmp_path):
    kept = str(store / "checkpoints" / "1")
    (store / "tokenizer").mkdir()
    (store / "tokenizer/vocab.txt").write_text("words")
    assert main(["store", "copy", kept, str(tmp_path / "new")]) == 0
    assert (tmp_path / "new/tokenizer/vocab.txt").read_text() == "words"
    assert master(tmp_path / "new")[0] == 1
