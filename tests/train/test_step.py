"""The program of a training step."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxinf_models import PRESETS, GPT2Config

from jaxinf.compat import all_equations
from jaxinf.train.config import TrainConfig
from jaxinf.train.step import gradients_of

SIZE = GPT2Config(256, 64, num_layers=4, num_heads=2, num_features=32)


def test_remat_computes_again_and_has_the_same_gradients(monkeypatch):
    monkeypatch.setitem(PRESETS, "nano", SIZE)
    tokens = jax.random.randint(jax.random.key(0), (4, 64), 0, 256)
    batch = {"tokens": tokens, "targets": jnp.roll(tokens, -1, 1)}
    found, products = [], []
    for policy in ("keep", "recompute"):
        config = TrainConfig(policy=policy)
        graphdef, like = config.abstract
        rng = np.random.default_rng(1)
        leaves, tree = jax.tree.flatten(like)
        drawn = [rng.normal(0, 0.1, x.shape).astype(np.float32) for x in leaves]
        params = jax.tree.unflatten(tree, drawn)
        function = gradients_of(config, graphdef)
        closed = jax.make_jaxpr(function)(params, batch)
        names = [eqn.primitive.name for eqn in all_equations(closed.jaxpr)]
        products.append(names.count("dot_general"))
        found.append(jax.jit(function)(params, batch))
    assert products[1] > 1.2 * products[0]  # XLA of a CPU saves no memory by it
    for one, other in zip(*map(jax.tree.leaves, found), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)
