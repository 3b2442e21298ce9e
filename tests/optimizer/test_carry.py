"""What a step carries: refusals, its files, and where they go with the step."""

from collections import OrderedDict

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from copies import copied
from raw_stores import flip_bit
from small_stores import same

import jaxinf
from jaxinf.cli import main
from jaxinf.store import open_for_writing, verify_step

PARAMS = {"w": jnp.linspace(-1.0, 1.0, 64), "b": jnp.ones(3)}


def carry_of(number):
    return {
        "stats": {"mean": jnp.full((2, 3), number, jnp.bfloat16)},
        "keys": jax.random.split(jax.random.key(number), 2),
        "seen": jnp.asarray([number > 0, False]),
        "none": jnp.zeros((0, 4)),
        "n": np.int32(number),
    }


def train(path, numbers, carry=carry_of, **options):
    with jaxinf.open_store(path, **options) as store:
        tx = jaxinf.smart_update(optax.adam(1e-2), store)
        params = store.params(like=PARAMS) if store.exists else PARAMS
        state = tx.init(params)
        for number in numbers:
            given = {} if carry is None else {"carry": carry(number)}
            updates, state = tx.update(PARAMS, state, params, **given)
            params = optax.apply_updates(params, updates)


def carried(path, **options):
    with jaxinf.open_store(path, **options) as store:
        return store.carried(like=carry_of(0))


def damages(path):
    """All damage of the slots and checkpoints that have a record."""
    directory = open_for_writing(path)
    steps = [file.parent for file in path.glob("*/*/commit.json")]
    return [damage for step in steps for damage in verify_step(directory, step)]


def test_it_is_that_of_the_last_step_that_was_not_skipped(place):
    train(place / "s", [1, 2, 3, 4], durability=3)
    same(carried(place / "s"), carry_of(4))
    assert not damages(place / "s")
    with jaxinf.open_store(place / "s") as store:
        tx = jaxinf.smart_update(optax.adam(1e-2), store, nonfinite="skip")
        params = store.params(like=PARAMS)
        bad = jax.tree.map(lambda x: x * jnp.nan, PARAMS)
        tx.update(bad, tx.init(params), params, carry=carry_of(5))
        same(store.carried(like=carry_of(0)), carry_of(4))


@pytest.mark.parametrize(
    ("message", "carry"),
    [
        (r"carry/x: .*found str", {"x": "text"}),
        (r"carry/x: .*complex64", {"x": jnp.zeros(1, jnp.complex64)}),
        (r"64 MiB", np.zeros((1 << 24) + 1, np.float32)),
        (r"carry/1: .*found two", OrderedDict([(1, 5), ("1", 6)])),
    ],
    ids=["no array", "dtype", "bytes", "one name"],
)
def test_what_cannot_be_carried_is_refused_by_name(place, message, carry):
    with jaxinf.open_store(place / "s") as store:
        tx = jaxinf.smart_update(optax.adam(1e-2), store)
        state = tx.init(PARAMS)
        with pytest.raises((ValueError, TypeError), match=message):
            tx.update(PARAMS, state, PARAMS, carry=carry)
        _, state = tx.update(PARAMS, state, PARAMS)
        store.wait(state)
        assert store.step == 1


def test_what_is_not_there_is_refused_by_name(place):
    train(place / "plain", [1], carry=None)
    train(place / "s", [1])
    with pytest.raises(jaxinf.JaxinfError, match=r"found none.*carry=tree"):
        carried(place / "plain")
    with (
        jaxinf.open_store(place / "s") as store,
        pytest.raises(jaxinf.JaxinfError, match=r"its arrays, keys .*found x"),
    ):
        store.carried(like={"x": jnp.zeros(3)})


def test_a_checkpoint_a_copy_and_an_export_have_it(place):
    path = place / "s"
    train(path, [1, 2], keep_steps=(1, 4))
    train(path, [7], carry=lambda number: {"n": number})
    assert not damages(path)
    copied(path, place / "copy")
    url = f"file://{place}/url"
    words = ["checkpoint", "export", str(path), url]
    assert main([*words, "--checkpoint", "2"]) == 0
    copied(url, place / "made")
    same(carried(place / "made"), carry_of(2))
    for found in (place / "copy", place / "made"):
        assert not damages(found)
    with jaxinf.open_store(place / "copy") as store:
        assert int(store.carried(like={"n": 0})["n"]) == 7
    same(carried(path, restore="1"), carry_of(1))
    assert not damages(path)
    train(path, [5])
    same(carried(path), carry_of(5))
    assert not damages(path)


@pytest.mark.parametrize("name", ["n/c", "n/zarr.json", "stats.mean/c/0/0"])
def test_a_flipped_bit_is_found(place, name):
    name = f"carry.{name}"
    train(place / "s", [1])
    file = place / "s" / "current" / name
    flip_bit(file)
    assert [d.what for d in damages(place / "s")] == [name]
    if not name.endswith("json"):
        with pytest.raises(jaxinf.JaxinfError, match="CRC-32C"):
            carried(place / "s")


def test_a_link_in_its_place_is_not_followed(place):
    path, other = place / "s", place / "other"
    train(path, [1, 2])
    for slot in (path / "slots").iterdir():
        (slot / "carry.seen" / "c").rename(other)
        (slot / "carry.seen" / "c").symlink_to(other)
        break
    held = {file.name: file.read_bytes() for file in other.iterdir()}
    train(path, [3, 4])
    assert held == {file.name: file.read_bytes() for file in other.iterdir()}
    assert not damages(path)
    current = path / "current" / "carry.seen" / "c"
    current.rename(place / "moved")
    current.symlink_to(place / "moved")
    with pytest.raises(jaxinf.JaxinfError, match="a symbolic link"):
        carried(path)
    with jaxinf.open_store(path) as store, pytest.raises(jaxinf.JaxinfError):
        store.checkpoint("no")
