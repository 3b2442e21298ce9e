"""A program that begins again, or discards an update: which step its state is of."""

import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from raw_stores import memory_directory

import jaxinf
from jaxinf.store import StoreDirectory

pytestmark = pytest.mark.filterwarnings("ignore:.*given no params")

PARAMS = {"w": jnp.linspace(-1, 1, 77).reshape(7, 11), "b": jnp.linspace(0, 2, 11)}
FRESH = jax.tree.map(jnp.cos, PARAMS)
REFUSED = (jaxinf.StoreMismatchError, jax.errors.JaxRuntimeError)


def opened(open_store, name="store", **options):
    store = open_store(name, **options)
    return store, jaxinf.smart_update(optax.adam(1e-2), store)


def eager(tx, params, state, gives):
    gradients = jax.tree.map(jnp.sin, params)
    updates, state = tx.update(gradients, state, params if gives else None)
    return optax.apply_updates(params, updates), state


def scanned(tx, params, state, gives):
    def step(carry, _):
        return eager(tx, carry[0], carry[1], gives), None

    return jax.jit(lambda carry: jax.lax.scan(step, carry, None, 1)[0])((params, state))


HOWS = {
    "eager": eager,
    "jit": jax.jit(eager, static_argnums=(0, 3)),
    "donated": jax.jit(eager, static_argnums=(0, 3), donate_argnums=(1, 2)),
    "scan": scanned,
}


def copied(tree):
    return jax.tree.map(jnp.array, tree)


def on_host(tree):
    return jax.tree.map(np.asarray, tree)


