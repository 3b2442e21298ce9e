"""Refusals of `smart_update`: their messages, and that nothing is lost."""

from functools import partial
from types import SimpleNamespace

import callback_form
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from small_stores import same

import jaxinf

PARAMS = {"w": jnp.ones((300, 20)), "b": jnp.zeros((20,))}
GRADIENTS = jax.tree.map(lambda x: jnp.full_like(x, 0.5), PARAMS)
ADAM = optax.adam(1e-2)


def with_nan(tree):
    return {**tree, "b": tree["b"].at[3].set(jnp.nan)}


def start(store, tx=ADAM, **options):
    tx = jaxinf.smart_update(tx, store, **options)
    return tx, tx.init(PARAMS)


def apply(tx, gradients, state, params=PARAMS):
    updates, state = jax.jit(tx.update)(gradients, state, params)
    return optax.apply_updates(params, updates), state


def committed(store):
    return jax.tree.map(np.asarray, store.params(like=PARAMS))


# --- NaN -----------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["buffer", "start"])
def test_nan_gradient_is_refused_and_nothing_committed(open_store, monkeypatch, form):
    callback_form.use(form, monkeypatch)
    store = open_store()
    tx, state = start(store)
    params, state = apply(tx, GRADIENTS, state)
    before = committed(store)
    with pytest.raises(jax.errors.JaxRuntimeError, match="NaN or Inf in the gradient"):
        jax.block_until_ready(apply(tx, with_nan(GRADIENTS), state, params))
    with pytest.raises(jaxinf.NonFiniteGradientError, match=r"step 2: .*ent of b"):
        store.check()
    with pytest.raises(jaxinf.NonFiniteGradientError):
        store.params(like=PARAMS)
    store.close()  # does not raise what JAX has raised
    again = open_store()
    assert again.step == 1
    same(committed(again), before)
    tx, state = start(again)
    with pytest.raises(jaxinf.NonFiniteGradientError):  # by its type, without jit
        tx.update(with_nan(GRADIENTS), state, again.params(like=PARAMS))


def test_nonfinite_skip_counts_and_goes_on(open_store):
    store = open_store()
    tx, state = start(store, nonfinite="skip")
    params, state = apply(tx, GRADIENTS, state)
    for _ in range(2):
        updates, state = jax.jit(tx.update)(with_nan(GRADIENTS), state, params)
        assert not any(np.any(u) for u in jax.tree.leaves(updates))
    assert (int(state.step), int(state.skipped_steps), store.step) == (1, 2, 1)
    params, state = apply(tx, GRADIENTS, state, params)
    store.wait(state)
    assert (store.step, store.skipped_steps) == (2, 2)
    p, s = PARAMS, ADAM.init(PARAMS)
    for _ in range(2):
        u, s = ADAM.update(GRADIENTS, s, p)
        p = optax.apply_updates(p, u)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), params, p)


def test_apply_if_finite_has_its_own_rule(open_store):
    plain = optax.apply_if_finite(ADAM, 2)
    tx, state = start(open_store("other"), plain)
    with pytest.raises(jaxinf.NonFiniteGradientError, match=r'"allow" around an opti'):
        tx.update(with_nan(GRADIENTS), state, PARAMS)
    tx, state = start(open_store(durability=3), plain, nonfinite="allow")
    params, expected, held = PARAMS, PARAMS, plain.init(PARAMS)
    for is_bad in (False, True, True, False, True, True, True, False):
        gradients = with_nan(GRADIENTS) if is_bad else GRADIENTS
        params, state = apply(tx, gradients, state, params)
        updates, held = jax.jit(plain.update)(gradients, held, expected)
        expected = optax.apply_updates(expected, updates)
        jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5), params, expected)
        assert int(state.notfinite_count) == int(held.notfinite_count)
    assert np.isnan(np.asarray(params["b"])).any()  # the third in turn is accepted
    assert int(state.step) == 8


