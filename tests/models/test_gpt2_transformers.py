"""Logits against the PyTorch GPT-2 of `transformers`, on the same random weights."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jaxinf_models import GPT2, GPT2Config, split

EXTRA = "needs the extra 'test-models': pip install 'jaxinf[test-models]'"
torch = pytest.importorskip("torch", reason=EXTRA)
transformers = pytest.importorskip("transformers", reason=EXTRA)

TOLERANCE = 1e-4
# Our names to theirs; a leading hN becomes transformer.h.N.
NAMES = {
    "attn/qkv/kernel": "attn.c_attn.weight",
    "attn/qkv/bias": "attn.c_attn.bias",
    "attn/proj/kernel": "attn.c_proj.weight",
    "attn/proj/bias": "attn.c_proj.bias",
    "mlp/up/kernel": "mlp.c_fc.weight",
    "mlp/up/bias": "mlp.c_fc.bias",
    "mlp/down/kernel": "mlp.c_proj.weight",
    "mlp/down/bias": "mlp.c_proj.bias",
    "ln_1/scale": "ln_1.weight",
    "ln_1/bias": "ln_1.bias",
    "ln_2/scale": "ln_2.weight",
    "ln_2/bias": "ln_2.bias",
    "ln_f/scale": "ln_f.weight",
    "ln_f/bias": "ln_f.bias",
    "wte": "wte.weight",
    "wpe": "wpe.weight",
}


def reference_model(config):
    """Built from a config made here: nothing is downloaded."""
    theirs = transformers.GPT2Config(
        vocab_size=config.vocab_size,
        n_positions=config.num_positions,
        n_embd=config.num_features,
        n_layer=config.num_layers,
        n_head=config.num_heads,
        bos_token_id=0,  # the default is beyond a vocabulary of bytes
        eos_token_id=0,
    )
    assert theirs.activation_function == "gelu_new"
    assert theirs.layer_norm_epsilon == 1e-5
    torch.manual_seed(0)
    return transformers.GPT2LMHeadModel(theirs).eval()


def their_name(path):
    first, _, rest = path.partition("/")
    if first[0] == "h" and first[1:].isdigit():
        return f"transformer.h.{first[1:]}.{NAMES[rest]}"
    return f"transformer.{NAMES[path]}"


def random_params(params):
    """Large enough that every term of the model shows in the logits."""
    rng = np.random.default_rng(0)

    def draw(path, leaf):
        noise = 0.2 * rng.standard_normal(leaf.shape, np.float32)
        return noise + 1 if path[-1].key == "scale" else noise

    return jax.tree_util.tree_map_with_path(draw, params)


def copy_into(reference, params):
    state = reference.state_dict()
    unseen = set(state) - {"lm_head.weight"}  # tied to transformer.wte.weight
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        name = their_name(jax.tree_util.keystr(path, simple=True, separator="/"))
        assert state[name].shape == leaf.shape, name
        state[name].copy_(torch.tensor(leaf))
        unseen.remove(name)
    assert not unseen


@pytest.mark.parametrize(
    "config",
    [
        GPT2Config(256, 64, num_layers=3, num_heads=4, num_features=32),
        GPT2Config(50257, 128, num_layers=2, num_heads=12, num_features=96),
    ],
    ids=["bytes", "published-vocabulary"],
)
def test_logits_agree(config):
    graphdef, params = split(GPT2(config, rngs=nnx.Rngs(0)))
    params = random_params(params)
    reference = reference_model(config)
    copy_into(reference, params)
    shape = (2, config.num_positions)
    tokens = np.random.default_rng(1).integers(0, config.vocab_size, shape)
    with torch.no_grad():
        theirs = reference(torch.tensor(tokens)).logits.numpy()
    ours = nnx.merge(graphdef, params)(jnp.asarray(tokens, jnp.int32))
    assert np.std(theirs) > 0.5  # else agreement would mean little
    np.testing.assert_allclose(ours, theirs, atol=TOLERANCE, rtol=0)
    print(f"largest difference: {np.max(np.abs(ours - theirs)):.2e}")
