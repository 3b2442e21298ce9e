"""A plain optax run, saved by stock Orbax, continues from a store unchanged.

The reference of the bits is three separate jits: gradients, `tx.update`,
`optax.apply_updates` (CONTRIBUTING.md, "Bits are a contract").
"""

import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from flax.training import train_state
from orbax.checkpoint.experimental import v1

import jaxinf
from jaxinf.errors import ExchangeError, StoreLockedError, StoreMismatchError
from jaxinf.exchange import export_safetensors, import_checkpoint

OPTIMIZERS = {
    "adamw": lambda: optax.adamw(1e-2),
    "momentum": lambda: optax.sgd(1e-2, momentum=0.9),
    "chain": lambda: optax.chain(
        optax.clip_by_global_norm(0.5), optax.adamw(optax.linear_schedule(1e-2, 0, 30))
    ),
    "inject": lambda: optax.inject_hyperparams(optax.adamw)(learning_rate=1e-2),
    "accumulate": lambda: optax.MultiSteps(
        optax.adam(1e-2), 2
    ).gradient_transformation(),
    "masked": lambda: optax.adamw(1e-2, mask={"h": [True, False], "out": True}),
    "parted": lambda: optax.partition(
        {"a": optax.adam(1e-2), "b": optax.sgd(1e-2, momentum=0.9)},
        {"h": ["a", "b"], "out": "a"},
    ),
    "two": lambda: optax.chain(
        optax.trace(0.9), optax.scale_by_adam(), optax.trace(0.5)
    ),
}
NUM_STEPS = 6


def make_params(dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(0), 3)
    return {
        "h": [
            {"kernel": jax.random.normal(keys[0], (8, 33), dtype)},
            {"kernel": jax.random.normal(keys[1], (33, 16), dtype)},
        ],
        "out": jax.random.normal(keys[2], (16,), dtype),
    }


@jax.jit
def loss_and_grads(params, step):
    x = jax.random.normal(jax.random.key(step), (4, 8))

    def loss(params):
        hidden = jnp.tanh(x @ params["h"][0]["kernel"]) @ params["h"][1]["kernel"]
        return jnp.mean((jnp.tanh(hidden) @ params["out"] - x.sum(1)) ** 2)

    return jax.value_and_grad(loss)(params)


def train(tx, params, state, first, last):
    """Returns losses of the steps [first, last), each in three jits."""
    update, apply = jax.jit(tx.update), jax.jit(optax.apply_updates)
    losses = []
    for step in range(first, last):
        loss, grads = loss_and_grads(params, step)
        losses.append(np.asarray(loss))
        updates, state = update(grads, state, params)
        params = apply(params, updates)
    return params, state, losses


def save_standard(path, params, state):
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, {"params": params, "opt_state": state})
    return path


def save_zarr2_files(path, params, state):
    tree = {"params": params, "opt_state": state, "step": NUM_STEPS}
    ocp.PyTreeCheckpointer(use_ocdbt=False).save(path, tree)
    return path


def save_zarr3_files(path, params, state):
    checkpointer = ocp.PyTreeCheckpointer(use_ocdbt=False, use_zarr3=True)
    checkpointer.save(path, {"model": {"params": params}, "opt_state": state})
    return path


def save_train_state(path, params, state):
    value = train_state.TrainState(NUM_STEPS, None, params, None, state)
    with ocp.CheckpointManager(path) as manager:
        manager.save(NUM_STEPS, args=ocp.args.StandardSave(value))
    return path / str(NUM_STEPS)


def save_newer_api(path, params, state):
    v1.save(path, {"params": params, "opt_state": state})
    return path


def save_in_small_chunks(path, params, state):
    tree = {"params": params, "opt_state": state}
    arguments = jax.tree.map(lambda _: ocp.SaveArgs(chunk_byte_size=128), tree)
    ocp.PyTreeCheckpointer().save(path, tree, save_args=arguments)
    return path


SAVES = [
    save_in_small_chunks,
    save_standard,
    save_zarr2_files,
    save_zarr3_files,
    save_train_state,
    save_newer_api,
]


def make_store(path, tx, params):
    with jaxinf.open_store(path) as store:
        jaxinf.smart_update(tx, store).init(params)


def go_on(path, tx, params, last):
    with jaxinf.open_store(path) as store:
        first = store.step
        smart = jaxinf.smart_update(tx, store)
        params = store.params(like=params)
        state = smart.init(params)
        return first, train(smart, params, state, first, last)[2]


