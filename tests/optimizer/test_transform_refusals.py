"""Refusals of `smart_update`: their messages, and that nothing is lost."""

import shutil
from itertools import product
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from families import family

import jaxinf
from jaxinf.optimizer import transform

PROGRAM = Path(__file__).parents[1] / "programs" / "refused_updates.py"
PARAMS = {"w": jnp.ones((300, 20)), "b": jnp.zeros((20,))}
GRADIENTS = jax.tree.map(lambda x: jnp.full_like(x, 0.5), PARAMS)


def with_nan(tree):
    return {**tree, "b": tree["b"].at[3].set(jnp.nan)}


def start(store, tx=None, **options):
    tx = jaxinf.smart_update(optax.adam(1e-2) if tx is None else tx, store, **options)
    return tx, tx.init(PARAMS)


def apply(tx, gradients, state, params=PARAMS):
    updates, state = jax.jit(tx.update)(gradients, state, params)
    return optax.apply_updates(params, updates), state


def committed(store):
    return jax.tree.map(np.asarray, store.params(like=PARAMS))


def test_bits_that_a_gpu_does_not_promise(open_store, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    transform.warn_of_varying_bits.cache_clear()
    tx = jaxinf.smart_update(optax.sgd(1.0), open_store())
    with pytest.warns(UserWarning, match="XLA_FLAGS=--xla_gpu_deterministic_ops=true"):
        jax.eval_shape(tx.init, PARAMS)
    jax.eval_shape(tx.init, PARAMS)  # once
    transform.warn_of_varying_bits.cache_clear()
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_deterministic_ops=false")
    jax.eval_shape(tx.init, PARAMS)


def test_nan_gradient_is_refused_and_nothing_committed(open_store):
    store = open_store()
    tx, state = start(store)
    params, state = apply(tx, GRADIENTS, state)
    before = committed(store)
    with pytest.raises(jax.errors.JaxRuntimeError, match="NaN or Inf in the gradient"):
        apply(tx, with_nan(GRADIENTS), state, params)
    with pytest.raises(
        jaxinf.NonFiniteGradientError, match=r"step 2: .* gradient of b"
    ):
        store.check()
    with pytest.raises(jaxinf.NonFiniteGradientError):
        store.params(like=PARAMS)
    store.close()
    again = open_store()
    assert again.step == 1
    jax.tree.map(np.testing.assert_array_equal, committed(again), before)


def test_eager_update_raises_the_original_type(open_store):
    store = open_store()
    tx, state = start(store)
    with pytest.raises(jaxinf.NonFiniteGradientError):
        tx.update(with_nan(GRADIENTS), state, PARAMS)
    store.close()


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
    plain = optax.adam(1e-2)
    p, s = PARAMS, plain.init(PARAMS)
    for _ in range(2):
        u, s = plain.update(GRADIENTS, s, p)
        p = optax.apply_updates(p, u)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), params, p)


@pytest.mark.long
def test_nonfinite_allow_leaves_it_to_the_chain(open_store):
    tx, state = start(
        open_store(), optax.chain(optax.zero_nans(), optax.sgd(1.0)), nonfinite="allow"
    )
    params, _ = apply(tx, with_nan(GRADIENTS), state)
    assert float(params["b"][3]) == 0.0
    assert float(params["b"][4]) == -0.5


@pytest.mark.parametrize("durability", family(["step", 3], short=[3]))
@pytest.mark.parametrize("tx", [optax.adam(1e-2), optax.sgd(1e-2)], ids=["adam", "sgd"])
def test_apply_if_finite_has_its_own_rule(open_store, durability, tx):
    plain = optax.apply_if_finite(tx, 2)
    store = open_store(durability=durability)
    tx, state = start(store, plain)
    params, expected, held = PARAMS, PARAMS, plain.init(PARAMS)
    for is_bad in (False, True, True, False, True, True, True, False):
        gradients = with_nan(GRADIENTS) if is_bad else GRADIENTS
        params, state = apply(tx, gradients, state, params)
        updates, held = jax.jit(plain.update)(gradients, held, expected)
        expected = optax.apply_updates(expected, updates)
        for name in PARAMS:
            np.testing.assert_allclose(
                np.asarray(params[name]), np.asarray(expected[name]), rtol=1e-5
            )
        assert int(state.notfinite_count) == int(held.notfinite_count)
    assert np.isnan(np.asarray(params["b"])).any()  # the third in turn is accepted
    assert int(state.step) == 8


