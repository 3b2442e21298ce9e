"""`Store.load` and `Store.state`: an optax state into a store, and out of it."""

import shutil
import weakref
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from small_stores import same, steps

import jaxinf
from jaxinf.errors import StaleStateError, StoreMismatchError
from jaxinf.typing import DeferredArray

pytestmark = pytest.mark.optimized

PARAMS = {
    "w": jnp.linspace(-1.0, 1.0, 96 * 64).reshape(96, 64),
    "b": {"c": jnp.ones(3)},
}
CASES = {
    "adamw": lambda: optax.adamw(optax.cosine_decay_schedule(1e-2, 10)),
    "masked": lambda: optax.masked(optax.adam(1e-2), {"w": True, "b": {"c": False}}),
    "multi_transform": lambda: optax.multi_transform(
        {"a": optax.adam(1e-2), "b": optax.sgd(1e-2, momentum=0.9)},
        lambda params: {"w": "a", "b": {"c": "b"}} if "w" in params else None,
    ),
    "injected": lambda: optax.inject_hyperparams(lambda rate: optax.adamw(rate))(1e-2),
    "multi_steps": lambda: optax.MultiSteps(
        optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2)), 3
    ),
    "schedule_free": lambda: optax.contrib.schedule_free_sgd(0.1),
    "noise": lambda: optax.chain(
        optax.add_noise(0.1, 0.5, key=jax.random.key(1)), optax.sgd(1e-2)
    ),
}


def _plain(tx):
    return tx.gradient_transformation() if isinstance(tx, optax.MultiSteps) else tx


def _steps(tx, params, state, first, last):
    def sines(number):
        return lambda params: jax.tree.map(lambda p: jnp.sin(number * p + 0.1), params)

    return steps(tx, params, map(sines, range(first + 2, last + 2)), state)


def _go_on(store, tx, params, state, step, like=PARAMS):
    mine = jaxinf.smart_update(tx, store, updates="float32")
    mine.init(jax.tree.map(jnp.zeros_like, like))
    store.load(params, state, step=step)
    assert store.step == step
    params = store.params(like=like)
    params, _ = _steps(mine, params, mine.init(params), step, step + 3)
    wide = jax.tree.map(lambda p: p.astype(jnp.float32), like)
    return params, store.state(like=_plain(tx).init(wide))


def _uninterrupted(store, tx, params):
    """Params and the state of optax after four steps, and after seven."""
    mine = jaxinf.smart_update(tx, store, updates="float32")
    wide = jax.tree.map(lambda p: p.astype(jnp.float32), params)
    like = jax.eval_shape(_plain(tx).init, wide)
    params, state = _steps(mine, params, mine.init(params), 0, 4)
    middle = store.params(like=wide, state=state), store.state(like=like)
    params, _ = _steps(mine, params, state, 4, 7)
    return middle, (params, store.state(like=like))


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[] if n == "masked" else pytest.mark.long) for n in CASES],
)
def test_a_loaded_state_goes_on_as_the_run_did(open_store, name):
    tx = CASES[name]()
    middle, expected = _uninterrupted(open_store("first"), tx, PARAMS)
    same(_go_on(open_store("second"), tx, *middle, 4), expected)


@pytest.mark.parametrize(
    ("state", "master"),
    [
        ("int8", "auto"),
        pytest.param("bf16", "none", marks=pytest.mark.long),
        pytest.param("fp32", "none", marks=pytest.mark.long),
    ],
)
def test_every_stored_format_goes_on_with_its_bits(open_store, state, master):
    params = jax.tree.map(lambda p: p.astype(jnp.bfloat16), PARAMS)
    tx, formats = optax.adam(1e-2), {"state": state, "master": master}
    middle, expected = _uninterrupted(open_store("first", **formats), tx, params)
    store = open_store("second", **formats)
    same(_go_on(store, tx, *middle, 4, params), expected)


class _Late(DeferredArray):
    """An array that is read when it is needed, and counts those in memory."""

    alive: ClassVar[list[Any]] = []

    def __init__(self, array, before=lambda: None):
        super().__init__(array.shape, array.dtype)
        self._array, self._before = np.asarray(array), before

    def read(self):
        self._before()
        assert not any(one() is not None for one in _Late.alive)
        array = self._array.copy()
        _Late.alive.append(weakref.ref(array))
        return array


