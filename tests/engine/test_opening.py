"""Opening and making stores: refused cases with their messages, and accepted ones."""

import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxinf
from jaxinf.errors import StoreFormatError, StoreLockedError, StoreMismatchError
from jaxinf.store import StoreLock

# --- a place -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"master": "device"}, "expected one of 'auto', 'none'"),
        ({"state": "int4"}, "state='int4': expected"),
        ({"csds": ["no"]}, "no: expected a directory on a mounted drive, found noth"),
        ({"csds": ["file"]}, "file: expected a directory on a mounted drive, found a"),
        ({"csds": ["dir", "dir/"]}, "the same root is given twice"),
        *(({"durability": x}, "durability=") for x in ("stepp", 0, -1, 1.5, True)),
        *(({"memory_bytes": x}, "memory_bytes=") for x in ("4 elephants", 0, 1.5)),
    ],
)
def test_bad_options(place, options, message):
    (place / "file").write_text("")
    (place / "dir").mkdir()
    if "csds" in options:
        options = {"csds": [f"{place}/{root}" for root in options["csds"]]}
    with pytest.raises(ValueError, match=message):
        jaxinf.open_store(place / "store", **options)
    assert not (place / "store").exists()


def test_places_of_something_else(place):
    (place / "thesis.tex").write_text("")
    for path in (place / "thesis.tex", place / "thesis.tex" / "below"):
        with pytest.raises(NotADirectoryError, match="give another path"):
            jaxinf.open_store(path)
    with pytest.raises(StoreFormatError, match=r"nor emptiness \(thesis\.tex"):
        jaxinf.open_store(place)
    assert [p.name for p in place.iterdir()] == ["thesis.tex"]


@pytest.mark.parametrize("durability", ["step", 2])
def test_a_run_whose_lock_was_removed_commits_nothing_more(
    drive, monkeypatch, durability
):
    """The second writer goes on, and its commits stay."""
    first = drive(durability=durability).init().steps(2)
    first.store.wait()
    with pytest.raises(StoreLockedError, match="locked by this very process"):
        StoreLock(first.store.path)
    (first.store.path / "lock").unlink()
    # As in another process, which knows of no open store.
    monkeypatch.setattr("jaxinf.engine.open_stores._open_stores", {})
    second = drive(first.store.path).init().steps(1)
    second.check(3)
    with pytest.raises(StoreLockedError, match="found it removed or replaced"):
        first.steps(4).store.wait()
    first.store.close()  # the failure is known
    second.check(3)
    second.steps(2).check(5)


def test_a_store_that_lost_current_is_not_made_anew(drive, place):
    drive().init().steps(3).close()
    (place / "store" / "current").unlink()
    with pytest.raises(StoreFormatError, match="was the store copied without its sym"):
        jaxinf.open_store(place / "store")
    (place / "store" / "current").symlink_to("slots/b")
    drive().init().check(3)


# --- copies, roots -----------------------------------------------------------------


def test_copies_without_its_csds_take_nothing_from_the_original(drive, place):
    """A manifest alone looks like a store whose creation was interrupted."""
    driver = drive(num_csds=2).init().steps(2)
    driver.store.checkpoint()
    driver.close()
    shutil.copytree(driver.store.path, place / "copy", symlinks=True)
    (place / "half").mkdir()
    shutil.copy(driver.store.path / "jaxinf.json", place / "half")
    for name in ("copy", "half"):
        with pytest.raises(StoreFormatError, match=r"a copy of .*, whose chunks"):
            drive(name)
    again = drive().init()
    again.check(2)
    again.check(2, driver.store.path / "checkpoints/2")


def test_a_store_may_move(drive, place):
    driver = drive(num_csds=2).init().steps(2)
    driver.close()
    driver.store.path.rename(place / "moved")
    moved = drive(place / "moved").init()
    moved.steps(1).check(3)
    moved.store.checkpoint()
    moved.steps(2).check(5)


def test_csd_roots_of_a_store(drive, place):
    drive(num_csds=2).init().steps(1).close()
    drive("alone").init().close()
    (place / "other").mkdir()
    for name, csds, message in (
        ("store", ["other"], "leave csds out when opening an existing store"),
        ("store", ["csd1", "csd0"], "given were"),
        ("alone", ["other"], "CSD roots are the store itself, given"),
    ):
        with pytest.raises(StoreMismatchError, match=message):
            jaxinf.open_store(place / name, csds=[place / root for root in csds])
    (place / "csd1").rename(place / "away")
    with pytest.raises(StoreFormatError, match=r"CSD 1 of .* be at .*csd1"):
        jaxinf.open_store(place / "store")
    (place / "away").rename(place / "csd1")
    drive(num_csds=2).init().check(1)


# --- one process, one path, one store ------------------------------------------------

PARAMS = {"w": jnp.ones((40, 30))}


def test_a_second_opening_gets_the_same_store(open_store, place):
    first = open_store()
    tx = jaxinf.smart_update(optax.adam(1e-2), first)
    state = tx.init(PARAMS)
    (place / "link").symlink_to(place / "store")
    second = open_store("link")
    assert open_store() is second is first
    _, state = tx.update(PARAMS, state, PARAMS)
    second.wait(state)
    assert first.step == 1
    second.close()
    with pytest.raises(jaxinf.StoreClosedError, match="open it again"):
        _ = first.step
    with open_store() as third:
        assert third is not first
        jaxinf.close(place / "store")
        jaxinf.close(place / "store")
        with pytest.raises(jaxinf.StoreClosedError):
            third.check()


def test_options_of_the_open_store(open_store, place):
    first = open_store(memory_bytes=1 << 20, durability=2)
    assert open_store(durability=2) is first
    for options, message in (
        ({"memory_bytes": 1 << 21}, "memory_bytes=2097152: the store is open"),
        ({"durability": "step"}, r"with durability=2, .*leave it out, or close"),
        ({"csds": [place]}, "csds="),
        ({"restore": "best"}, "restore='best'"),
        ({"csd": "emulated"}, "csd="),
    ):
        with pytest.raises(ValueError, match=message):
            open_store(**options)
    first.close()


def test_factories_called_in_init_and_in_update(place):
    """Some programs make their optimizer wherever they need it."""

    def make():
        return jaxinf.smart_update(optax.sgd(0.5), place / "store")

    shapes = jax.eval_shape(lambda p: make().init(p), PARAMS)
    state = jax.jit(lambda p: make().init(p))(PARAMS)
    assert jax.tree.structure(shapes) == jax.tree.structure(state)
    updates, state = jax.jit(lambda *given: make().update(*given))(
        PARAMS, state, PARAMS
    )
    np.testing.assert_array_equal(updates["w"], -0.5)
    assert int(state.step) == 1
    jaxinf.close(place / "store")


def test_a_store_that_failed_is_opened_anew(place, caplog):
    tx = jaxinf.smart_update(optax.adam(1e-2), place / "store")
    state = tx.init(PARAMS)
    with pytest.raises(jaxinf.NonFiniteGradientError):
        tx.update({"w": jnp.full((40, 30), jnp.nan)}, state, PARAMS)
    tx = jaxinf.smart_update(optax.adam(1e-2), place / "store")
    assert "was stopped by NonFiniteGradientError" in caplog.text
    _, state = tx.update(PARAMS, tx.init(PARAMS), PARAMS)
    assert int(state.step) == 1
    jaxinf.close(place / "store")