@pytest.mark.parametrize(
    ("nonfinite", "durability", "name"),
    [("error", "step", "hyperparams/learning_rate"), ("skip", 3, "leaf [wb]")],
)
def test_a_nan_learning_rate_is_refused_by_name(
    open_store, nonfinite, durability, name
):
    store = open_store(durability=durability)
    adam = optax.inject_hyperparams(optax.adam)(learning_rate=1e-2)
    tx, state = start(store, adam, nonfinite=nonfinite)
    params, state = apply(tx, GRADIENTS, state)
    state.hyperparams["learning_rate"] = jnp.float32(np.nan)
    with pytest.raises(jaxinf.NonFiniteScalarError, match=f"step 2: .* NaN .*{name}"):
        tx.update(GRADIENTS, state, params)
    store.close()
    assert open_store().step == 1


def test_an_error_on_a_tpu_is_reported(open_store, monkeypatch):
    """Results of a call that raises are not filled there."""
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    store = open_store()
    tx, state = start(store)
    updates = jax.jit(lambda g: tx.update(g, state, PARAMS)[0])(with_nan(GRADIENTS))
    assert all(np.isnan(leaf).all() for leaf in jax.tree.leaves(updates))
    with pytest.raises(jaxinf.NonFiniteGradientError):
        store.check()


# --- what does not fit ----------------------------------------------------------------


