"""The transform's state, read by optax's names."""

import copy
import pickle

import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from small_stores import train

import jaxinf

PARAMS = {"w": jnp.ones((40, 3)), "deep": [jnp.zeros((3,)), jnp.asarray(1.5)]}
GRADIENTS = jax.tree.map(lambda x: jnp.full_like(x, 0.5), PARAMS)


def start(store, tx, num_steps=0):
    return train(store, tx, PARAMS, [GRADIENTS] * num_steps)


@pytest.mark.long
def test_hyperparams_are_read_and_set_as_in_optax(open_store):
    adam = optax.inject_hyperparams(optax.adam)(learning_rate=1e-2)
    tx, params, state = start(open_store(), adam)
    assert float(state.hyperparams["learning_rate"]) == pytest.approx(1e-2)
    state.hyperparams["learning_rate"] = jnp.asarray(0.0)
    updates, state = jax.jit(tx.update)(GRADIENTS, state, params)
    assert not any(np.any(u) for u in jax.tree.leaves(updates))
    state = optax.tree_utils.tree_set(state, learning_rate=jnp.asarray(0.25))
    assert float(state.hyperparams["learning_rate"]) == 0.25


def test_hyperparams_that_are_injected_around_the_store(open_store):
    store = open_store()
    tx = optax.inject_hyperparams(
        lambda learning_rate: jaxinf.smart_update(optax.adam(learning_rate), store)
    )(learning_rate=1e-2)
    params, state = PARAMS, tx.init(PARAMS)
    update = jax.jit(tx.update)
    for rate in (1e-2, 0.5):
        state.hyperparams["learning_rate"] = jnp.float32(rate)
        updates, state = update(GRADIENTS, state, params)
        params = optax.apply_updates(params, updates)
        np.testing.assert_allclose(updates["w"], -rate, rtol=1e-3)


def test_stored_arrays_have_optax_s_names_and_shapes(open_store):
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))
    _, _, state = start(open_store(state="int8"), tx, 2)
    assert int(optax.tree_utils.tree_get(state, "count")) == 2
    assert callable(state.count)  # a tuple's method, which no field can replace
    mu = optax.tree_utils.tree_get(state, "mu")
    for found, like in ((mu["w"], PARAMS["w"]), (mu["deep"][1], PARAMS["deep"][1])):
        assert (found.shape, found.dtype) == (like.shape, like.dtype)
    assert repr(mu["deep"][0]) == "StoredArray(mu of deep/0)"
    for use in (np.asarray, jnp.sum, lambda x: x == 0, lambda x: x.sum()):
        with pytest.raises(jaxinf.StoreError, match="mu of leaf w is in the store"):
            use(mu["w"])
    with pytest.raises(AttributeError, match=r"'hyperparams'; .*tree_get\(state, "):
        _ = state.hyperparams
    for protocol in ("__array__", "__jax_array__", "_asdict_"):
        assert not hasattr(state, protocol)
    # JAX holds nothing of them: three counters of ours, one of optax.
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(state))
    assert len(jax.tree.leaves(state)) == 3
    changed = optax.tree_utils.tree_set(state, count=jnp.int32(7))
    assert jax.tree.structure(changed) == jax.tree.structure(state)
    assert int(optax.tree_utils.tree_get(changed, "count")) == 7


def test_states_pass_through_other_tools(open_store, place):
    tx, params, state = start(open_store(), optax.adam(1e-2), 2)
    fresh = jax.tree.map(jnp.zeros_like, state)
    parts = [
        pickle.loads(pickle.dumps(state)),
        copy.deepcopy(state),
        flax.serialization.from_bytes(fresh, flax.serialization.to_bytes(state)),
    ]
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(place / "kept", state)
        checkpointer.wait_until_finished()
        parts.append(checkpointer.restore(place / "kept", fresh))
    for part in parts:
        assert jax.tree.structure(part) == jax.tree.structure(state)
        jax.tree.map(np.testing.assert_array_equal, part, state)
    updates, _ = tx.update(GRADIENTS, parts[-1], params)
    assert jax.tree.structure(updates) == jax.tree.structure(PARAMS)


def test_a_function_of_stored_state_is_refused_with_the_line_to_write(open_store):
    _, _, state = start(open_store(), optax.adam(1e-2), 2)
    with pytest.raises(jaxinf.JaxinfError, match=r"store\.state\(like="):
        optax.tree.norm(optax.tree.get(state, "mu"))
