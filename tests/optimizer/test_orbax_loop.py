"""A program with checkpoints of its own: the optimizer's lines are all that changes."""

import signal
from pathlib import Path

import numpy as np
import orbax_loop
import pytest
from orbax_loop import NUM_STEPS, Killed, train

PROGRAM = Path(orbax_loop.__file__)


def stop(begun):
    if begun == 5:
        raise Killed


def test_losses_are_optax_s_and_a_restart_goes_on_to_the_bit(place):
    plain, whole = train(place / "plain", plain=True), train(place / "whole")
    assert list(whole) == list(plain)
    np.testing.assert_allclose([*whole.values()], [*plain.values()], rtol=1e-4)
    assert whole[5] < whole[1]  # the same batch
    first, rest = train(place / "parts", kill=stop), train(place / "parts")
    assert ([*first], [*rest]) == ([0, 1, 2, 3, 4], [4, 5])
    assert {**first, **rest} == whole
    assert first[4] == rest[4]


@pytest.mark.long
@pytest.mark.parametrize("share", [None, 0.6, 0.8, 0.95])
def test_a_program_that_is_killed_goes_on_to_the_bit(place, run_python, share):
    """At a step, or at a part of its operations on files; its own checkpoint decides.

    A checkpoint that was not complete is one that the program does not find.
    """
    at = "step:5"
    if share is not None:
        count = int(run_python(PROGRAM, place / "counted", "file:0").stdout)
        at = f"file:{int(share * count)}"
    done = run_python(PROGRAM, place / "parts", at, check=False)
    assert done.returncode in (-signal.SIGKILL, 0), done.stderr
    whole, rest = train(place / "whole"), train(place / "parts")
    begun = min(rest, default=NUM_STEPS)
    assert begun >= (2 if share is None else 0)
    assert rest == {n: whole[n] for n in range(begun, NUM_STEPS)}


@pytest.mark.long
def test_four_devices(place, run_python):
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=4", "PJRT_NPROC": "8"}
    assert run_python(PROGRAM, place, "mesh", **flags).stdout == "agrees\n"