def check_migration(tmp_path, tx, save, **options):
    fresh = make_params()
    params, state, _ = train(tx, fresh, tx.init(fresh), 0, NUM_STEPS)
    source = save(tmp_path / "saved", params, state)
    make_store(tmp_path / "store", tx, fresh)
    report = import_checkpoint(source, tmp_path / "store", **options)
    assert report.step == NUM_STEPS
    assert not report.fresh_states
    _, _, expected = train(tx, params, state, NUM_STEPS, NUM_STEPS + 4)
    first, losses = go_on(tmp_path / "store", tx, fresh, NUM_STEPS + 4)
    assert first == NUM_STEPS
    np.testing.assert_array_equal(losses, expected)
    return report


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.long
def test_every_optimizer_goes_on(tmp_path, name):
    options = {} if name not in ("momentum", "two") else {"step": NUM_STEPS}
    if name == "accumulate":
        options["step"] = NUM_STEPS  # the counts are of the inner optimizer
    check_migration(tmp_path, OPTIMIZERS[name](), save_standard, **options)


@pytest.mark.parametrize("save", SAVES)
def test_every_way_to_save_goes_on(tmp_path, save):
    check_migration(tmp_path, OPTIMIZERS["chain"](), save)


def test_clipping_outside_goes_on(tmp_path):
    """The optimizer may move inside a chain, because paths end alike."""
    inner = optax.adamw(1e-2)
    plain = optax.chain(optax.clip_by_global_norm(0.5), inner)
    params = make_params()
    params, state, _ = train(plain, params, plain.init(params), 0, NUM_STEPS)
    source = save_standard(tmp_path / "saved", params, state)
    make_store(tmp_path / "store", inner, params)
    assert import_checkpoint(source, tmp_path / "store").step == NUM_STEPS
    with jaxinf.open_store(tmp_path / "store") as store:
        mu = store.tensorstore("mu", "out").read().result()
    np.testing.assert_array_equal(mu, state[1][0].mu["out"])


@pytest.mark.parametrize("form", ["pure", "state"])
def test_flax_nnx_goes_on(tmp_path, form):
    model = nnx.Sequential(
        nnx.Linear(8, 33, rngs=nnx.Rngs(0)), nnx.Linear(33, 1, rngs=nnx.Rngs(1))
    )
    optimizer = nnx.Optimizer(model, optax.adamw(1e-2), wrt=nnx.Param)
    x = jax.random.normal(jax.random.key(1), (4, 8))

    @nnx.jit
    def step(model, optimizer):
        loss = lambda model: jnp.mean((model(x) - 1) ** 2)  # noqa: E731
        optimizer.update(model, nnx.grad(loss)(model))

    for _ in range(3):
        step(model, optimizer)
    states = {"model": nnx.state(model), "optimizer": nnx.state(optimizer)}
    if form == "pure":
        states = {key: nnx.to_pure_dict(value) for key, value in states.items()}
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "saved", states)
    params = nnx.state(model, nnx.Param)
    make_store(
        tmp_path / "store", optax.adamw(1e-2), jax.tree.map(jnp.zeros_like, params)
    )
    report = import_checkpoint(tmp_path / "saved", tmp_path / "store")
    assert report.step == 3
    with jaxinf.open_store(tmp_path / "store") as store:
        found = store.params(like=params)
        nu = store.tensorstore("nu", "layers/0/kernel").read().result()
    jax.tree.map(np.testing.assert_array_equal, found, params)
    saved = nnx.to_pure_dict(nnx.state(optimizer))["opt_state"][0]["nu"]
    np.testing.assert_array_equal(nu, saved["layers"][0]["kernel"])


def test_a_leaf_may_be_named_value(tmp_path):
    params = {"attention": {name: jnp.ones((4, 5)) for name in ("key", "value")}}
    tx = optax.adam(1e-2)
    save_standard(tmp_path / "saved", params, tx.init(params))
    make_store(tmp_path / "store", tx, params)
    assert import_checkpoint(tmp_path / "saved", tmp_path / "store").step == 0


