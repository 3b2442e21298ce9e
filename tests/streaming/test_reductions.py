"""Options of compilation: memory of sums of large products, and bits on a GPU."""

from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from jaxinf import compat
from jaxinf.streaming.program.lifetimes import order_program
from jaxinf.streaming.program.programs import sums_large_products

pytestmark = pytest.mark.optimized

MIB = 1 << 20
LARGE, SMALL, FLAT = (1, 2, 2048, 2048), (1, 2, 64, 64), (4096, 2048)


PROGRAM = Path(__file__).parents[1] / "programs" / "unreported_memory.py"


def looped(a, b):
    return jax.lax.map(lambda one: jnp.sum(one[0] * one[1], -1), (a[None], b[None]))


@pytest.mark.parametrize(
    ("function", "shape", "expected"),
    [
        (lambda a, b: jnp.sum(a * b, -1), LARGE, True),
        (lambda a, b: jnp.sum((a * b).astype(jnp.bfloat16), -1), LARGE, True),
        (looped, LARGE, True),
        (lambda a, b: jnp.sum(a + b, -1), LARGE, False),
        (lambda a, b: jnp.sum(a * 2, -1) + b[..., 0], LARGE, False),
        (lambda a, b: jnp.sum(a * b, -1), SMALL, False),
        (lambda a, b: jnp.sum(a * b, -1), FLAT, False),
    ],
)
def test_sums_of_large_products_are_found(function, shape, expected):
    a, b = (jax.ShapeDtypeStruct(shape, jnp.float32) for _ in range(2))
    ready = order_program(lambda p, x: jnp.sum(function(p, x)), a, b)
    assert sums_large_products(ready.graph.nodes) == expected


def test_an_option_that_is_unknown_or_the_users_is_left_alone(monkeypatch):
    assert compat.without_library_reductions()
    with monkeypatch.context() as patch:
        patch.setattr(compat.xla, "LIBRARY_FUSIONS", "xla_cpu_no_such_option")
        assert compat.without_library_reductions() is None
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_experimental_ynn_fusion_type=")
    assert compat.without_library_reductions() is None


@pytest.mark.long
def test_programs_take_the_memory_that_is_reported(run_python):
    unreported = [int(line) for line in run_python(PROGRAM).stdout.split()]
    assert unreported  # one for each program
    assert max(unreported) < 36 * MIB  # half of one product