PLATEAU = optax.chain(optax.adamw(1e-2), optax.contrib.reduce_on_plateau())
REFUSED = {
    "reduction": (optax.lamb(1e-3), PARAMS, {}, "reduce_sum"),
    "argument": (PLATEAU, PARAMS, {}, r"'value'.*extra_args=\{\"value\": 0\.0\}.*, v"),
    "number": (ADAM, {"a": [1.0]}, {}, r"params/a.*: expected an array, found float"),
    "key": (ADAM, {"\ud800": PARAMS["b"]}, {}, "rename the key in the params tree"),
    "nonfinite": (ADAM, PARAMS, {"nonfinite": "maybe"}, ".maybe.: expected one of"),
    "updates": (ADAM, PARAMS, {"updates": "bfloat16"}, "expected one of .gradient"),
    "existing": (ADAM, PARAMS, {"on_existing": "anew"}, "expected one of 'resume'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_before_there_is_a_store(open_store, place, name):
    tx, params, options, message = REFUSED[name]
    errors = TypeError, ValueError, jaxinf.UnsupportedTransformError
    with pytest.raises(errors, match=message):
        jaxinf.smart_update(tx, open_store(), **options).init(params)
    assert not (place / "store").exists()


OTHERS = {
    r"leaf b: shape \(20,\), .* in the store, ": {**PARAMS, "b": jnp.zeros(21)},
    "leaf b: .* params float32, .* in the store, .* params bfloat16, ": {
        **PARAMS, "b": jnp.zeros(20, jnp.bfloat16)
    },
    "leaf b: .* in the store, none given": {"w": PARAMS["w"]},
    "leaf c: none in the store, ": {**PARAMS, "c": jnp.ones(3)},
    "one store per init": {"other": jnp.ones(3)},
}  # fmt: skip


def test_another_tree(open_store):
    """By `init`; and by `update`, while it is traced, so that the run may go on."""
    store = open_store()
    tx, state = start(store)
    for message, other in OTHERS.items():
        with pytest.raises(jaxinf.StoreMismatchError, match=message):
            tx.init(other)
        with pytest.raises(jaxinf.StoreMismatchError):
            jax.eval_shape(tx.update, other, state, other)
    wrong = {**GRADIENTS, "b": jnp.zeros(21)}
    with pytest.raises(ValueError, match=r"leaf b: expected a gradient of .*\(20,\)"):
        jax.eval_shape(tx.update, wrong, state, PARAMS)
    store.check()
    _, state = tx.update(GRADIENTS, state, PARAMS)
    assert int(state.step) == 1


def test_another_optimizer(open_store):
    store = open_store()
    start(store)
    for tx, message in (
        (optax.sgd(0.1, momentum=0.9), r"states .*mu float32.* in the store"),
        (optax.adamw(1e-2), r"other equations:(.|\n)*into a new store"),
    ):
        with pytest.raises(jaxinf.StoreMismatchError, match=message):
            start(store, tx)
    assert int(start(store, optax.adam(5e-4))[1].step) == 0  # another rate is none


def test_a_state_of_something_else(open_store):
    tx = jaxinf.smart_update(ADAM, open_store("without a step"))
    zeros = jax.tree.map(jnp.zeros_like, jax.eval_shape(tx.init, PARAMS))
    with pytest.raises(jaxinf.StaleStateError, match=r"call tx\.init"):
        tx.update(GRADIENTS, zeros, PARAMS)
    tx, state = start(open_store())
    said = r"SmartUpdateState.*store.load\(params, opt_state, step"
    with pytest.raises(TypeError, match=said):
        tx.update(GRADIENTS, ADAM.init(PARAMS), PARAMS)
    twin = jax.tree.map(lambda x: x + 1, PARAMS)
    other = tx.init(twin)
    tx.update(GRADIENTS, state, PARAMS)
    with pytest.raises(jaxinf.StoreError, match="one store per init"):
        tx.update(GRADIENTS, other, twin)


# --- transformations of JAX -----------------------------------------------------------


def stacked(tree, num):
    return jax.tree.map(lambda x: jnp.stack([x] * num), tree)


def summed(tree):
    return sum(jnp.sum(leaf) for leaf in jax.tree.leaves(tree))


TRANSFORMED = {
    r"init is called in jax.vmap over 2 examples": (
        lambda tx, _: jax.vmap(tx.init)(stacked(PARAMS, 2))
    ),
    r"give init what jax.lax.stop_gradient": (
        lambda tx, _: jax.grad(lambda params: tx.init(params).step * 1.0)(PARAMS)
    ),
    r"update is called in jax.vmap over 2 exam": lambda tx, state: jax.vmap(
        lambda gradients: tx.update(gradients, state, PARAMS)
    )(stacked(GRADIENTS, 2)),
    r"update is differentiated \(jax.grad, jax.j": lambda tx, state: jax.grad(
        lambda gradients: summed(tx.update(gradients, state, PARAMS)[0])
    )(GRADIENTS),
}


@pytest.mark.parametrize("is_jitted", [True, False], ids=["jit", "eager"])
@pytest.mark.parametrize("message", TRANSFORMED)
def test_a_transformed_call_is_refused(open_store, message, is_jitted):
    store = open_store()
    tx = jaxinf.smart_update(ADAM, store)
    state = tx.init(PARAMS) if "update" in message else None
    if is_jitted:
        jitted = SimpleNamespace(init=jax.jit(tx.init), update=jax.jit(tx.update))
    with pytest.raises(ValueError, match=message):
        TRANSFORMED[message](jitted if is_jitted else tx, state)
    assert store.exists == ("update" in message)
    if store.exists:
        store.check()
        assert store.step == 0


# --- the store ------------------------------------------------------------------------


def test_a_payload_that_could_not_be_read_again(open_store):
    store = open_store()
    start(store)
    for payload, problem in (
        ("x" * (17 << 20), "at most 16777216 bytes"),
        (["\udc80"], "surrogate"),
        (float("nan"), "not JSON compliant"),
    ):
        with pytest.raises(ValueError, match=problem):
            store.annotate(1, payload)
    with pytest.raises(TypeError, match="not JSON serializable"):
        store.annotate(1, object())


REFUSED_DEVICES = """
import sys, jax.numpy as jnp, optax, jaxinf
try:
    jaxinf.smart_update(optax.adam(1e-3), sys.argv[1]).init({"w": jnp.ones(3)})
except jaxinf.DeviceConfigurationError as error:
    print(error)
"""


@pytest.mark.long
def test_several_cpu_devices_without_pjrt_nproc(run_python, place):
    devices = "--xla_force_host_platform_device_count=2"
    environment = {"XLA_FLAGS": devices, "PJRT_NPROC": "", "NPROC": ""}
    result = run_python(REFUSED_DEVICES, place / "store", **environment)
    assert "PJRT_NPROC=8" in result.stdout
    assert not (place / "store").exists()