def assert_same(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    jax.tree.map(np.testing.assert_array_equal, a, b)


def trained(tx, run, num_steps):
    """Returns params and state after each of some jitted steps."""
    kept = []
    for _ in range(num_steps):
        run = HOWS["jit"](tx, *run, True)
        kept.append(on_host(run))
    return kept


def start(open_store, num_steps=3, name="store", **options):
    """Makes a store by a run; returns it, and the run's own record of each step."""
    store, tx = opened(open_store, name=name, **options)
    begun = PARAMS, tx.init(PARAMS)
    kept = [on_host(begun), *trained(tx, begun, num_steps)]
    store.wait()
    store.close()
    return kept


@pytest.fixture(scope="module")
def run():
    """A store at step 2; params and state at each step, and a step later."""
    with memory_directory() as path, jaxinf.open_store(path / "store") as store:
        tx = jaxinf.smart_update(optax.adam(1e-2), store)
        kept = [(PARAMS, tx.init(PARAMS))]
        for _ in range(2):
            kept.append(HOWS["jit"](tx, *kept[-1], True))
        store.wait(kept[-1][1])
        shutil.copytree(path / "store", path / "kept", symlinks=True)
        after = HOWS["jit"](tx, *kept[-1], True)
        yield path / "kept", on_host(kept), on_host(after)


@pytest.fixture
def kept(run, place):
    """The test's store is a copy of the run's; its params and states."""
    shutil.copytree(run[0], place / "store", symlinks=True)
    return run[1]


@pytest.fixture
def after(run):
    """Params and state of the run at step 3."""
    return run[2]


def refused(open_store, place, how, params, message, *, gives):
    """Updates from the state of `init`, which must write nothing."""
    store, tx = opened(open_store)
    state = tx.init(params)
    assert int(state.origin) == 1
    record = (place / "store" / "current" / "commit.json").read_bytes()
    with pytest.raises(REFUSED, match=message):
        jax.block_until_ready(HOWS[how](tx, copied(params), state, gives))
    with pytest.raises(jaxinf.StoreMismatchError, match=message):
        store.check()
    store.close()
    assert (place / "store" / "current" / "commit.json").read_bytes() == record


@pytest.mark.long
@pytest.mark.parametrize("how", ["eager", "donated", "scan", "jit"])
def test_fresh_params_never_train_on_an_old_state(how, open_store, place, kept, after):
    """A run is fresh, takes the store's params, or restores its own."""
    said = (
        r"no params, and the state of an init that found step 2 .*store\.params\(like"
    )
    refused(open_store, place, how, FRESH, said, gives=False)
    refused(open_store, place, how, FRESH, "the params are not those", gives=True)
    store, tx = opened(open_store)
    state = tx.init(store.params(like=FRESH))
    found = HOWS[how](tx, store.params(like=FRESH), state, True)
    assert_same(on_host(found), after)
    store.close()
    for gives in (False, True):
        store, tx = opened(open_store)
        assert int(tx.init(FRESH).origin) == 1
        found = HOWS[how](tx, *copied(kept[2]), gives)
        assert_same(on_host(found), after)
        store.close()


# --- discarded updates ---------------------------------------------------------


@pytest.mark.parametrize(("how", "gives"), [("eager", True), ("jit", False)])
def test_discarded_updates_leave_no_trace(how, gives, open_store, run, caplog):
    whole = run[1][2]
    with open_store("run") as store:
        tx = jaxinf.smart_update(optax.adam(1e-2), store)
        params, state = HOWS[how](tx, PARAMS, tx.init(PARAMS), gives)
        for factor in range(20):
            HOWS[how](tx, jax.tree.map(lambda x: x, params), state, gives)
            gradients = jax.tree.map(lambda p, f=factor: p + f, params)
            tx.update(gradients, state, params if gives else None)
        store.annotate(3, "the third")
        params, state = HOWS[how](tx, params, state, gives)
        assert_same(on_host((params, state._replace(origin=jnp.int32(0)))), whole)
        store.wait(state)
        assert store.step == 2
        third, state = HOWS[how](tx, params, state, gives)
        store.wait(state)
        assert store.payload == "the third"
        assert_same(store.params(like=params), third)
    assert caplog.text.count("the result of the last update was discarded") == 1
    assert "update was given no params" not in caplog.text  # they were not restored
    assert "rolled back" not in caplog.text


def test_a_state_that_was_given_up_is_no_state_of_its_step(open_store):
    """The first of two updates is kept, and the second is discarded."""
    store, tx = opened(open_store)
    state = tx.init(PARAMS)
    _, first = eager(tx, PARAMS, state, False)
    eager(tx, FRESH, state, False)
    for stale, said in (
        (first, r"a step 1 that was given up: .* made another step 1\. Go on with"),
        (state._replace(step=state.step + 7), "of step 7, the store is at step 2"),
    ):
        with pytest.raises(jaxinf.StaleStateError, match=said):
            tx.update(FRESH, stale)
        store.close()
        store, tx = opened(open_store)
        params = store.params(like=PARAMS)
        eager(tx, params, tx.init(params), True)
    assert store.step == 3


def test_only_the_last_update_may_have_been_discarded(open_store):
    store, tx = opened(open_store)
    kept = trained(tx, (PARAMS, tx.init(PARAMS)), 3)
    with pytest.raises(
        jaxinf.StaleStateError, match="of step 1, the store is at step 3"
    ):
        eager(tx, *kept[0], gives=True)
    store.close()
    assert open_store().step == 3


def test_a_step_that_is_not_durable_cannot_be_had(open_store):
    """Of three steps one is committed, and later ones are written over each other."""
    store, tx = opened(open_store, durability=3)
    params, state = PARAMS, tx.init(PARAMS)
    for number in range(4):
        if number in (0, 3):
            eager(tx, params, state, True)
        params, state = eager(tx, params, state, True)
    last = eager(tx, params, state, True)
    with pytest.raises(
        jaxinf.StaleStateError,
        match=r"is of step 4; the store has step 5, the current one; step 3, its other "
        r"slot\. An update whose result is discarded .*durability='step'",
    ):
        eager(tx, params, state, True)
    store.close()
    store = open_store()
    assert store.step == 5
    assert_same(store.params(like=PARAMS), last[0])


# --- a program with checkpoints of its own -------------------------------------


@pytest.mark.parametrize(
    ("compress", "at"),
    [
        (jaxinf.top_k(0.1, error_feedback=True), 2),
        pytest.param(None, 3, marks=pytest.mark.long),
    ],
)
def test_init_then_restore_goes_on_to_the_bit(compress, at, open_store):
    """Continues from the store's step, and from the one before."""

    def smart(store):
        return jaxinf.smart_update(optax.adam(1e-2), store, compress=compress)

    tx = smart(open_store("whole"))
    whole = trained(tx, (PARAMS, tx.init(PARAMS)), 5)
    store = open_store("parts")
    tx = smart(store)
    first = trained(tx, (PARAMS, tx.init(PARAMS)), 3)
    store.close()
    store = open_store("parts")
    tx = smart(store)
    made = tx.init(PARAMS)
    assert int(made.step) == store.step == 3
    assert int(made.origin) == 1  # of other params
    assert_same(made._replace(origin=np.int32(0)), first[2][1])
    rest = trained(tx, first[at - 1], 5 - at)
    assert store.step == 5
    assert_same(rest[-1], whole[-1])


def test_a_step_that_the_store_has_not(open_store):
    kept = start(open_store, 5, name="whole")
    start(open_store, 4)
    store, tx = opened(open_store)
    tx.init(PARAMS)
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
    store, tx = opened(open_store)
    with pytest.raises(jaxinf.StaleStateError, match="not come so far: restore your"):
        tx.update(*kept[5], params)
    store.close()
    store, tx = opened(open_store)  # as the error says
    params = store.params(like=params)
    assert_same(trained(tx, (params, tx.init(params)), 1)[0], kept[5])


def test_the_other_slot_counts_only_where_it_verifies(open_store, place):
    kept = start(open_store, 4)
    directory = StoreDirectory.open(place / "store")
    slot = directory.committed_slot()
    other = directory.chunk_file("b" if slot == "a" else "a", 1, 0, "mu")
    held = other.read_bytes()
    other.write_bytes(b"\1" + held[1:])
    store, tx = opened(open_store)
    params, state = kept[3]
    with pytest.raises(
        jaxinf.StaleStateError, match=r"overwritten in part \(leaf w, mu, chunk 0"
    ):
        tx.update(params, state, params)
    store.close()
    assert directory.committed_slot() == slot
    other.write_bytes(held)
    store, tx = opened(open_store)
    trained(tx, kept[3], 1)
    assert store.step == 4


def test_rolls_back_to_a_checkpoint_and_says_so(open_store, caplog):
    store, tx = opened(open_store)
    params = PARAMS
    first = trained(tx, (params, tx.init(params)), 2)
    store.checkpoint("mine", state=first[-1][1])
    whole = trained(tx, first[-1], 4)
    store.close()
    store, tx = opened(open_store)
    tx.init(params)
    rest = trained(tx, first[-1], 4)
    assert "rolled back from step 6 to step 2 (checkpoints/mine)" in caplog.text
    assert store.step == 6
    assert_same(rest, whole)


def test_a_kept_number_of_a_run_that_went_back_is_replaced(open_store):
    store, tx = opened(open_store)
    kept = trained(tx, (PARAMS, tx.init(PARAMS)), 3)
    store.checkpoint()
    (before,) = store.checkpoints()
    store.close()
    store, tx = opened(open_store)
    tx.init(PARAMS)
    again = trained(tx, kept[1], 1)[0]
    assert store.checkpoint(state=again[1]) == "3"
    (after,) = store.checkpoints()
    assert (after.name, before.name) == ("3", "3")
    assert after.committed_at != before.committed_at


def test_restart_keeps_the_old_run_and_begins_anew(open_store, caplog):
    kept = start(open_store)
    store = open_store()
    tx = jaxinf.smart_update(optax.adam(1e-2), store, on_existing="restart")
    state = jax.jit(tx.init)(PARAMS)
    assert int(state.step) == store.step == 0
    assert_same(trained(tx, (PARAMS, state), 2)[-1], kept[2])
    assert [i.name for i in store.checkpoints()] == ["step-3-before-restart"]
    assert "kept at step 3" in caplog.text
    tx.init(PARAMS)
    assert sorted(i.step for i in store.checkpoints()) == [2, 3]
    # A state that is restored over the new one goes back to its step.
    trained(tx, kept[3], 1)
    assert "from step 0 to step 3 (checkpoints/step-3-before-" in caplog.text
    assert store.step == 4


def test_an_existing_store_is_refused(open_store):
    start(open_store)
    for tx, on_existing, message in (
        (optax.sgd(0.1), "restart", "move the store aside"),
        (optax.adam(1e-2), "error", r'found one at step 3; on_existing="resume"'),
    ):
        store = open_store()
        tx = jaxinf.smart_update(tx, store, on_existing=on_existing)
        with pytest.raises(jaxinf.StoreMismatchError, match=message):
            tx.init(PARAMS)
        assert store.step == 3
        assert not store.checkpoints()
