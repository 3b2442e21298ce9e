"""A program that begins again: which step its state is of."""

import signal
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax_loop
import pytest
from orbax_loop import NUM_STEPS, Killed, train
from small_stores import same

import jaxinf

PARAMS = {"w": jnp.linspace(-1, 1, 77).reshape(7, 11), "b": jnp.linspace(0, 2, 11)}
FRESH = jax.tree.map(jnp.cos, PARAMS)
REFUSED = (jaxinf.StoreMismatchError, jax.errors.JaxRuntimeError)


def opened(open_store, name="store", **options):
    store = open_store(name, **options)
    return store, jaxinf.smart_update(optax.adam(1e-2), store)


def eager(tx, params, state):
    updates, state = tx.update(jax.tree.map(jnp.sin, params), state, params)
    return optax.apply_updates(params, updates), state


def scanned(tx, params, state):
    def step(carry, _):
        return eager(tx, *carry), None

    return jax.jit(lambda carry: jax.lax.scan(step, carry, None, 1)[0])((params, state))


HOWS = {
    "eager": eager,
    "jit": jax.jit(eager, static_argnums=0),
    "donated": jax.jit(eager, static_argnums=0, donate_argnums=(1, 2)),
    "scan": scanned,
}


def copied(tree):
    return jax.tree.map(jnp.array, tree)


def on_host(tree):
    return jax.tree.map(np.asarray, tree)


def trained(tx, run, num_steps):
    kept = []
    for _ in range(num_steps):
        run = HOWS["jit"](tx, *run)
        kept.append(on_host(run))
    return kept


def start(open_store, num_steps=3, name="store", **options):
    store, tx = opened(open_store, name=name, **options)
    begun = PARAMS, tx.init(PARAMS)
    kept = [on_host(begun), *trained(tx, begun, num_steps)]
    store.wait()
    store.close()
    return kept


def names(store):
    return [info.name for info in store.checkpoints()]


@pytest.mark.long
@pytest.mark.parametrize("how", ["eager", "donated", "scan", "jit"])
def test_fresh_params_never_train_on_an_old_state(how, open_store, place):
    """A run is fresh, takes the store's params, or restores its own."""
    kept = start(open_store, 3, name="whole")
    start(open_store, 2)
    store, tx = opened(open_store)
    state = tx.init(FRESH)
    record = (place / "store" / "current" / "commit.json").read_bytes()
    said = "the params are not those"
    with pytest.raises(REFUSED, match=said):
        jax.block_until_ready(HOWS[how](tx, copied(FRESH), state))
    with pytest.raises(jaxinf.StoreMismatchError, match=said):
        store.check()
    store.close()
    assert (place / "store" / "current" / "commit.json").read_bytes() == record
    store, tx = opened(open_store)
    store.checkpoint("two")
    state = tx.init(store.params(like=FRESH))
    found = HOWS[how](tx, store.params(like=FRESH), state)
    same(on_host(found), kept[3])
    store.close()
    store, tx = opened(open_store, restore="two")
    tx.init(FRESH)
    found = HOWS[how](tx, *copied(kept[2]))
    same(on_host(found), kept[3])


def test_an_update_without_params_is_refused(open_store):
    store, tx = opened(open_store)
    state = tx.init(PARAMS)
    with pytest.raises(ValueError, match=r"give them: tx\.update\(grads, state, p"):
        tx.update(FRESH, state)
    assert store.step == 0
    eager(tx, PARAMS, state)


@pytest.mark.parametrize(
    ("how", "durability"), [("eager", "step"), ("jit", "step"), ("jit", 3)]
)
def test_a_state_before_the_last_is_refused(how, durability, open_store):
    """The result of an update was discarded; what it made is the store's step."""
    third = start(open_store, 3, name="whole")[3]
    store, tx = opened(open_store, durability=durability)
    first = HOWS[how](tx, PARAMS, tx.init(PARAMS))
    second = on_host(HOWS[how](tx, *first))
    said = r"is of step 1, the store is at step 2\. Each call .* a step.*compile\(\)"
    with pytest.raises((jaxinf.StaleStateError, *REFUSED), match=said):
        jax.block_until_ready(HOWS[how](tx, *first))
    with pytest.raises(jaxinf.StaleStateError, match=said):
        store.check()
    store, tx = opened(open_store)  # as the error says
    params = store.params(like=PARAMS)
    same(on_host(params), second[0])
    same(on_host(HOWS[how](tx, params, tx.init(params))), third)


# --- a program with checkpoints of its own -------------------------------------


