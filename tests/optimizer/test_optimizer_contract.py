"""The contract of every accepted optimizer of optax near storage.

Each trains on a quadratic as in memory, takes extra arguments, is compiled once, and
continues after an interruption to the bit.
"""

import re
import shutil
import warnings
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from classify_optimizers import BITS, cases, rendered
from families import family
from small_stores import same

import jaxinf

pytestmark = pytest.mark.optimized

ROOT = Path(__file__).parents[2]
CASES = cases()
ROWS = re.findall(
    r"^\| `([\w.]+)`(, \w+)? \| (bits|tolerance|refused) \|",
    (ROOT / "docs" / "optimizers.md").read_text(),
    re.MULTILINE,
)
GUARANTEES = {name + form: guarantee for name, form, guarantee in ROWS}
ACCEPTED = [name for name, guarantee in GUARANTEES.items() if guarantee != "refused"]
# `make test` has one optimizer for each way of working, of a family of a hundred.
IN_SHORT = {
    "lion", "contrib.schedule_free_adamw", "noisy_sgd", "polyak_sgd",
    "apply_if_finite", "set_to_zero",
}  # fmt: skip
# Transformations that with a rate are an optimizer of this family.
PARTS = {name for name in ACCEPTED if "scale_by_" in name}
NUM_STEPS = 8
# Losses of eight steps, each within 17 units of float32: 2e-6 each, at most.
LOSS_TOLERANCE = 2e-5


@pytest.mark.long
def test_the_page_is_up_to_date():
    page = (ROOT / "docs" / "optimizers.md").read_text()
    if f"optax {optax.__version__}:" not in page:
        pytest.skip(f"the page is about another optax than {optax.__version__}")
    if jax.__version_info__ < (0, 10):
        pytest.skip("older JAX has other primitives, which the page's reasons name")
    assert rendered(page) == page, (
        "regenerate it: python scripts/classify_optimizers.py --write"
    )


def test_no_factory_is_missing():
    assert set(GUARANTEES) == set(CASES)


def test_the_promise_of_bits_is_what_the_bits_test_holds():
    promised = {name for name, value in GUARANTEES.items() if value == "bits"}
    assert {name.split(",")[0] for name in promised} == set(BITS)
    held = (ROOT / "tests" / "kernels" / "test_bits.py").read_text()
    for name in BITS:
        assert f'"{name}": optax.{name}(' in held


# --- the contract -------------------------------------------------------------------

PARAMS = {
    "bias": jnp.linspace(-1.0, 1.0, 5, dtype=jnp.float32),
    "kernel": jnp.cos(jnp.arange(15, dtype=jnp.float32)).reshape(3, 5),
}
TARGET = {"bias": jnp.full(5, 0.3), "kernel": jnp.full((3, 5), -0.2)}


def loss_of(params, *_, **__):
    errors = jax.tree.map(lambda p, t: jnp.sum((p - t) ** 2), params, TARGET)
    return sum(jax.tree.leaves(errors)) / 2


def make(name):
    case = CASES[name]
    with warnings.catch_warnings(action="ignore"):  # optax deprecates some
        tx = case.make()
    if not case.descends:
        tx = optax.chain(tx, optax.sgd(0.1))
    names = set(case.extra_args(PARAMS))
    if name != "contrib.sam":  # refuses unknown arguments; the others ignore them
        names.add("value")
    return optax.with_extra_args_support(tx), tuple(names)


def extra_args(names, loss, gradients):
    known = {"value": loss, "grad": gradients, "value_fn": loss_of, "obj_fn": loss_of}
    return {name: known[name] for name in names}


# A hundred small programs: compiling them is most of the time.
QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


def make_step(tx, names):
    @partial(jax.jit, compiler_options=QUICK)
    def step(params, state):
        loss, gradients = jax.value_and_grad(loss_of)(params)
        extra = extra_args(names, loss, gradients)
        updates, state = tx.update(gradients, state, params, **extra)
        return optax.apply_updates(params, updates), state, loss

    return step


def run(step, params, state, num_steps):
    losses = []
    for _ in range(num_steps):
        params, state, loss = step(params, state)
        losses.append(float(loss))
    return params, state, [*losses, float(loss_of(params))]


def near_storage(name, store):
    tx, names = make(name)
    example = extra_args(names, jnp.float32(0), PARAMS)
    return jaxinf.smart_update(tx, store, extra_args=example), names


@pytest.mark.long
@pytest.mark.parametrize("name", family(ACCEPTED, short=IN_SHORT, beyond=PARTS))
def test_contract(name, place):
    tx, names = make(name)
    plain = make_step(tx, names)
    _, _, expected = run(plain, PARAMS, tx.init(PARAMS), NUM_STEPS)

    with jaxinf.open_store(place / "store", memory_bytes=1 << 22) as store:
        smart, names = near_storage(name, store)
        step = make_step(smart, names)
        params, state, first = run(step, PARAMS, smart.init(PARAMS), NUM_STEPS // 2)
        store.wait(state)
        shutil.copytree(place / "store", place / "copy", symlinks=True)
        params, state, second = run(step, params, state, NUM_STEPS // 2)
        store.wait(state)
        assert step._cache_size() == 1, "compiled again"
        assert store.step == NUM_STEPS
        same(store.params(like=params), params)
    np.testing.assert_allclose(first[:-1] + second, expected, rtol=LOSS_TOLERANCE)
    if CASES[name].descends:
        assert expected[-1] < expected[0]
    if "scale_by" in name:  # resumed as part of the optimizers made of them
        return

    with jaxinf.open_store(place / "copy", memory_bytes=1 << 22) as store:
        smart, names = near_storage(name, store)
        resumed = jax.tree.map(jnp.asarray, jax.device_get(store.params(like=PARAMS)))
        step = make_step(smart, names)
        again = run(step, resumed, smart.init(resumed), NUM_STEPS // 2)
        store.wait(again[1])
        assert again[2] == second
        same(again[:2], (params, state))