@pytest.mark.long
def test_apply_if_finite_around_a_part_keeps_no_nan_out(open_store):
    part = optax.apply_if_finite(optax.sgd(1.0), 2)
    tx, state = start(open_store(), optax.masked(part, {"w": True, "b": False}))
    with pytest.raises(jaxinf.NonFiniteGradientError, match=r"loss scale \(DynamicS"):
        tx.update(with_nan(GRADIENTS), state, PARAMS)


def test_lookahead_is_refused_by_name(open_store, place):
    plain, synced = optax.adam(1e-2), optax.LookaheadParams.init_synced(PARAMS)
    tx = jaxinf.smart_update(optax.lookahead(plain, 5, 0.5), open_store())
    for params in (PARAMS, synced):
        with pytest.raises(
            jaxinf.UnsupportedTransformError, match=r"^optax.lookahead: .*EMA of"
        ):
            tx.init(params)
    assert not (place / "store").exists()


def test_two_models_need_two_stores(open_store):
    tx, state = start(open_store())
    with pytest.raises(jaxinf.StoreMismatchError, match="one store per init"):
        tx.init({"other": jnp.ones(3)})
    twin = jax.tree.map(lambda x: x + 1, PARAMS)
    other = tx.init(twin)
    _, state = tx.update(GRADIENTS, state, PARAMS)
    with pytest.raises(jaxinf.StoreError, match="one store per init"):
        tx.update(GRADIENTS, other, twin)


def test_close_does_not_raise_what_jax_has_raised(open_store):
    store = open_store()
    tx, state = start(store)
    with pytest.raises(jax.errors.JaxRuntimeError, match="NaN or Inf in the gradient"):
        jax.jit(tx.update)(with_nan(GRADIENTS), state, PARAMS)
    store.close()
    assert open_store().step == 0


@pytest.mark.long
def test_close_raises_what_nothing_has_raised(place, run_python):
    """A call whose arguments are still computed returns before it fails."""
    run_python(PROGRAM, place / "store", "late")


def test_nonfinite_must_be_a_known_policy(open_store):
    with pytest.raises(ValueError, match=r'nonfinite=.maybe.: expected "error"'):
        jaxinf.smart_update(optax.adam(1e-3), open_store(), nonfinite="maybe")


def test_reduction_over_stored_state(open_store, place):
    tx = jaxinf.smart_update(optax.lamb(1e-3), open_store())
    with pytest.raises(jaxinf.UnsupportedTransformError, match="reduce_sum"):
        tx.init(PARAMS)
    assert not (place / "store").exists()


@pytest.mark.parametrize(
    ("tx", "params", "message"),
    [
        (optax.sgd(0.1, momentum=0.9), PARAMS, r"states .*mu float32.* in the store"),
        (optax.adamw(1e-2), PARAMS, r"other equations"),
        (optax.adam(1e-2), {"w": PARAMS["w"]}, r"- leaf b: in the store only"),
        (
            optax.adam(1e-2),
            {**PARAMS, "c": jnp.ones(3)},
            r"\+ leaf c: not in the store",
        ),
        (
            optax.adam(1e-2),
            {**PARAMS, "b": jnp.zeros((21,))},
            r"shape \(20,\) in the store, \(21,\)",
        ),
        (
            optax.adam(1e-2),
            {**PARAMS, "b": PARAMS["b"].astype(jnp.bfloat16)},
            r"params float32 in the store, bfloat16",
        ),
    ],
)
def test_another_optimizer_or_tree(tx, params, message, open_store):
    store = open_store()
    start(store)
    with pytest.raises(jaxinf.StoreMismatchError, match=message):
        jaxinf.smart_update(tx, store).init(params)
    assert store.step == 0


