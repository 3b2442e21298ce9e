"""Sharded params: the same bits as on one device, and resume on another mesh.

Each test runs a program with four CPU devices in a process of its own, because their
number is fixed when JAX starts.
"""

from pathlib import Path

import pytest
from cases import Cases
from families import BEYOND
from hlo_order import called_lines, computations, numbers

import jaxinf

pytestmark = [pytest.mark.optimized, pytest.mark.long]

PROGRAM = Path(__file__).parents[1] / "programs" / "sharded_updates.py"
DEVICES = {
    "XLA_FLAGS": "--xla_force_host_platform_device_count=4",
    "PJRT_NPROC": "8",
}


@pytest.fixture(scope="module")
def process():
    cases = Cases("programs/sharded_updates.py", **DEVICES)
    yield cases
    cases.close()


@pytest.mark.parametrize("function", ["resharded", "compressed"])
def test_the_bits_do_not_depend_on_the_mesh(place, process, function):
    process.run(function, place)


def test_an_export_is_not_waited_for_beside_a_collective(place, process):
    """XLA ends a process whose devices wait for one of them for 40 s."""
    order = process.run("exporting", place)
    first = order.index("export")
    assert {*order[:first], *order[first + 1 : -1]} == {"update"}
    assert 2 * first == len(order) - 2


HOWS = [
    ("shardings", "buffer", 20),
    *[
        pytest.param(how, callback, 1000, marks=() if i == j else BEYOND)
        for i, how in enumerate(("shardings", "jitted", "eager"))
        for j, callback in enumerate(("buffer", "start"))
    ],
]


@pytest.mark.parametrize(("how", "callback", "repeats"), HOWS)
def test_failure_beside_collectives(place, run_python, how, callback, repeats):
    words = [place, how, repeats]
    result = run_python(PROGRAM, *words, CALLBACK_FORM=callback, **DEVICES)
    said = result.stdout.splitlines()
    assert len(said) == 5
    assert all("step 2: NaN or Inf in the gradient of both" in line for line in said)
    logged = [line for line in result.stderr.splitlines() if "update is NaN" in line]
    assert len(logged) == 1
    assert "failing: NonFiniteGradientError: step 2: NaN or Inf in" in logged[0]
    is_unknown = how == "jitted"
    assert result.stderr.count("shardings=jax.tree.map(lambda") == is_unknown
    with jaxinf.open_store(place / "failing") as store:
        assert store.step == 1


def test_no_device_waits_in_a_collective_while_params_are_compared(place, process):
    found = computations(process.run("bound", place))
    lines, collective = found["ENTRY"], r" (all-|collective-|reduce-)[\w\-]*\("
    branches = {
        n: called_lines(lines[n], found) for n in numbers(lines, " conditional")
    }
    # Those of the compared leaves, and the one that accepts them.
    compared = min(
        n
        for n, own in branches.items()
        if len(numbers(own, r"call_target=\S*callback")) > 1
    )
    assert not numbers(branches[compared], collective)
    assert compared < numbers(lines, collective)[0]


def test_a_failure_that_nothing_asked_about_is_the_exit_status(place, run_python):
    result = run_python(PROGRAM, place, "last", 0, check=False, **DEVICES)
    assert result.returncode == 1
    last = result.stderr.splitlines()[-1]
    assert "stopped by NonFiniteGradientError: step 2: NaN or Inf" in last


def test_pmap_and_shard_map(place, process):
    said = process.run("mapped", place)
    assert "update is called in jax.pmap or jax.shard_map over {'i': 4}" in said[0]
    assert "init is called in jax.pmap" in said[1]
    assert "update is called in jax.pmap or jax.shard_map over {'d': 4}" in said[2]
