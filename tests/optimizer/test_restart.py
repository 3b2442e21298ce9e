"""A program with its own checkpoints: init, restore over it, continue."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxinf
from jaxinf.store import StoreDirectory


def make_params(dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(0), 2)
    return {
        "w": jax.random.normal(keys[0], (70, 33)).astype(dtype),
        "b": jax.random.normal(keys[1], (33,)).astype(dtype),
        "frozen": jnp.full((5,), 1.5, dtype),
    }


def frozen_part():
    labels = {"w": "train", "b": "train", "frozen": "freeze"}
    return optax.multi_transform(
        {"train": optax.adam(1e-2), "freeze": optax.set_to_zero()}, labels
    )


def trained(tx, start, num_steps):
    """Returns params and state after each of some jitted steps."""
    step, run, kept = stepper(tx), start, []
    for _ in range(num_steps):
        run = step(run)
        kept.append(jax.tree.map(np.asarray, run))
    return kept


def stepper(tx):
    """Returns a jitted step from params and state to the next."""

    @jax.jit
    def step(run):
        params, state = run
        gradients = jax.tree.map(lambda p: p * 0.1 + 0.01, params)
        updates, state = tx.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    return step


def assert_same(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    jax.tree.map(np.testing.assert_array_equal, a, b)


VARIANTS = {
    "float32": (jnp.float32, lambda: optax.adam(1e-2), {}),
    "bfloat16": (jnp.bfloat16, lambda: optax.adam(1e-2), {}),
    "float16": (jnp.float16, lambda: optax.adam(1e-2), {}),
    "frozen": (jnp.float32, frozen_part, {}),
    "error feedback": (
        jnp.float32,
        lambda: optax.adam(1e-2),
        {"compress": jaxinf.top_k(0.1, error_feedback=True)},
    ),
}


@pytest.mark.parametrize(
    ("kind", "at"),
    [
        ("error feedback", 2),
        pytest.param("frozen", 3, marks=pytest.mark.long),
        pytest.param("bfloat16", 2, marks=pytest.mark.long),
        pytest.param("float32", 3, marks=pytest.mark.long),
        pytest.param("float16", 2, marks=pytest.mark.long),
    ],
)
def test_init_then_restore_goes_on_to_the_bit(kind, at, open_store):
    """Continues from the store's step, and from the one before."""
    dtype, make_tx, options = VARIANTS[kind]
    tx = jaxinf.smart_update(make_tx(), open_store("whole"), **options)
    params = make_params(dtype)
    whole = trained(tx, (params, tx.init(params)), 5)

    store = open_store("parts")
    tx = jaxinf.smart_update(make_tx(), store, **options)
    first = trained(tx, (params, tx.init(params)), 3)
    store.close()
    store = open_store("parts")
    tx = jaxinf.smart_update(make_tx(), store, **options)
    made = tx.init(make_params(dtype))
    assert int(made.step) == store.step == 3
    assert int(made.origin) == 1  # of other params
    assert_same(made._replace(origin=np.int32(0)), first[2][1])
    rest = trained(tx, first[at - 1], 5 - at)
    assert store.step == 5
    assert_same(rest[-1], whole[-1])


def start(open_store, num_steps=3, tx=None, name="store", **options):
    """Makes a store by a run; returns it, and the run's own record of each step."""
    store = open_store(name, **options)
    smart = jaxinf.smart_update(optax.adam(1e-2) if tx is None else tx, store)
    params = make_params()
    state = smart.init(params)
    kept = [jax.tree.map(np.asarray, (params, state))]
    kept += trained(smart, (params, state), num_steps)
    store.wait()
    store.close()
    return kept


def again(open_store, **options):
    store = open_store(**options)
    return store, jaxinf.smart_update(optax.adam(1e-2), store)


def test_a_step_that_the_store_has_not(open_store):
    kept = start(open_store, 5, name="whole")
    start(open_store, 4)
    store, tx = again(open_store)
    tx.init(make_params())
    params, state = kept[1]
    with pytest.raises(
        jaxinf.StaleStateError,
        match="is of step 1; the store has step 4, the current one; "
        r"step 3, its other slot\. The store is ahead, .*open it again: "
        r"params = store\.params\(like=params\), state = tx\.init\(params\); .*"
        r"store\.checkpoint\(state=state\) beside .*keep_steps= set to its interval",
    ):
        tx.update(params, state, params)
    store.close()
    store, tx = again(open_store)  # as the error says
    params = store.params(like=params)
    assert_same(trained(tx, (params, tx.init(params)), 1)[0], kept[5])


def test_a_state_of_which_no_step_is(open_store):
    params, state = start(open_store, 4, name="another")[4]
    start(open_store, 1)
    _, tx = again(open_store)
    with pytest.raises(jaxinf.StaleStateError, match="not come so far: restore your"):
        tx.update(params, state, params)


def test_the_other_slot_counts_only_where_it_verifies(open_store, place):
    kept = start(open_store, 4)
    directory = StoreDirectory.open(place / "store")
    slot = directory.committed_slot()
    other = directory.chunk_file("b" if slot == "a" else "a", 2, 0, "mu")
    held = other.read_bytes()
    other.write_bytes(b"\1" + held[1:])
    store, tx = again(open_store)
    params, state = kept[3]
    with pytest.raises(
        jaxinf.StaleStateError, match=r"overwritten in part \(leaf w, mu, chunk 0"
    ):
        tx.update(params, state, params)
    store.close()
    assert directory.committed_slot() == slot
    other.write_bytes(held)
    store, tx = again(open_store)
    trained(tx, kept[3], 1)
    assert store.step == 4


