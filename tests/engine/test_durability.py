"""Commits: their order, at every step, every k steps, or only on request."""

import shutil
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import small_stores
from families import family
from inject import at_each_call

import jaxinf
from jaxinf.errors import StoreError


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
    driver.engine.steps.join()
    assert driver.store.step == committed
    shutil.copytree(driver.store.path, place / "crashed", symlinks=True)
    crashed = drive(place / "crashed")
    assert crashed.store.step == committed
    crashed.init().check(committed)
    crashed.steps(2).check(committed + 2)
    crashed.close()
    driver.check(7)
    driver.close()
    assert drive(driver.store.path).init().at == 7


@pytest.mark.parametrize("show", ["wait", "close", "snapshot", "params"])
def test_what_shows_the_store_commits_first(drive, show):
    driver = drive(durability="checkpoint").init().steps(3)
    store = driver.store
    if show == "wait":
        store.wait()
    elif show == "close":
        store.close()
        assert driver.files.commit.step == 3
        return
    elif show == "snapshot":
        with store.snapshot() as path:
            driver.check(3, path)
    else:
        wanted = driver.expected(3)["bias"][0]
        np.testing.assert_array_equal(store.params(like(driver))["bias"], wanted)
    assert store.step == 3


def like(driver):
    return {
        name: jax.ShapeDtypeStruct(shape, jaxinf.store.dtype_of(dtype))
        for name, (shape, dtype) in driver.leaves.items()
    }


def test_nothing_is_read_of_a_step_that_is_half_over_another(drive):
    driver = drive(durability=10).init().steps(3)
    driver.update([0])
    store = driver.store
    for call in (
        store.wait,
        lambda: store.params(like(driver)),
        store.checkpoint,
        lambda: store.read("trace", "bias"),
    ):
        with pytest.raises(StoreError, match="step 4 is under way, and the steps bef"):
            call()
    driver.update(range(1, len(driver.leaves)))
    driver.finish()
    driver.check(4)


@pytest.mark.parametrize("is_other", [True, False], ids=["other", "sign of zero"])
def test_params_that_differ_in_a_chunk_of_many_parts(open_store, is_other):
    """Parts of the chunk are overwritten before all of it has been compared."""
    store = open_store(durability=9, memory_bytes=1 << 19, num_workers=2)
    zeros, sgd = {"w": jnp.zeros((60, 4096))}, optax.sgd(0.0, momentum=0.9)
    tx, params, state = small_stores.train(store, sgd, zeros, [zeros] * 3)
    changed = {"w": params["w"].at[40, 7].set(1.0 if is_other else -0.0)}
    if not is_other:
        tx.update(params, state, changed)
        return
    with pytest.raises(jaxinf.DivergedParamsError):
        tx.update(params, state, changed)


ORDER = ["remove_record", "write", "sync", "write_record", "flip"]


@pytest.mark.parametrize("num_csds", [0, 2])
def test_the_order_of_a_commit(drive, monkeypatch, num_csds):
    """The record of the spare slot goes first; the committed slot is not written."""
    driver = drive(num_csds=num_csds).init().steps(1)
    driver.store.wait()
    files, calls, slots = driver.files, [], set()

    def note(name, *arguments):
        calls.append(name)
        if name == "write":
            slots.update(*({*"ab"} & {*one.file.parts} for one in arguments[0]))
            assert len([*driver.store.path.glob("slots/?/commit.json")]) == 1

    for name in ORDER:
        for owner in files.csds if name == "write" else [files.directory]:
            at_each_call(monkeypatch, owner, name, partial(note, name))
    for step in range(2, 5):
        driver.step()
        driver.store.wait()
        assert calls == sorted(calls, key=ORDER.index)
        assert {*calls} == {*ORDER}
        assert slots == {"ba"[step % 2 == 0]}
        calls.clear()
        slots.clear()