def test_another_learning_rate_is_no_other_optimizer(open_store):
    store = open_store()
    start(store)
    assert int(start(store, optax.adam(5e-4))[1].step) == 0


def test_other_params_than_the_store_holds(open_store):
    store = open_store()
    start(store)
    other = {**PARAMS, "w": PARAMS["w"].at[299, 19].set(2.0)}
    tx = jaxinf.smart_update(optax.adam(1e-2), store)
    state = tx.init(other)
    with pytest.raises(jaxinf.DivergedParamsError, match=r"Call tx\.init with"):
        tx.update(GRADIENTS, state, other)
    store.close()
    store = open_store()
    tx = jaxinf.smart_update(optax.adam(1e-2), store)
    assert int(tx.init(store.params(like=other)).step) == 0


def test_a_state_of_another_step(open_store):
    store = open_store()
    tx, old = start(store)
    params, _ = apply(tx, GRADIENTS, old)
    with pytest.raises(
        jaxinf.StaleStateError, match="of step 0, the store is at step 1"
    ):
        tx.update(GRADIENTS, old, params)
    store.close()


def test_params_that_were_changed_behind_the_store(open_store):
    store = open_store()
    tx, state = start(store)
    params, state = apply(tx, GRADIENTS, state)
    halved = jax.tree.map(lambda x: x / 2, params)
    with pytest.raises(jaxinf.DivergedParamsError, match="last in the chain"):
        tx.update(GRADIENTS, state, halved)
    store.close()


def test_update_before_init(open_store):
    store = open_store()
    tx = jaxinf.smart_update(optax.adam(1e-3), store)
    state = jax.tree.map(
        lambda a: jnp.zeros(a.shape, a.dtype), jax.eval_shape(tx.init, PARAMS)
    )
    with pytest.raises(jaxinf.StaleStateError, match=r"call tx\.init"):
        tx.update(GRADIENTS, state, PARAMS)
    store.close()


def test_state_of_another_transformation(open_store):
    tx, _ = start(open_store())
    said = r"SmartUpdateState.*store.load\(params, opt_state, step"
    with pytest.raises(TypeError, match=said):
        tx.update(GRADIENTS, optax.adam(1e-3).init(PARAMS), PARAMS)


def test_arguments_that_the_optimizer_needs_are_named(open_store):
    plain = optax.chain(optax.adamw(1e-2), optax.contrib.reduce_on_plateau())
    tx = jaxinf.smart_update(plain, open_store())
    said = r"needs value .*extra_args=\{\"value\": 0\.0\}.*params, value=…\)"
    with pytest.raises(TypeError, match=said):
        tx.init(PARAMS)


@pytest.mark.long
@pytest.mark.parametrize(
    ("how", "handled", "callback", "raised"),
    [
        ("jitted", "raised", "buffer", "jax.errors.JaxRuntimeError"),
        pytest.param(
            *("jitted", "raised", "io", "jax.errors.JaxRuntimeError"),
            marks=pytest.mark.long,
        ),
        ("eagerly", "raised", "io", "jaxinf.errors.NonFiniteGradientError"),
        pytest.param(
            *("jitted", "caught", "io", "JaxRuntimeError"), marks=pytest.mark.long
        ),
    ],
)
def test_one_mistake_is_one_error_and_a_line_at_exit(
    place, run_python, how, handled, callback, raised
):
    words = [place / "store", "nan_gradient", how, handled]
    result = run_python(PROGRAM, *words, check=False, CALLBACK_FORM=callback)
    lines = result.stderr.splitlines()
    assert result.returncode != 0
    assert sum(line.startswith(raised) for line in lines) == 1
    assert sum(line.startswith("Traceback") for line in lines) == (handled == "raised")
    assert "another exception" not in result.stderr
    reported = how == "eagerly"  # by its own type, so that exit has nothing to add
    at_exit = [line for line in lines if "store: stopped by NonFiniteGrad" in line]
    assert len(at_exit) == (not reported)
    assert not at_exit or lines[-1] == at_exit[0]