def test_rolls_back_to_a_checkpoint_and_says_so(open_store, caplog):
    store, tx = again(open_store)
    params = make_params()
    first = trained(tx, (params, tx.init(params)), 2)
    store.checkpoint("mine", state=first[-1][1])
    whole = trained(tx, first[-1], 4)
    store.close()
    store, tx = again(open_store)
    tx.init(params)
    rest = trained(tx, first[-1], 4)
    assert "rolled back from step 6 to step 2 (checkpoints/mine)" in caplog.text
    assert store.step == 6
    assert_same(rest, whole)


def test_kept_steps_are_found_again(open_store):
    kept = start(open_store, 11, keep_steps=5, durability="checkpoint")
    store = open_store(keep_steps=(5, 2))
    assert [info.name for info in store.checkpoints()] == ["5", "10"]
    tx = jaxinf.smart_update(optax.adam(1e-2), store)
    rest = trained(tx, kept[5], 6)
    assert_same(rest[-1], kept[11])
    assert [info.name for info in store.checkpoints()] == ["5", "10"]
    trained(tx, rest[-1], 4)
    assert sorted(info.step for info in store.checkpoints()) == [10, 15]


def names(store):
    return [info.name for info in store.checkpoints()]


def test_a_step_that_the_program_keeps_beside_its_save(open_store):
    store, tx = again(open_store, durability="checkpoint")
    params, step = make_params(), stepper(tx)
    run = step((params, tx.init(params)))
    assert store.checkpoint(state=run[1]) == "1"
    assert store.checkpoint(state=run[1]) == "1"  # as it is
    kept = jax.tree.map(np.asarray, run)
    for _ in range(3):
        run = step(run)
    store.wait(run[1])
    assert names(store) == ["1"]
    store.close()
    store, tx = again(open_store)
    tx.init(params)
    rest = trained(tx, kept, 3)
    assert_same(rest[-1], jax.tree.map(np.asarray, run))


def test_a_kept_number_of_a_run_that_went_back_is_replaced(open_store):
    store, tx = again(open_store)
    params, step = make_params(), stepper(tx)
    two = step(step((params, tx.init(params))))
    store.checkpoint(state=two[1])
    three = step(two)
    store.checkpoint(state=three[1])
    before = store.checkpoints()[-1].committed_at
    kept = jax.tree.map(np.asarray, two)
    store.close()
    store, tx = again(open_store)
    tx.init(params)
    again_three = trained(tx, kept, 1)[0]
    assert store.checkpoint(state=again_three[1]) == "3"
    assert names(store) == ["2", "3"]
    assert store.checkpoints()[-1].committed_at != before


def test_room_for_kept_steps_is_looked_for_at_init(open_store, place):
    store = open_store(keep_steps=(5, 10**9))
    tx = jaxinf.smart_update(optax.adam(1e-2), store)
    with pytest.raises(jaxinf.StoreSpaceError, match="and 1000000000 kept steps"):
        tx.init(make_params())
    assert not (place / "store").exists()
    store.close()
    start(open_store, 1)
    store, tx = again(open_store, keep_steps=(5, 10**9))
    with pytest.raises(jaxinf.StoreSpaceError, match="keeps 1000000000 steps; those"):
        tx.init(make_params())


@pytest.mark.parametrize(
    "how", [jax.jit, pytest.param(lambda init: init, marks=pytest.mark.long)]
)
def test_restart_keeps_the_old_run_and_begins_anew(how, open_store, caplog):
    kept = start(open_store)
    store = open_store()
    tx = jaxinf.smart_update(optax.adam(1e-2), store, on_existing="restart")
    params = make_params()
    state = how(tx.init)(params)
    assert int(state.step) == store.step == 0
    assert_same(trained(tx, (params, state), 2)[-1], kept[2])
    assert [i.name for i in store.checkpoints()] == ["step-3-before-restart"]
    assert "kept at step 3" in caplog.text
    tx.init(params)
    assert sorted(i.step for i in store.checkpoints()) == [2, 3]
    store.close()
    store = open_store(restore="step-3-before-restart")
    tx = jaxinf.smart_update(optax.adam(1e-2), store)
    assert_same(trained(tx, kept[3], 1)[-1][1].step, np.int32(4))


def test_restart_and_a_state_restored_over_the_new_one(open_store, caplog):
    """The run goes back to the step, though `init` has begun another one."""
    store, tx = again(open_store)
    params = make_params()
    two = trained(tx, (params, tx.init(params)), 2)[-1]
    store.checkpoint(state=two[1])
    five = trained(tx, two, 3)[-1]
    store.close()
    store = open_store()
    tx = jaxinf.smart_update(optax.adam(1e-2), store, on_existing="restart")
    assert int(tx.init(params).step) == 0
    assert_same(trained(tx, two, 3)[-1], five)
    assert "from step 0 to step 2 (checkpoints/2)" in caplog.text
    assert names(store) == ["2", "step-5-before-restart"]


def test_restart_with_something_else_is_refused(open_store):
    start(open_store)
    store = open_store()
    tx = jaxinf.smart_update(optax.sgd(0.1), store, on_existing="restart")
    with pytest.raises(jaxinf.StoreMismatchError, match="move the store aside"):
        tx.init(make_params())
    assert store.step == 3
    assert not store.checkpoints()


def test_error_on_existing(open_store):
    start(open_store)
    store = open_store()
    tx = jaxinf.smart_update(optax.adam(1e-2), store, on_existing="error")
    with pytest.raises(
        jaxinf.StoreMismatchError, match=r'found one at step 3; on_existing="resume"'
    ):
        tx.init(make_params())
    assert int(jaxinf.smart_update(optax.adam(1e-2), store).init(make_params()).step)
    with pytest.raises(ValueError, match=r'on_existing=.anew.: expected "resume"'):
        jaxinf.smart_update(optax.adam(1e-2), store, on_existing="anew")
