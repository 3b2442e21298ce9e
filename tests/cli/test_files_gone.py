"""Files of a store that are gone, edited or elsewhere; exports of it."""

import shutil

import jax
import jax.numpy as jnp
import optax
import pytest
from families import family
from raw_stores import edit
from small_stores import train

import jaxinf

PARAMS = {"w": jnp.ones((64, 3)), "b": jnp.ones(7)}


def go_on(path, num_steps=1, **options):
    with jaxinf.open_store(path, **options) as store:
        *_, state = train(store, optax.adamw(1e-3), PARAMS, [PARAMS] * num_steps)
        store.wait(state)
        return store.step


@pytest.mark.parametrize(
    "what", family(["chunk", "array", "slot", "links"], short=["slot", "links"])
)
def test_a_copy_makes_missing_files_of_the_spare_slot_again(place, run, what):
    path, new = place / "store", place / "new"
    (place / "drive").mkdir()
    go_on(path, 3, csds=[place / "drive"] * (what == "links"))
    current = (path / "current").readlink().name
    spare = path / "slots" / {"a": "b", "b": "a"}[current]
    if what == "links":
        for slot in "ab":
            (path / "slots" / slot / "nu.w" / "c" / "0" / "0").unlink()
        found = run("verify", path)
        assert found.status == 1
        assert f"store copy {path} NEW" in " ".join(found.out.split())
    elif what == "chunk":
        (spare / "nu.w" / "c" / "0" / "0").unlink()
    else:
        shutil.rmtree(spare / "mu.w" if what == "array" else spare)
    if what != "links":
        with pytest.raises(jaxinf.JaxinfError, match=r"jaxinf store copy OLD NEW"):
            go_on(path)
    done = run("store", "copy", path, new)
    assert done.status == 0, done.err
    assert go_on(new, 3) == 6
    assert run("verify", new).status == 0


@pytest.mark.filterwarnings("ignore")
def test_the_step_after_the_last_number_is_refused(place):
    go_on(place / "store")
    edit(place / "store/current/commit.json", step=2**31 - 1)
    errors = jaxinf.JaxinfError, jax.errors.JaxRuntimeError
    with pytest.raises(errors, match=r"expected a step to follow, found step 2147"):
        go_on(place / "store")
    with jaxinf.open_store(place / "store") as store:
        assert store.step == 2**31 - 1