def test_drive_failure_inside_jit_keeps_its_type_and_the_committed_step(
    open_store, place
):
    store = open_store()
    tx, state = start(store)
    params, state = apply(tx, GRADIENTS, state)
    store.wait(state)
    before = committed(store)
    slot = (place / "store" / "current").resolve()
    spare = slot.with_name("b" if slot.name == "a" else "a")
    shutil.rmtree(spare / "mu.w" / "c")

    def step_and_wait():
        store.wait(tx.update(GRADIENTS, state, params))

    with pytest.raises(jaxinf.StoreIOError, match=r"mu\.w"):
        step_and_wait()
    with pytest.raises(jaxinf.StoreIOError, match=r"mu\.w"):
        store.check()
    store.close()
    again = open_store()
    assert again.step == 1
    jax.tree.map(np.testing.assert_array_equal, committed(again), before)


def test_store_that_is_closed(open_store):
    store = open_store()
    tx, state = start(store)
    store.close()
    with pytest.raises(jaxinf.StoreClosedError, match="open it again"):
        tx.update(GRADIENTS, state, PARAMS)
    with pytest.raises(jaxinf.StoreClosedError):
        store.params(like=PARAMS)


@pytest.mark.long
def test_several_cpu_devices_without_pjrt_nproc(run_python, place):
    result = run_python(
        *(PROGRAM, place / "store", "refused"),
        XLA_FLAGS="--xla_force_host_platform_device_count=2",
        PJRT_NPROC="",
        NPROC="",
    )
    assert "PJRT_NPROC=8" in result.stdout
    assert not (place / "store").exists()


def with_rate(state, rate):
    optimizer = state.optimizer
    rates = {**optimizer.hyperparams, "learning_rate": jnp.float32(rate)}
    return state._replace(optimizer=optimizer._replace(hyperparams=rates))


@pytest.mark.parametrize(
    ("nonfinite", "durability"),
    family(
        product(["error", "skip", "allow"], ["step", 3]),
        short=[("error", "step"), ("skip", 3)],
    ),
)
def test_a_nan_learning_rate_is_refused_by_name(open_store, nonfinite, durability):
    store = open_store(durability=durability)
    adam = optax.inject_hyperparams(optax.adam)(learning_rate=1e-2)
    tx, state = start(store, adam, nonfinite=nonfinite)
    params, state = apply(tx, GRADIENTS, state)
    name = "hyperparams/learning_rate" if durability == "step" else "leaf [wb]"
    said = rf"step 2: .* NaN in .*{name}"
    with pytest.raises(jaxinf.NonFiniteScalarError, match=said):
        tx.update(GRADIENTS, with_rate(state, np.nan), params)
    store.close()
    assert open_store().step == 1


@pytest.mark.long
def test_a_nan_gradient_is_what_skip_is_about_though_its_norm_is_nan(open_store):
    clipped = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2))
    tx, state = start(open_store(), clipped, nonfinite="skip")
    params, state = apply(tx, with_nan(GRADIENTS), state)
    assert int(state.skipped_steps) == 1
    jax.tree.map(np.testing.assert_array_equal, params, PARAMS)


@pytest.mark.long
def test_nan_in_a_branch_that_is_not_taken_is_no_matter(open_store):
    nan = jnp.float32(np.nan)

    def choose(updates, state, params=None):
        scale = state * nan  # NaN at every step

        def pick(g):
            return jnp.where(state < 5, 0.5 * g, scale * g)

        return jax.tree.map(pick, updates), state + 1

    tx = optax.GradientTransformation(lambda params: jnp.float32(0), choose)
    tx, state = start(open_store(), tx)
    updates, state = jax.jit(tx.update)(GRADIENTS, state, PARAMS)
    np.testing.assert_array_equal(updates["b"], 0.25)
    assert int(state.step) == 1


def test_inf_is_where_some_optimizers_begin(open_store):
    adam = optax.inject_hyperparams(optax.adam)(learning_rate=1e-2)
    tx, state = start(open_store(), adam)
    _, state = tx.update(GRADIENTS, with_rate(state, np.inf), PARAMS)
    assert int(state.step) == 1


