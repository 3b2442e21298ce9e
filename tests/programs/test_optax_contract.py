"""optax's own tests of its optimizers, with `smart_update` around each of them.

They are in optax's wheel. A test that fails must be a refusal by design, listed here,
and a listed one must fail. One thing is changed: an optimization makes a few steps, not
10,000, and its end is not looked at. Steps are compared with optax's, to the bit, in
tests/optimizer/test_optimizer_contract.py.

The tests are products of optimizers and dtypes. Every fifth is run, which leaves no
optimizer, dtype or refusal out: half of these in CI, all by `make test-long-all`.
"""

import functools
import itertools
import re
import unittest
from types import SimpleNamespace

import jax
import pytest
from families import family

import jaxinf

NUM_STEPS = 3
UNUSED = {"value": 0.0}

REFUSALS = {
    "complex params": r"TypeError: .* found complex(64|128)",
    "complex state": r"UnsupportedTransformError: .* convert_element_type",
    "float64": r"TypeError: .* found float64",
    "MultiSteps outside": r"ValueError: optax.MultiSteps\(jaxinf.smart_update",
    "reduces over state": r"UnsupportedTransformError: .* reduce_sum",
    "16-bit params have float32 state": r"dtype\(bfloat16\) != dtype\('float32'\)",
}
"""What the error of each refusal says."""


def refusal(test):
    """The refusal that a test must meet, by name and arguments; None if it passes."""
    name, _, rest = str(test).partition(" ")
    has = functools.partial(re.search, string=rest)
    if name.startswith("test_gradient_accumulation"):
        return "MultiSteps outside"
    if has("dtype=<class 'jax.numpy.complex") or has("params_dtype='complex"):
        return "complex params"
    if has("dtype=<class 'jax.numpy.float64"):
        return "float64"
    if has("opt_name='(adafactor|lamb)'"):
        return "reduces over state"
    if has("state_dtype='complex64', opt_name='adamw?'"):
        return "complex state"
    if has("params_dtype='bfloat16', state_dtype=None"):
        return "16-bit params have float32 state"
    return None


class Aliases:
    """`optax._src.alias`, whose optimizers are wrapped; each test has its stores."""

    def __init__(self, alias, root):
        self._alias, self._root, self._numbers = alias, root, itertools.count()

    def __getattr__(self, name):
        factory = getattr(self._alias, name)
        path = self._root / f"{name}-{next(self._numbers)}"

        @functools.wraps(factory)
        def wrapped(*args, **kwargs):
            # inject_hyperparams calls it in init and in update, with arrays.
            is_injected = any(isinstance(x, jax.Array) for x in kwargs.values())
            return jaxinf.smart_update(
                factory(*args, **kwargs),
                path.with_suffix(".injected" if is_injected else ".given"),
                on_existing="restart",
                extra_args=UNUSED if name == "polyak_sgd" else None,
            )

        return wrapped


ONE_IN, NUM_GROUPS = 5, 4


@pytest.fixture(scope="module")
def alias_test():
    """optax's tests, which take seconds to import."""
    pytest.importorskip("sklearn", reason="optax's tests import it")
    from optax._src import alias_test

    return alias_test


@pytest.fixture(scope="module")
def chosen(alias_test):
    """Names of tests, in the order of their products."""

    def number(name):
        family, digits = re.fullmatch(r"(.*?)(\d*)", name).groups()
        return family, int(digits or 0)

    names = unittest.TestLoader().getTestCaseNames(alias_test.AliasTest)
    return sorted(names, key=number)[::ONE_IN]


@pytest.mark.long
def test_every_refusal_is_met(alias_test, chosen):
    found = {refusal(alias_test.AliasTest(name)) for name in chosen}
    assert found == {*REFUSALS, None}


def few_steps(patch, alias_test):
    """Shortens an optimization, whose end is then not what the test expects."""
    patch.setattr(
        alias_test, "range", lambda n: range(min(n, NUM_STEPS)), raising=False
    )
    seen = SimpleNamespace(
        log_compilations=alias_test.test_utils.log_compilations,
        assert_trees_all_close=lambda *args, **kwargs: None,
    )
    patch.setattr(alias_test, "test_utils", seen)


def run(test):
    """Runs a test; returns what is wrong with its result, or nothing."""
    result = unittest.TestResult()
    test.run(result)
    wanted = refusal(test)
    said = "\n".join(text for _, text in result.errors + result.failures)
    if result.skipped or (wanted is None and not said):
        return ""  # what is skipped optax does not support
    if wanted is not None and re.search(REFUSALS[wanted], said):
        return ""
    return f"{test}: expected {wanted or 'to pass'}, found {said or 'that it passes'}"


@pytest.mark.filterwarnings("ignore:Casting from complex:DeprecationWarning")
@pytest.mark.parametrize(
    "group", family(range(NUM_GROUPS), short=(), beyond=range(1, NUM_GROUPS, 2))
)
def test_optax(group, alias_test, chosen, tmp_path, monkeypatch):
    monkeypatch.setattr(alias_test, "alias", Aliases(alias_test.alias, tmp_path))
    wrong = []
    for name in chosen[group::NUM_GROUPS]:
        with monkeypatch.context() as patch:
            if name.startswith("test_optimization"):
                few_steps(patch, alias_test)
            wrong.append(run(alias_test.AliasTest(name)))
    assert not any(wrong), "\n".join(filter(None, wrong))