@pytest.mark.parametrize(
    ("compress", "at"),
    [
        (jaxinf.top_k(0.1, error_feedback=True), 2),
        pytest.param(None, 3, marks=pytest.mark.long),
    ],
)
def test_init_then_restore_goes_on_to_the_bit(compress, at, open_store):
    """Continues from the store's step, and from a kept one."""

    def smart(store):
        return jaxinf.smart_update(optax.adam(1e-2), store, compress=compress)

    tx = smart(open_store("whole"))
    whole = trained(tx, (PARAMS, tx.init(PARAMS)), 5)
    store = open_store("parts", keep_steps=1)
    tx = smart(store)
    first = trained(tx, (PARAMS, tx.init(PARAMS)), 3)
    store.close()
    store = open_store("parts", restore=str(at) if at < 3 else None)
    tx = smart(store)
    made = tx.init(PARAMS)
    assert int(made.step) == store.step == at
    same(made, first[at - 1][1])
    rest = trained(tx, first[at - 1], 5 - at)
    assert store.step == 5
    same(rest[-1], whole[-1])


def test_a_step_that_the_store_has_not(open_store):
    kept = start(open_store, 5, name="whole")
    start(open_store, 4)
    store, tx = opened(open_store)
    tx.init(PARAMS)
    params, state = kept[1]
    said = r"step 1, the store is at step 4.*store\.checkpoint\(state=state\) before.*"
    said += r"restore=.*open it again: params = store\.params\(like=params\), state"
    with pytest.raises(jaxinf.StaleStateError, match=said):
        tx.update(params, state, params)
    store.close()
    store, tx = opened(open_store)
    with pytest.raises(jaxinf.StaleStateError, match="not come so far: restore your"):
        tx.update(*kept[5], params=params)
    store.close()
    store, tx = opened(open_store)  # as the error says
    params = store.params(like=params)
    same(trained(tx, (params, tx.init(params)), 1)[0], kept[5])


def test_a_kept_step_is_named_and_gone_on_from(open_store):
    store, tx = opened(open_store, keep_steps=(2, 0))
    kept = trained(tx, (PARAMS, tx.init(PARAMS)), 5)
    assert names(store) == ["2", "4"]
    store.close()
    store, tx = opened(open_store)
    with pytest.raises(jaxinf.StaleStateError, match=r"step is kept: .*restore='2'"):
        eager(tx, *kept[1])
    store, tx = opened(open_store, restore="2", keep_steps=(2, 2))
    tx.init(PARAMS)
    same(trained(tx, kept[1], 3)[-1], kept[4])
    assert names(store) == ["2", "4"]
    trained(tx, kept[4], 1)
    assert names(store) == ["4", "6"]


def test_restart_keeps_the_old_run_and_begins_anew(open_store, caplog):
    kept = start(open_store)
    store = open_store()
    tx = jaxinf.smart_update(optax.adam(1e-2), store, on_existing="restart")
    state = jax.jit(tx.init)(PARAMS)
    assert int(state.step) == store.step == 0
    same(trained(tx, (PARAMS, state), 2)[-1], kept[2])
    assert [i.name for i in store.checkpoints()] == ["step-3-before-restart"]
    assert "kept at step 3" in caplog.text
    tx.init(PARAMS)
    assert sorted(i.step for i in store.checkpoints()) == [2, 3]
    with pytest.raises(REFUSED[1], match="restore='step-3-before-restart'"):
        trained(tx, kept[3], 1)
    with pytest.raises(jaxinf.StaleStateError):
        store.check()


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


# --- with Orbax's manager -------------------------------------------------------------


PROGRAM = Path(orbax_loop.__file__)


def stop(begun):
    if begun == 5:
        raise Killed


def test_losses_are_optax_s_and_a_restart_goes_on_to_the_bit(place):
    plain, whole = train(place / "plain", plain=True), train(place / "whole")
    assert list(whole) == list(plain)
    np.testing.assert_allclose([*whole.values()], [*plain.values()], rtol=1e-4)
    assert whole[5] < whole[1]  # the same batch
    first, rest = train(place / "parts", kill=stop), train(place / "parts")
    assert ([*first], [*rest]) == ([0, 1, 2, 3, 4], [4, 5])
    assert {**first, **rest} == whole
    assert first[4] == rest[4]


@pytest.mark.long
@pytest.mark.parametrize("share", [None, 0.6, 0.8, 0.95])
def test_a_program_that_is_killed_goes_on_to_the_bit(place, run_python, share):
    """At a step, or at a part of its operations on files; its own checkpoint decides.

    A checkpoint that was not complete is one that the program does not find.
    """
    at = "step:5"
    if share is not None:
        count = int(run_python(PROGRAM, place / "counted", "file:0").stdout)
        at = f"file:{int(share * count)}"
    done = run_python(PROGRAM, place / "parts", at, check=False)
    assert done.returncode in (-signal.SIGKILL, 0), done.stderr
    whole, rest = train(place / "whole"), train(place / "parts")
    begun = min(rest, default=NUM_STEPS)
    assert begun >= (2 if share is None else 0)
    assert rest == {n: whole[n] for n in range(begun, NUM_STEPS)}
