"""``jaxinf checkpoint export STORE``."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
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


def test_a_checkpoint_by_name(store, tmp_path):
    out = str(tmp_path / "out")
    command = ["checkpoint", "export", str(store), out, "--checkpoint", "1"]
    assert main(command) == 0
    with ocp.StandardCheckpointer() as checkpointer:
        exported = checkpointer.restore(tmp_path / "out")
        kept = checkpointer.restore((store / "checkpoints" / "1").resolve())
    assert same(exported, kept)


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


@pytest.mark.parametrize("state", ["bf16", "int8"])
def test_a_checkpoint_of_state_in_fewer_bits(tmp_path, state):
    with jaxinf.open_store(tmp_path / "store", state=state) as opened:
        tx = jaxinf.smart_update(optax.adam(0.1), opened)
        tx.update(PARAMS, tx.init(PARAMS), PARAMS)
        opened.checkpoint()
        mu = opened.read("mu", "w")
    kept, new = str(tmp_path / "store/checkpoints/1"), str(tmp_path / "new")
    assert main(["store", "copy", kept, new]) == 0
    assert main(["verify", new]) == 0
    with jaxinf.open_store(new) as opened:
        np.testing.assert_array_equal(opened.read("mu", "w"), mu)
