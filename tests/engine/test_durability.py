"""Commits at every step, every k steps, or only on request."""

import shutil
import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import small_stores
from families import family

import jaxinf
from jaxinf.errors import StoreError

PAGE = 4096


def reopened(drive, driver, place):
    """Opens the state that a crash at this moment would leave."""
    copy = place / "crashed"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(driver.store.path, copy, symlinks=True)
    return drive(copy)


@pytest.mark.parametrize(
    ("durability", "committed"),
    family(
        [("step", 7), (1, 7), (2, 6), (3, 6), (7, 7), (100, 0), ("checkpoint", 0)],
        short=[("step", 7), (3, 6), ("checkpoint", 0)],
    ),
)
def test_a_crash_costs_the_steps_since_the_last_commit(
    drive, place, durability, committed
):
    driver = drive(durability=durability).init().steps(7)
    driver.engine.join()
    assert driver.store.step == committed
    crashed = reopened(drive, driver, place)
    assert crashed.store.step == committed
    crashed.init().check(committed)
    crashed.steps(2).check(committed + 2)
    crashed.close()
    driver.check(7)
    assert driver.store.step == 7
    driver.close()
    assert drive(driver.store.path).init().at == 7


def test_the_committed_slot_is_not_touched_between_commits(drive):
    driver = drive(durability=5).init().steps(5)
    driver.engine.join()
    committed = driver.store.path / "current"
    before = driver.found(committed.resolve())
    driver.steps(4)
    driver.engine.join()
    for name, arrays in driver.found(committed.resolve()).items():
        for held, then in zip(arrays, before[name], strict=True):
            np.testing.assert_array_equal(held, then)
    driver.check(9)


@pytest.mark.parametrize("show", ["wait", "close", "snapshot", "params"])
def test_what_shows_the_store_commits_first(drive, show):
    driver = drive(durability="checkpoint").init().steps(3)
    store = driver.store
    if show == "wait":
        store.wait()
    elif show == "close":
        store.close()
        assert driver.opened.commit.step == 3
        return
    elif show == "snapshot":
        with store.snapshot() as path:
            driver.check(3, path)
    else:
        like = {
            name: jax.ShapeDtypeStruct(shape, jaxinf.store.dtype_of(dtype))
            for name, (shape, dtype) in driver.leaves.items()
        }
        wanted = driver.expected(3)["bias"][0]
        np.testing.assert_array_equal(store.params(like)["bias"], wanted)
    assert store.step == 3


def test_a_commit_carries_the_payload_of_its_own_step(drive):
    driver = drive(durability=10).init()
    for step in range(1, 5):
        driver.store.annotate(step, {"at": step})
        driver.step()
    driver.store.wait()
    assert driver.store.payload == {"at": 4}
    with pytest.raises(ValueError, match="the store is at step 4"):
        driver.store.annotate(4, None)


def test_a_step_given_up_over_uncommitted_ones_says_what_is_lost(drive):
    driver = drive(durability=10).init().steps(3)
    driver.update([0])
    with pytest.raises(StoreError, match="step 4 was given up") as caught:
        driver.engine.opened.abandon()
    note = "3 finished steps since the commit of step 0 are lost"
    assert any(note in text for text in caught.value.__notes__)
    with pytest.raises(StoreError, match="step 4 was given up"):
        driver.close()
    drive(driver.store.path).init().check(0)


def test_the_first_step_after_a_commit_can_be_given_up(drive):
    driver = drive(durability=2).init().steps(2)
    driver.update([0, 1])
    driver.engine.opened.abandon()
    driver.steps(3).check(5)


def test_an_error_says_how_many_steps_it_costs(drive):
    driver = drive(durability=10).init().steps(4)
    driver.engine.join()
    driver.engine.health.fail(error := OSError("the drive is gone"))
    with pytest.raises(OSError, match="the drive is gone") as caught:
        driver.close()
    assert caught.value is error
    assert "4 finished steps since the commit of step 0" in error.__notes__[0]


def test_closing_in_the_middle_of_a_step_over_uncommitted_ones(drive, caplog):
    driver = drive(durability=10).init().steps(2)
    driver.update([0])
    driver.close()
    assert "step 3 is incomplete" in caplog.text
    assert "2 finished steps" in caplog.text
    drive(driver.store.path).init().check(0)


@pytest.mark.parametrize("durability", ["stepp", 0, -1, 1.5, True])
def test_durability_is_checked(tmp_path, durability):
    with pytest.raises(ValueError, match="durability="):
        jaxinf.open_store(tmp_path / "store", durability=durability)
    assert not (tmp_path / "store").exists()


