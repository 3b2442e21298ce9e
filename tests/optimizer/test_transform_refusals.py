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


def same(found, expected):
    jax.tree.map(np.testing.assert_array_equal, found, expected)


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


# --- NaN -----------------------------------------------------------------------------


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


@pytest.mark.parametrize("durability", family(["step", 3], short=[3]))
def test_apply_if_finite_has_its_own_rule(open_store, durability):
    plain = optax.apply_if_finite(ADAM, 2)
    tx, state = start(open_store(durability=durability), plain)
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
    state.hyperparams["learning_rate"] = jnp.float32(np.nan)
    with pytest.raises(
        jaxinf.NonFiniteScalarError, match=rf"step 2: .* NaN in .*{name}"
    ):
        tx.update(GRADIENTS, state, params)
    store.close()
    assert open_store().step == 1


@pytest.mark.long
@pytest.mark.parametrize(
    ("how", "handled", "callback", "raised"),
    [
        ("jitted", "raised", "buffer", "jax.errors.JaxRuntimeError"),
        ("eagerly", "raised", "start", "jaxinf.errors.NonFiniteGradientError"),
        ("jitted", "caught", "start", "JaxRuntimeError"),
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


@pytest.mark.long
def test_close_raises_what_nothing_has_raised(place, run_python):
    """A call whose arguments are still computed returns before it fails."""
    run_python(PROGRAM, place / "store", "late")


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


@pytest.mark.parametrize(
    ("tx", "params", "error", "message"),
    [
        (
            optax.lookahead(ADAM, 5, 0.5),
            optax.LookaheadParams.init_synced(PARAMS),
            jaxinf.UnsupportedTransformError,
            r"^optax.lookahead: .*EMA of",
        ),
        (
            optax.lamb(1e-3),
            PARAMS,
            jaxinf.UnsupportedTransformError,
            "reduce_sum",
        ),
        (
            optax.chain(optax.adamw(1e-2), optax.contrib.reduce_on_plateau()),
            PARAMS,
            TypeError,
            r"needs value .*extra_args=\{\"value\": 0\.0\}.*params, value=…\)",
        ),
        (ADAM, {"a": [1.0]}, TypeError, r"params/a.*: expected an array, found float"),
        (ADAM, {"\ud800": PARAMS["b"]}, ValueError, "expected keys that UTF-8"),
    ],
    ids=["lookahead", "reduction", "argument", "number", "key"],
)
def test_refused_by_init(open_store, place, tx, params, error, message):
    with pytest.raises(error, match=message):
        jaxinf.smart_update(tx, open_store()).init(params)
    assert not (place / "store").exists()


OTHERS = {
    "shape": ({**PARAMS, "b": jnp.zeros(21)}, r"leaf b: shape \(20,\) in the store"),
    "dtype": (
        {**PARAMS, "b": PARAMS["b"].astype(jnp.bfloat16)},
        "leaf b: params float32 in the store, bfloat16",
    ),
    "less": ({"w": PARAMS["w"]}, "- leaf b: in the store only"),
    "more": ({**PARAMS, "c": jnp.ones(3)}, r"\+ leaf c: not in the store"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_another_tree(open_store, name):
    """By `init`; and by `update`, while it is traced, so that the run may go on."""
    other, message = OTHERS[name]
    store = open_store()
    tx, state = start(store)
    with pytest.raises(jaxinf.StoreMismatchError, match=message):
        tx.init(other)
    with pytest.raises(jaxinf.StoreMismatchError, match=message):
        jax.eval_shape(tx.update, other, state, other)
    wrong = {**GRADIENTS, "b": jnp.zeros(21)}
    with pytest.raises(ValueError, match=r"leaf b: expected a gradient of .*\(20,\)"):
        jax.eval_shape(tx.update, wrong, state, PARAMS)
    store.check()
    _, state = tx.update(GRADIENTS, state, PARAMS)
    assert int(state.step) == 1


@pytest.mark.parametrize(
    ("tx", "message"),
    [
        (optax.sgd(0.1, momentum=0.9), r"states .*mu float32.* in the store"),
        (optax.adamw(1e-2), r"other equations"),
    ],
)
def test_another_optimizer(tx, message, open_store):
    store = open_store()
    start(store)
    with pytest.raises(jaxinf.StoreMismatchError, match=message):
        jaxinf.smart_update(tx, store).init(PARAMS)
    assert int(start(store, optax.adam(5e-4))[1].step) == 0  # another rate is none


def test_two_models_need_two_stores(open_store):
    tx, state = start(open_store())
    with pytest.raises(jaxinf.StoreMismatchError, match="one store per init"):
        tx.init({"other": jnp.ones(3)})
    twin = jax.tree.map(lambda x: x + 1, PARAMS)
    other = tx.init(twin)
    _, state = tx.update(GRADIENTS, state, PARAMS)
    with pytest.raises(jaxinf.StoreError, match="one store per init"):
        tx.update(GRADIENTS, other, twin)


def test_a_state_of_something_else(open_store):
    store = open_store()
    tx = jaxinf.smart_update(ADAM, store)
    state = jax.tree.map(
        lambda a: jnp.zeros(a.shape, a.dtype), jax.eval_shape(tx.init, PARAMS)
    )
    said = r"SmartUpdateState.*store.load\(params, opt_state, step"
    with pytest.raises(TypeError, match=said):
        tx.update(GRADIENTS, ADAM.init(PARAMS), PARAMS)
    with pytest.raises(jaxinf.StaleStateError, match=r"call tx\.init"):
        tx.update(GRADIENTS, state, PARAMS)
    store.close()


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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"nonfinite": "maybe"}, r'nonfinite=.maybe.: expected "error"'),
        ({"updates": "bfloat16"}, 'expected "gradient" or "float32"'),
        ({"on_existing": "anew"}, r'on_existing=.anew.: expected "resume"'),
    ],
)
def test_arguments(open_store, options, message):
    with pytest.raises(ValueError, match=message):
        jaxinf.smart_update(ADAM, open_store(), **options)


# --- the store ------------------------------------------------------------------------


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
    same(committed(again), before)
    tx, state = start(again)
    again.close()
    with pytest.raises(jaxinf.StoreClosedError, match="open it again"):
        tx.update(GRADIENTS, state, PARAMS)


@pytest.mark.parametrize(
    ("payload", "problem"),
    [
        pytest.param("x" * (17 << 20), "at most 16777216 bytes", id="long"),
        pytest.param(["\udc80"], "surrogate", id="surrogate"),
    ],
)
def test_a_payload_that_could_not_be_read_again(open_store, payload, problem):
    store = open_store()
    start(store)
    with pytest.raises(ValueError, match=problem):
        store.annotate(1, payload)


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


@pytest.mark.long
def test_an_accelerator_without_the_cpu_backend(run_python, place):
    words = [place / "store", "refused_without_a_cpu"]
    found = run_python(PROGRAM, *words, JAX_PLATFORMS="pretended")
    assert "Set JAX_PLATFORMS=pretended,cpu" in found.stdout
    assert not list((place / "store").glob("*"))
