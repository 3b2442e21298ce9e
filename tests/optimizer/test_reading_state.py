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

import jaxinf

PARAMS = {"w": jnp.ones((40, 3)), "deep": [jnp.zeros((3,)), jnp.asarray(1.5)]}
GRADIENTS = jax.tree.map(lambda x: jnp.full_like(x, 0.5), PARAMS)


def start(store, tx, num_steps=0):
    tx = jaxinf.smart_update(tx, store)
    params, state = PARAMS, tx.init(PARAMS)
    update = jax.jit(tx.update)
    for _ in range(num_steps):
        updates, state = update(GRADIENTS, state, params)
        params = optax.apply_updates(params, updates)
    return tx, params, state


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


@pytest.mark.long
def test_the_sum_of_accumulation_is_read_from_the_store(open_store):
    store = open_store()
    _, _, state = start(store, optax.MultiSteps(optax.adam(1e-2), 2), 1)
    store.wait(state)
    sums = state.acc_grads
    assert sums["w"].shape == (40, 3)
    np.testing.assert_array_equal(store.read("acc_grads", "w"), GRADIENTS["w"])
    said = r"acc_grads of leaf w is in the store, .* store.read\('acc_grads', 'w'"
    operations = [np.asarray, lambda x: np.float32(2) * x, lambda x: x.T, jnp.sum]
    operations += [lambda x: x == 0, lambda x: x != jnp.zeros(x.shape)]
    for operation in (jnp.linalg.norm, optax.tree.norm, *operations):
        with pytest.raises(jaxinf.JaxinfError, match=said):
            operation(sums["w"])
        with pytest.raises(jaxinf.JaxinfError, match=said):
            jax.jit(lambda s, f=operation: f(s.acc_grads["w"]))(state)
        with pytest.raises(jaxinf.JaxinfError, match="is in the store"):
            jax.tree.map(operation, sums)
    for operation in (lambda x: 2 * x, lambda x: x[0], float, len):
        with pytest.raises(TypeError):
            operation(sums["w"])


def test_counts_are_found_by_tree_get(open_store):
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))
    _, _, state = start(open_store(), tx, 2)
    assert int(optax.tree_utils.tree_get(state, "count")) == 2
    assert callable(state.count)  # a tuple's method, which no field can replace


def test_an_attribute_that_there_is_not(open_store):
    _, _, state = start(open_store(), optax.adamw(1e-2))
    with pytest.raises(AttributeError, match=r"'hyperparams'; .*tree_get\(state, "):
        _ = state.hyperparams
    for protocol in ("__array__", "__jax_array__", "_asdict_"):
        assert not hasattr(state, protocol)


def test_a_stored_array_has_the_shape_and_the_dtype_of_optax(open_store):
    _, _, state = start(open_store(state="int8"), optax.adam(1e-2), 2)
    mu = optax.tree_utils.tree_get(state, "mu")
    for found, like in ((mu["w"], PARAMS["w"]), (mu["deep"][1], PARAMS["deep"][1])):
        assert (found.shape, found.dtype) == (like.shape, like.dtype)
    assert repr(mu["deep"][0]) == "StoredArray(mu of deep/0)"


def test_jax_holds_nothing_of_stored_arrays(open_store):
    store = open_store()
    _, _, state = start(store, optax.adam(1e-2), 2)
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(state))
    assert len(jax.tree.leaves(state)) == 4  # three counters of ours, one of optax
    changed = optax.tree_utils.tree_set(state, count=jnp.int32(7))
    assert jax.tree.structure(changed) == jax.tree.structure(state)
    assert int(optax.tree_utils.tree_get(changed, "count")) == 7


def test_the_tree_is_the_same_from_every_init(open_store):
    tx = jaxinf.smart_update(optax.adam(1e-2), open_store())
    abstract = jax.eval_shape(tx.init, PARAMS)
    traced = jax.jit(tx.init)(PARAMS)
    eager = tx.init(PARAMS)
    again = jaxinf.smart_update(
        optax.adam(1e-2), open_store(), on_existing="restart"
    ).init(PARAMS)
    for other in (traced, eager, again):
        assert jax.tree.structure(other) == jax.tree.structure(abstract)


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


def test_map_params_maps_what_is_like_the_params(open_store):
    tx = jaxinf.smart_update(
        optax.adam(1e-2),
        open_store(),
        compress=jaxinf.top_k(0.5, error_feedback=True),
    )
    state = tx.init(PARAMS)
    mapped = optax.tree.map_params(tx, lambda x: x + 1, state)
    assert jax.tree.structure(mapped) == jax.tree.structure(state)
    assert int(mapped.step) == 0
    for leaf in jax.tree.leaves(mapped.error_feedback):
        np.testing.assert_array_equal(leaf, 1)