def test_16_bit_params_become_an_exact_master(tmp_path):
    tx, params = optax.adam(1e-2), make_params(jnp.bfloat16)
    state = tx.init(jax.tree.map(lambda p: p.astype(jnp.float32), params))
    save_standard(tmp_path / "saved", params, state)
    make_store(tmp_path / "store", tx, jax.tree.map(jnp.zeros_like, params))
    import_checkpoint(tmp_path / "saved", tmp_path / "store", step=3)
    with jaxinf.open_store(tmp_path / "store") as store:
        found = store.params(like=params)
        assert store.step == 3
    jax.tree.map(np.testing.assert_array_equal, found, params)


# --- params alone ------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["safetensors", "orbax"])
def test_params_alone_begin_with_fresh_state(tmp_path, kind):
    tx, params = optax.adamw(1e-2), make_params()
    if kind == "orbax":
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(tmp_path / "saved", params)
    else:
        make_store(tmp_path / "other", tx, params)
        with jaxinf.open_store(tmp_path / "other") as store, store.snapshot() as path:
            step = jaxinf.exchange.StepFiles(path, store._manifest)
            export_safetensors(step, tmp_path / "saved", params_only=True)
    make_store(tmp_path / "store", tx, jax.tree.map(jnp.zeros_like, params))
    report = import_checkpoint(tmp_path / "saved", tmp_path / "store")
    assert report.fresh_states == ("mu", "nu")
    assert report.step == 0
    _, _, expected = train(tx, params, tx.init(params), 0, 4)
    _, losses = go_on(tmp_path / "store", tx, params, 4)
    np.testing.assert_array_equal(losses, expected)


def test_state_computed_from_params_does_not_stay(tmp_path):
    tx, params = optax.contrib.schedule_free_adamw(1e-2), make_params()
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "saved", params)
    make_store(tmp_path / "store", tx, params)
    with pytest.raises(
        ExchangeError, match=r"z of .* init computed it from the params"
    ):
        import_checkpoint(tmp_path / "saved", tmp_path / "store")


# --- refusals ----------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path):
    """An adamw run's checkpoint and a store for it."""
    tx, params = optax.adamw(1e-2), make_params()
    save_standard(tmp_path / "saved", params, tx.init(params))
    make_store(tmp_path / "store", tx, params)
    return tmp_path / "saved", tmp_path / "store"


def test_everything_wrong_is_in_one_error(tmp_path):
    tx, params = optax.adamw(1e-2), make_params()
    state: Any = tx.init(params)
    nu = {**state[0].nu, "out": jnp.zeros(17)}
    half = jax.tree.map(lambda x: x.astype(jnp.float16), state[0].mu)
    state = (state[0]._replace(nu=nu, mu=half), *state[1:])
    del params["out"]
    save_standard(tmp_path / "saved", params, state)
    make_store(tmp_path / "store", tx, make_params())
    (tmp_path / "store/checkpoints.lock").touch()
    before = sorted((tmp_path / "store").rglob("*"))
    with pytest.raises(ExchangeError) as caught:
        import_checkpoint(tmp_path / "saved", tmp_path / "store")
    text = str(caught.value)
    assert "params of out: missing (no params.out)" in text
    assert "nu of out: shape (16,) in the store, (17,) in opt_state.0.nu.out" in text
    assert "mu of" not in text  # every float16 is a float32
    assert "Nothing was written" in text
    assert sorted((tmp_path / "store").rglob("*")) == before
    with jaxinf.open_store(tmp_path / "store") as store:
        assert store.step == 0


def test_another_optimizer_is_refused(tmp_path):
    params = make_params()
    save_standard(tmp_path / "saved", params, optax.adamw(1e-2).init(params))
    make_store(tmp_path / "store", optax.sgd(1e-2, momentum=0.9), params)
    with pytest.raises(ExchangeError, match=r"opt_state.0.mu: 3 arrays of the shapes"):
        import_checkpoint(tmp_path / "saved", tmp_path / "store")


def test_what_is_ignored_is_not_missed(tmp_path):
    params = make_params()
    save_standard(tmp_path / "saved", params, optax.adamw(1e-2).init(params))
    make_store(tmp_path / "store", optax.sgd(1e-2, momentum=0.9), params)
    report = import_checkpoint(
        tmp_path / "saved", tmp_path / "store", ignored=["opt_state"]
    )
    assert report.fresh_states == ("trace",)