def test_a_step_of_other_shapes_is_refused_while_tracing(open_store):
    tx, state = start(open_store())
    other = {**PARAMS, "b": jnp.zeros(21)}
    with pytest.raises(ValueError, match=r"leaf b: expected a gradient of .*\(20,\)"):
        jax.eval_shape(tx.update, other, state, PARAMS)
    _, state = tx.update(GRADIENTS, state, PARAMS)
    assert int(state.step) == 1


@pytest.mark.parametrize(
    ("other", "difference"),
    [
        ({**PARAMS, "b": jnp.zeros(21)}, r"shape \(20,\) in the store, \(21,\)"),
        ({**PARAMS, "b": jnp.zeros(20, jnp.bfloat16)}, "params float32 in the store"),
        ({"w": PARAMS["w"], "c": PARAMS["b"]}, "in the store only"),
    ],
    ids=["shape", "dtype", "name"],
)
def test_params_that_are_not_the_stores_are_refused_while_tracing(
    open_store, other, difference
):
    store = open_store()
    tx, state = start(store)
    with pytest.raises(jaxinf.StoreMismatchError, match=f"leaf b: {difference}"):
        jax.eval_shape(tx.update, other, state, other)
    store.check()
    _, state = tx.update(GRADIENTS, state, PARAMS)
    assert int(state.step) == 1


@pytest.mark.parametrize("leaf", [1.0, [1.0]])
def test_a_number_that_should_be_an_array(open_store, leaf):
    tx = jaxinf.smart_update(optax.sgd(1.0), open_store())
    with pytest.raises(TypeError, match=r"params/a.*: expected an array, found float"):
        tx.init({"a": leaf, "b": jnp.ones(3)})


@pytest.mark.parametrize("leaf", [1, "x", jnp.arange(3), jnp.ones(3) > 0])
def test_leaves_that_are_not_trained_are_left_alone(open_store, leaf):
    store = open_store()
    tx = jaxinf.smart_update(optax.sgd(1.0), store)
    params = {"a": leaf, "b": jnp.ones(3)}
    state = tx.init(params)
    assert [record.name for record in store._manifest.leaves] == ["b"]
    updates, _ = tx.update({"a": None, "b": jnp.ones(3)}, state, params)
    assert updates["a"] is None
    np.testing.assert_array_equal(updates["b"], -1.0)


def test_half_a_surrogate_pair_is_no_key(open_store):
    tx = jaxinf.smart_update(optax.sgd(1.0), open_store())
    with pytest.raises(ValueError, match=r"leaf '\\ud800': expected keys that UTF-8"):
        tx.init({"\ud800": jnp.ones(3)})


@pytest.mark.parametrize(
    ("payload", "problem"),
    [
        pytest.param("x" * (17 << 20), "at most 16777216 bytes", id="long"),
        pytest.param(["\udc80"], "surrogate", id="surrogate"),
        pytest.param(
            [0] * (5 << 20),
            "at most 16777216 bytes",
            id="many",
            marks=pytest.mark.long,
        ),
    ],
)
def test_a_payload_that_could_not_be_read_again(open_store, payload, problem):
    store = open_store()
    start(store)
    with pytest.raises(ValueError, match=problem):
        store.annotate(1, payload)


def test_an_error_on_a_tpu_is_reported(open_store, monkeypatch):
    """Results of a call that raises are not filled there."""
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    store = open_store()
    tx, state = start(store)
    updates = jax.jit(lambda g: tx.update(g, state, PARAMS)[0])(with_nan(GRADIENTS))
    assert all(np.isnan(leaf).all() for leaf in jax.tree.leaves(updates))
    with pytest.raises(jaxinf.NonFiniteGradientError):
        store.check()


@pytest.mark.long
def test_an_accelerator_without_the_cpu_backend(run_python, place):
    words = [place / "store", "refused_without_a_cpu"]
    found = run_python(PROGRAM, *words, JAX_PLATFORMS="pretended")
    assert "Set JAX_PLATFORMS=pretended,cpu" in found.stdout
    assert not list((place / "store").glob("*"))
