"""Published weights in a loop of one's own, there and back."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from hub_folders import export, write_folder
from jaxinf_models import LlamaConfig, abstract_params, pretrained
from safetensors.numpy import load_file, save_file
from small_tokenizers import byte_level

import jaxinf
from jaxinf.cli import main
from jaxinf.typing import DeferredArray

TOKENS = np.arange(12).reshape(2, 6)


LLAMA = LlamaConfig(260, 64, 1, 2, 2, 16, 16)


@pytest.fixture
def folder(place):
    write_folder(place / "hf", LLAMA, np.float32, num_files=1)
    byte_level(place / "hf", "<s>", "</s>", bos_token="<s>", eos_token="</s>")
    return place / "hf"


def test_params_are_read_leaf_by_leaf_and_the_function_is_the_models(folder):
    model = pretrained(folder)
    leaves = jax.tree.leaves(model.params)
    assert all(isinstance(leaf, DeferredArray) for leaf in leaves)
    assert jax.tree.structure(model.shapes) == jax.tree.structure(model.params)
    params = jax.tree.map(jnp.asarray, model.params)
    tensors = load_file(folder / "model.safetensors")
    found = params["h0"]["attn"]["q"]["kernel"]
    name = "model.layers.0.self_attn.q_proj.weight"
    np.testing.assert_array_equal(found, tensors[name].T)
    graphdef, _ = abstract_params(model.config)
    expected = nnx.merge(graphdef, params)(TOKENS)
    found = jax.jit(model.apply)(params, TOKENS)
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    assert found.shape == (2, 6, 260)


@pytest.mark.parametrize("way", ["update", "stream"])
def test_own_loss_and_back(folder, place, way):
    model = pretrained(folder)

    def own_loss(params, tokens):
        logits = model.apply(params, tokens)
        return -jnp.mean(jax.nn.log_softmax(logits)[..., 0])

    tx = optax.sgd(0.1)
    expected = jax.tree.map(jnp.asarray, model.params)
    grads = jax.grad(own_loss)(expected, TOKENS)
    expected = jax.tree.map(lambda p, g: p - 0.1 * g, expected, grads)
    with jaxinf.open_store(place / "s") as store:
        if way == "stream":
            step = jaxinf.stream(own_loss, tx, store, memory_bytes="256MiB")
            step.load(model.params, batch=TOKENS)
            step(TOKENS)
            step.close()
        else:
            tx = jaxinf.smart_update(tx, store)
            state = tx.init(model.params)
            params = store.params(like=model.shapes)
            grads = jax.grad(own_loss)(params, TOKENS)
            _, state = jax.jit(tx.update)(grads, state, params)
            store.wait(state)
    assert export(place / "s", place / "out", "--like", folder) == 0
    again = pretrained(place / "out")
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6),
        jax.tree.map(np.asarray, again.params),
        jax.tree.map(np.asarray, expected),
    )
    assert again.config == model.config
    name = "tokenizer.json"
    assert (place / "out" / name).read_bytes() == (folder / name).read_bytes()


def test_other_folders_are_refused(folder, place, capsys):
    model = pretrained(folder)
    with jaxinf.open_store(place / "s") as store:
        jaxinf.smart_update(optax.sgd(0.1), store).init(model.params)
    write_folder(place / "other", LLAMA, np.float32, num_files=1)
    file = place / "other" / "model.safetensors"
    tensors = load_file(file)
    bias = tensors.pop("model.norm.weight")
    save_file({**tensors, "model.layers.0.self_attn.q_proj.bias": bias}, file)
    assert export(place / "s", place / "out", "--like", place / "other") == 1
    error = capsys.readouterr().err
    assert "model.norm.weight: missing" in error
    assert "q_proj.bias: not a tensor of this model" in error
    assert not (place / "out").exists()
    assert export(place / "s", place / "out") == 1
    assert "--like" in capsys.readouterr().err
    words = ("checkpoint", "export", place / "s", place / "o", "--like", folder)
    assert main([str(word) for word in words]) == 2
    assert "--like goes with --format huggingface" in capsys.readouterr().err
    with pytest.raises(ValueError, match="task seq2seq: expected one of llama's"):
        pretrained(folder, "seq2seq")
