"""A trained store for reading, and command lines run in this process."""

import json
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import small_stores

from jaxinf.cli import main


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    path = tmp_path_factory.mktemp("trained") / "store"
    normal = np.random.default_rng(0).standard_normal
    kernel = jnp.asarray(normal((300, 128)), jnp.float32)
    bias = jnp.asarray(normal(129), jnp.float16)
    params = {"h": {"0": {"kernel": kernel, "bias": bias}}, "scale": jnp.float32(1.5)}
    with small_stores.open_store(path, chunk_elements=8192) as store:
        sines = [lambda params: jax.tree.map(jnp.sin, params)] * 3
        *_, state = small_stores.train(store, optax.adamw(1e-3), params, sines)
        store.wait(state)
    return path


@pytest.fixture
def run(capsys):
    def call(*words):
        capsys.readouterr()
        try:
            status = main([str(word) for word in words])
        except SystemExit as end:
            status = end.code
        return SimpleNamespace(status=status, **capsys.readouterr()._asdict())

    return call


@pytest.fixture
def run_json(run):
    def call(*words, status=0):
        result = run(*words, "--json")
        assert result.status == status, result.err
        return json.loads(result.out)

    return call
