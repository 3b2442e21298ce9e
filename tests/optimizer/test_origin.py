"""What a state comes from: an update, an `init`, or an update that was discarded."""

import shutil
import warnings
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from families import family
from raw_stores import memory_directory

import jaxinf

pytestmark = pytest.mark.filterwarnings("ignore:.*given no params")

PARAMS = {"w": jnp.linspace(-1, 1, 77).reshape(7, 11), "b": jnp.linspace(0, 2, 11)}
FRESH = jax.tree.map(jnp.cos, PARAMS)
REFUSED = (jaxinf.StoreMismatchError, jax.errors.JaxRuntimeError)


def opened(open_store, **options):
    store = open_store(**options)
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
@pytest.mark.parametrize(
    "how", ["eager", "donated", "scan", pytest.param("jit", marks=pytest.mark.long)]
)
def test_fresh_params_never_train_on_an_old_state(how, open_store, place, kept, after):
    """A run is fresh, takes the store's params, or restores its own; each without."""

    def stepped(*arguments):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found = HOWS[how](*arguments)
        said = [str(one.message) for one in caught]
        return found, any("update was given no params" in one for one in said)

    said = r"no params, and a state of init.* of step 2, .*open it again.*params\(like"
    refused(open_store, place, how, FRESH, said, gives=False)
    refused(open_store, place, how, FRESH, "the params are not those", gives=True)
    store, tx = opened(open_store)
    state = tx.init(store.params(like=FRESH))
    assert int(state.origin) == 0
    found, is_told = stepped(tx, store.params(like=FRESH), state, False)
    assert_same(on_host(found), after)
    store.close()
    assert is_told  # the state could be restored
    for gives in (False, True):
        store, tx = opened(open_store)
        assert int(tx.init(FRESH).origin) == 1
        found, is_told = stepped(tx, *copied(kept[2]), gives)
        assert_same(on_host(found), after)
        store.close()
        assert is_told == (not gives)


class Deferred(jaxinf.typing.DeferredArray):
    def read(self):
        raise AssertionError("init on a store with steps reads no deferred leaf")


def test_init_compares_what_it_sees_and_reads_nothing(open_store, kept):
    assert len(kept) == 3
    store, tx = opened(open_store)
    params = store.params(like=PARAMS)
    before = store._engine.opened.meters.snapshot()
    one = {**params, "w": params["w"].at[6, 10].add(1e-7)}
    for given, origin in ((params, 0), (one, 1), (FRESH, 1), (on_host(params), 0)):
        assert int(tx.init(given).origin) == origin
        assert int(jax.jit(tx.init)(given).origin) == origin
    deferred = jax.tree.map(lambda x: Deferred(x.shape, x.dtype), PARAMS)
    state = tx.init(deferred)
    assert int(state.origin) == 1
    assert store._engine.opened.meters.snapshot() == before
    params, state = eager(tx, params, state, True)
    assert int(state.origin) == 0
    _, state = eager(tx, params, state, False)
    assert int(state.step) == 4


# --- discarded updates ---------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "gives"),
    family(
        product(["eager", "jit"], [True, False]),
        short=[("eager", True), ("jit", False)],
    ),
)
def test_discarded_updates_leave_no_trace(how, gives, open_store, run, caplog):
    whole = run[1][2]
    with open_store("run") as store:
        tx = jaxinf.smart_update(optax.adam(1e-2), store)
        params, state = HOWS[how](tx, PARAMS, tx.init(PARAMS), gives)
        for factor in range(50 if how == "jit" and gives else 3):
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


@pytest.mark.filterwarnings("default:.*given no params")
def test_params_that_are_not_given_are_told_of_once_a_run(open_store, kept, recwarn):
    store, tx = opened(open_store)
    for _ in range(3):
        tx.update(FRESH, copied(kept[2])[1])
    store._engine.binding.release()  # as after Ctrl-C
    tx.update(FRESH, copied(kept[2])[1])
    said = [str(one.message) for one in recwarn]
    assert sum("update was given no params" in one for one in said) == 1


def test_a_state_that_was_given_up_is_no_state_of_its_step(open_store):
    """The first of two updates is kept, and the second is discarded."""
    store, tx = opened(open_store)
    state = tx.init(PARAMS)
    _, first = eager(tx, PARAMS, state, False)
    other, second = eager(tx, FRESH, state, False)
    for stale, said in (
        (first, r"a step 1 that was given up: .* made another step 1\. Go on with"),
        (state._replace(step=state.step + 7), "of step 7, the store is at step 2"),
    ):
        with pytest.raises(jaxinf.StaleStateError, match=said):
            tx.update(FRESH, stale)
        store.close()
        store, tx = opened(open_store)
        second = tx.init(store.params(like=PARAMS))
        other, second = eager(tx, other, second, False)
    assert store.step == 3


def test_only_the_last_update_may_have_been_discarded(open_store):
    store, tx = opened(open_store)
    params, state = PARAMS, tx.init(PARAMS)
    kept = []
    for _ in range(3):
        kept.append((params, state))
        params, state = eager(tx, params, state, True)
    with pytest.raises(
        jaxinf.StaleStateError, match="of step 1, the store is at step 3"
    ):
        eager(tx, *kept[1], gives=True)
    store.close()
    store, tx = opened(open_store)
    assert store.step == 3


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