def test_an_ambiguous_place_can_be_named(tmp_path):
    tx, params = optax.adam(1e-2), make_params()
    other = jax.tree.map(lambda x: x + 1, params)
    tree = {"teacher": params, "student": other, "opt_state": tx.init(params)}
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "saved", tree)
    make_store(tmp_path / "store", tx, params)
    with pytest.raises(ExchangeError, match=r"params: could be student, teacher"):
        import_checkpoint(tmp_path / "saved", tmp_path / "store")
    names, ignored = {"params": "student"}, ["teacher"]
    import_checkpoint(
        tmp_path / "saved", tmp_path / "store", names=names, ignored=ignored
    )
    with jaxinf.open_store(tmp_path / "store") as store:
        found = store.params(like=params)
    jax.tree.map(np.testing.assert_array_equal, found, other)


def test_a_trained_store_is_refused(saved):
    source, store = saved
    import_checkpoint(source, store, step=5)
    with pytest.raises(
        StoreMismatchError, match=r"expected a store at step 0 .* step 5"
    ):
        import_checkpoint(source, store)


def test_an_open_store_is_refused(saved):
    source, store = saved
    with jaxinf.open_store(store), pytest.raises(StoreLockedError):
        import_checkpoint(source, store)


def test_unknown_options_are_refused(saved):
    with pytest.raises(ValueError, match=r"ignored 'ema': the checkpoint has no array"):
        import_checkpoint(*saved, ignored=["ema"])
    with pytest.raises(ValueError, match=r"no state 'trace'; it has params, mu, nu"):
        import_checkpoint(*saved, names={"trace": "x"})
    with pytest.raises(ValueError, match=r"step=-1: expected"):
        import_checkpoint(*saved, step=-1)


def test_no_step_and_no_count(tmp_path):
    tx, params = OPTIMIZERS["momentum"](), make_params()
    save_standard(tmp_path / "saved", params, tx.init(params))
    make_store(tmp_path / "store", tx, params)
    with pytest.raises(ExchangeError, match=r"neither a step nor a count; say which"):
        import_checkpoint(tmp_path / "saved", tmp_path / "store")


def test_no_checkpoint(saved, tmp_path):
    _, store = saved
    with pytest.raises(ExchangeError, match=r"nothing: expected .* found nothing"):
        import_checkpoint(tmp_path / "nothing", store)
    (tmp_path / "file").touch()
    with pytest.raises(ExchangeError, match=r"found another file"):
        import_checkpoint(tmp_path / "file", store)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ExchangeError, match=r"found no _METADATA; check the path"):
        import_checkpoint(tmp_path / "empty", store)


def test_a_manager_is_not_one_step(tmp_path):
    tx, params = optax.adam(1e-2), make_params()
    save_train_state(tmp_path / "saved", params, tx.init(params))
    make_store(tmp_path / "store", tx, params)
    with pytest.raises(ExchangeError, match=r"found the steps 6; give the directory"):
        import_checkpoint(tmp_path / "saved", tmp_path / "store")


def test_a_damaged_checkpoint(saved):
    source, store = saved
    for file in (source / "ocdbt.process_0" / "d").iterdir():
        file.write_bytes(b"")
    with pytest.raises(ExchangeError, match=r"saved: "):
        import_checkpoint(source, store)
    with jaxinf.open_store(store) as opened:
        assert opened.step == 0


def test_a_damaged_tree(saved):
    source, store = saved
    (source / "_METADATA").write_text("{}")
    with pytest.raises(ExchangeError, match=r"_METADATA: expected the tree"):
        import_checkpoint(source, store)


def test_orbax_says_so_and_we_name_the_way(tmp_path):
    """A checkpoint of plain optax does not fit; docs/integrations.md quotes Orbax."""
    params, plain = {"w": jnp.ones((8, 4))}, optax.adamw(1e-3)
    save_standard(tmp_path / "saved", params, plain.init(params))
    tx = jaxinf.smart_update(plain, tmp_path / "store")
    like = {"params": params, "opt_state": tx.init(params)}
    with ocp.StandardCheckpointer() as checkpointer:
        with pytest.raises(ValueError, match="tree structures do not match") as error:
            checkpointer.restore(tmp_path / "saved", like)
        restored = checkpointer.restore(tmp_path / "saved")
    page = Path(__file__).parents[2] / "docs" / "integrations.md"
    quoted = re.search(r'"(User-provided [^"]*)"', page.read_text())
    assert quoted
    assert " ".join(quoted[1].split()) in str(error.value)
    with pytest.raises(TypeError, match="jaxinf checkpoint import"):
        tx.update(params, restored["opt_state"], params)
    jaxinf.close(tmp_path / "store")
