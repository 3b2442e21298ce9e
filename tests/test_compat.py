"""Private parts of JAX are where `jaxinf.compat` looks for them."""

import importlib
from types import SimpleNamespace

import jax
import pytest

from jaxinf import compat
from jaxinf.compat import processes

WITHOUT = """
import sys
sys.modules["jax.experimental.buffer_callback"] = None
import jax, jax.numpy as jnp, numpy as np, optax
import jaxinf
from jaxinf import compat
assert not compat.has_buffer_callback()
params = {"w": jnp.linspace(-1.0, 1.0, 5000), "b": jnp.ones(3)}
tx = optax.adamw(1e-2)
with jaxinf.open_store(sys.argv[1]) as store:
    near = jaxinf.smart_update(tx, store)
    apply = jax.jit(optax.apply_updates)
    mine, state = params, near.init(params)
    theirs, expected = params, tx.init(params)
    step, reference = jax.jit(near.update), jax.jit(tx.update)
    for number in range(3):
        gradients = jax.tree.map(lambda x: jnp.sin(x + number), params)
        updates, state = step(gradients, state, mine)
        mine = apply(mine, updates)
        updates, expected = reference(gradients, expected, theirs)
        theirs = apply(theirs, updates)
    store.wait()
    for left, right in zip(jax.tree.leaves(mine), jax.tree.leaves(theirs)):
        np.testing.assert_allclose(left, right, rtol=1e-6)
print("trained")
"""


@pytest.mark.long
def test_without_buffer_callback_gradients_come_with_copies(run_python, place):
    assert run_python(WITHOUT, place / "store").stdout == "trained\n"


@pytest.mark.skipif(jax.__version_info__ < (0, 10), reason="not looked at there")
def test_memory_is_registered_where_it_is_looked_for():
    assert compat.memory_registry(jax.devices()[0]) is None
    client = jax.devices()[0].client
    gpu = SimpleNamespace(platform="gpu", client=client)
    assert compat.memory_registry(gpu) is client


def test_the_coordination_service_is_where_it_is_looked_for():
    assert compat.coordination() is None  # this program is one process
    state = processes._distributed
    assert all(hasattr(state, n) for n in ("client", "process_id", "num_processes"))
    client = importlib.import_module("jax._src.lib")._jax.DistributedRuntimeClient
    used = "key_value_set blocking_key_value_get key_value_dir_get"
    assert not set(used.split()) - set(dir(client))
