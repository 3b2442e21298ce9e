"""Sharded params: the same bits as on one device, and resume on another mesh.

Each test runs a program with four CPU devices in a process of its own, because their
number is fixed when JAX starts.
"""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from families import BEYOND
from hlo_order import called_lines, computations, numbers

import jaxinf

pytestmark = pytest.mark.optimized

PROGRAM = Path(__file__).parents[1] / "programs" / "sharded_updates.py"
DEVICES = {
    "XLA_FLAGS": "--xla_force_host_platform_device_count=4",
    "PJRT_NPROC": "8",
}


@pytest.mark.long
def test_same_bits_on_four_devices_and_after_changes_of_mesh(place, run_python):
    run_python(PROGRAM, place, "one")
    runs = ["four", "other_mesh", "traced_init"]
    result = run_python(
        PROGRAM, place, *runs, "out_shardings", "refused_mesh", **DEVICES
    )
    figures, undivided, refused = result.stdout.splitlines()
    figures = json.loads(figures)
    # Replicated leaves cross the link once, not once for each device.
    assert figures["down"] == 8 * figures["num"]  # gradients and params
    assert "smart_update(tx, store, shardings=…)" in undivided
    assert "run on a mesh whose shards are" in refused
    expected = np.load(place / "one.npz")
    for name in ("four", "traced"):
        found = np.load(place / f"{name}.npz")
        for leaf in expected.files:
            np.testing.assert_array_equal(found[leaf], expected[leaf], err_msg=leaf)


@pytest.mark.long
def test_compressed_gradients_have_the_same_bits_whatever_the_mesh(place, run_python):
    traffic = []

    def run(name, *words, **environment):
        result = run_python(PROGRAM, place, "compressed", name, *words, **environment)
        traffic.append(result.stdout)

    # The store is made by four devices, whose shards then are its chunks.
    run("four", 1, 3, 0, **DEVICES)
    shutil.copytree(place / "four", place / "one", symlinks=True)
    run("four", 3, 6, 1, **DEVICES)
    run("one", 3, 6, 0)
    assert len(set(traffic)) == 1
    four, one = (np.load(place / f"{name}.npz") for name in ("four", "one"))
    for name in four.files:
        np.testing.assert_array_equal(four[name], one[name], err_msg=name)
    assert 0.9 < np.mean(four["left/columns"] != 0) < 1


@pytest.mark.long
def test_an_export_is_not_waited_for_beside_a_collective(place, run_python):
    """XLA ends a process whose devices wait for one of them for 40 s."""
    order = run_python(PROGRAM, place, "exporting", **DEVICES).stdout.split()
    first = order.index("export")
    assert {*order[:first], *order[first + 1 : -1]} == {"update"}
    assert 2 * first == len(order) - 2


LONG = pytest.mark.long
HOWS = [
    ("shardings", "buffer", 20),
    *[
        pytest.param(how, callback, 1000, marks=LONG if i == j else BEYOND)
        for i, how in enumerate(("shardings", "jitted", "eager"))
        for j, callback in enumerate(("buffer", "start"))
    ],
]


@pytest.mark.long
@pytest.mark.parametrize(("how", "callback", "repeats"), HOWS)
def test_failure_beside_collectives(place, run_python, how, callback, repeats):
    words = [place, "failure", how, repeats]
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


@pytest.mark.long
def test_no_device_waits_in_a_collective_while_params_are_compared(place, run_python):
    found = computations(run_python(PROGRAM, place, "bound", **DEVICES).stdout)
    lines, collective = found["ENTRY"], r" (all-|collective-|reduce-)[\w\-]*\("
    branches = {
        n: called_lines(lines[n], found) for n in numbers(lines, " conditional")
    }
    # Those of the compared leaves, and the one that binds.
    compared = min(
        n
        for n, own in branches.items()
        if len(numbers(own, r"call_target=\S*callback")) > 1
    )
    assert not numbers(branches[compared], collective)
    assert compared < numbers(lines, collective)[0]


@pytest.mark.long
def test_a_failure_that_nothing_asked_about_is_the_exit_status(place, run_python):
    result = run_python(PROGRAM, place, "failure", "last", 0, check=False, **DEVICES)
    assert result.returncode == 1
    last = result.stderr.splitlines()[-1]
    assert "stopped by NonFiniteGradientError: step 2: NaN or Inf" in last


@pytest.mark.long
@pytest.mark.parametrize("callback", ["buffer", "start"])
def test_restart_on_four_devices(place, run_python, callback):
    result = run_python(PROGRAM, place, "restart", CALLBACK_FORM=callback, **DEVICES)
    assert "the params are not those that the store holds" in result.stdout