def run_transform(path, bad_steps, num_steps=9, **options):
    """Trains with some non-finite gradients; returns the params."""
    nonfinite = options.pop("nonfinite")
    params = {"a": jnp.ones(PAGE + 3), "b": jnp.ones((3, 5)), "c": jnp.float32(2)}
    with jaxinf.open_store(path, **options) as store:
        tx = jaxinf.smart_update(optax.adam(0.1), store, nonfinite=nonfinite)
        state = tx.init(params)

        @jax.jit
        def step(params, state, scale):
            grads = jax.tree.map(lambda p: p * 0.5, params)
            grads["b"] = grads["b"] * scale
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        for number in range(num_steps):
            scale = jnp.nan if number in bad_steps else 1.0
            params, state = jax.block_until_ready(step(params, state, scale))
        return jax.device_get(params), int(state.step), int(state.skipped_steps)


@pytest.mark.parametrize("durability", family([4, "checkpoint"], short=[4]))
def test_a_gradient_that_is_not_finite_is_skipped_in_place_too(tmp_path, durability):
    options = {"bad_steps": (2, 5), "nonfinite": "skip"}
    wanted = run_transform(tmp_path / "each", **options)
    found = run_transform(tmp_path / "some", durability=durability, **options)
    assert wanted[1:] == found[1:] == (7, 2)
    jax.tree.map(np.testing.assert_array_equal, wanted[0], found[0])


def test_a_gradient_that_is_not_finite_costs_no_step_before_it(tmp_path):
    path = tmp_path / "store"
    with pytest.raises(
        jax.errors.JaxRuntimeError, match=r"gradient of b; .* at step 6"
    ):
        run_transform(path, bad_steps=(6,), nonfinite="error", durability=4)
    with jaxinf.open_store(path) as store:
        assert store.step == 6


@pytest.mark.parametrize("ask", ["wait", "params", "checkpoint", "read"])
def test_nothing_is_read_of_a_step_that_is_half_over_another(drive, ask):
    driver = drive(durability=10).init().steps(3)
    driver.update([0])
    store = driver.store
    like = {n: jax.ShapeDtypeStruct(s, d) for n, (s, d) in driver.leaves.items()}
    calls = {
        "wait": store.wait,
        "params": lambda: store.params(like),
        "checkpoint": store.checkpoint,
        "read": lambda: store.read("trace", "bias"),
    }
    with pytest.raises(StoreError, match="step 4 is under way, and the steps before"):
        calls[ask]()
    driver.update(range(1, len(driver.leaves)))
    driver.finish()
    driver.check(4)


@pytest.mark.parametrize(
    "change", family(["other", "sign of zero"], short=["sign of zero"])
)
def test_params_that_differ_in_a_chunk_of_many_parts(tmp_path, change):
    """Parts of the chunk are overwritten before all of it has been compared."""
    params = {"w": jnp.zeros((60, 4096))}
    with small_stores.open_store(
        tmp_path / "store", durability=9, memory_bytes=1 << 19, num_workers=2
    ) as store:
        tx = jaxinf.smart_update(optax.sgd(0.0, momentum=0.9), store)
        state = tx.init(params)
        for _ in range(3):
            updates, state = tx.update(params, state, params)
            params = optax.apply_updates(params, updates)
        if change == "other":
            params["w"] = params["w"].at[0, 0].set(1.0)
            with pytest.raises(jaxinf.DivergedParamsError):
                tx.update(params, state, params)
            return
        params["w"] = params["w"].at[40, 7].set(-0.0)
        tx.update(params, state, params)


def test_params_of_which_zeros_differ_are_compared_in_pieces(tmp_path):
    params = {"w": jnp.zeros((1024, 4096))}  # one chunk of 16 MiB
    with jaxinf.open_store(tmp_path / "store", memory_bytes="64MiB") as store:
        tx = jaxinf.smart_update(optax.sgd(0.0, momentum=0.9), store)
        state = tx.init(params)
        for sign in (1, -1):
            given = {"w": sign * params["w"]}
            tracemalloc.start()
            try:
                _, state = tx.update(params, state, given)
                store.wait(state)
                _, peak_bytes = tracemalloc.get_traced_memory()
            finally:
                tracemalloc.stop()
            assert peak_bytes < 40 << 20


def test_a_payload_for_a_step_that_is_ending_is_refused(drive):
    driver = drive().init()
    driver.update()
    driver.finish()
    with pytest.raises(ValueError, match="expected a step still to be committed"):
        driver.store.annotate(1, {"late": True})