def test_leaves_may_be_read_one_by_one(open_store):
    plain = optax.adam(1e-2)
    params, state = _steps(plain, PARAMS, plain.init(PARAMS), 0, 4)
    expected = _steps(plain, params, state, 4, 7)
    late = [
        jax.tree.map(lambda x: _Late(x) if x.ndim else x, tree)
        for tree in (params, state)
    ]
    same(_go_on(open_store(), plain, late[0], late[1], 4), expected)


ADAM = optax.adam(1e-2).init(PARAMS)
WIDE = jax.tree.map(lambda p: np.asarray(p, np.float64), PARAMS)

MUS = [{**ADAM[0].mu, "b": {"c": c}} for c in (jnp.ones(4), np.ones(3))]
OTHER_MU = [(ADAM[0]._replace(mu=mu), ADAM[1]) for mu in MUS]
SGD = optax.sgd(1e-2, momentum=0.9).init(PARAMS)
COUNT = (ADAM[0]._replace(count=jnp.float32(3)), ADAM[1])
MISFITS = [
    (PARAMS, SGD, 3, r"unknown leaves: 0/trace/b/c(.|\n)*missing ones: 0/count, 0/mu/"),
    (PARAMS, OTHER_MU[0], 3, r"0/mu/b/c: expected shape \(3,\)"),
    (PARAMS, OTHER_MU[1], 3, r"0/mu/b/c: expected float32, found float64; c"),
    (PARAMS, COUNT, 3, r"0/count: expected int32"),
    ({"w": PARAMS["w"]}, ADAM, 3, r"leaves .*expected b/c \[3\], found none"),
    (WIDE, ADAM, 3, "params/b/c: expected float32"),
    (PARAMS, ADAM, 0, "from 1 to"),
]


def test_what_does_not_fit_is_refused_by_name(open_store):
    store = open_store()
    jaxinf.smart_update(optax.adam(1e-2), store).init(PARAMS)
    for params, state, step, message in MISFITS:
        with pytest.raises((StoreMismatchError, TypeError, ValueError), match=message):
            store.load(params, state, step=step)
        assert store.step == 0
    store.load(PARAMS, ADAM, step=2**31 - 2)
    with pytest.raises(StoreMismatchError, match="expected a store at step 0, found"):
        store.load(PARAMS, ADAM, step=4)
    with pytest.raises(ValueError, match="A state comes before its leaf"):
        store.read("w", "mu")
    with pytest.raises(StoreMismatchError, match=r"like: expected a tree"):
        store.state(like=SGD)
    store.close()
    store = open_store()
    for call in (lambda: store.load(PARAMS, ADAM, step=3), lambda: store.state(ADAM)):
        with pytest.raises(StaleStateError, match=r"call tx.init\(params\)"):
            call()


@pytest.mark.parametrize("how", ["error", "crash"])
def test_a_load_that_ends_half_way_leaves_step_0(open_store, place, how):
    plain = optax.adam(1e-2)
    middle = params, (adam, rest) = _steps(plain, PARAMS, plain.init(PARAMS), 0, 4)
    store = open_store()
    jaxinf.smart_update(plain, store).init(PARAMS)

    def end():
        if how == "error":
            raise OSError("the source is gone")
        shutil.copytree(place / "store", place / "crashed", symlinks=True)

    odd = adam._replace(nu={**adam.nu, "w": _Late(adam.nu["w"], end)}), rest
    if how == "error":
        with pytest.raises(OSError, match="the source is gone"):
            store.load(params, odd, step=4)
    else:
        store.load(params, odd, step=4)
        assert store.step == 4
        store = open_store("crashed")
        jaxinf.smart_update(plain, store).init(PARAMS)
    assert store.step == 0
    same((store.params(like=PARAMS), store.state(like=ADAM)), (PARAMS, ADAM))
    store.load(*middle, step=4)  # it may be repeated
    same((store.params(like=PARAMS), store.state(like=ADAM)), middle)
