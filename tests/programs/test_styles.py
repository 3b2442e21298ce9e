"""Programs in the styles of public ones: the optimizer's line is all that changes."""

import signal
from pathlib import Path

import numpy as np
import pytest
import styles
from families import family
from styles import NUM_STEPS, STYLES, Killed, run_style

PROGRAM = Path(styles.__file__)


def stop(begun):
    if begun == 5:
        raise Killed


@pytest.mark.parametrize("style", family(STYLES, short=["flow"]))
def test_losses_are_optax_s_and_a_restart_goes_on_to_the_bit(place, style):
    plain = run_style(style, place / "plain", plain=True)
    whole = run_style(style, place / "whole")
    assert list(whole) == list(plain)
    np.testing.assert_allclose([*whole.values()], [*plain.values()], rtol=1e-4)
    assert whole[5] < whole[1]  # the same batch
    first = run_style(style, place / "parts", kill=stop)
    rest = run_style(style, place / "parts")
    assert rest
    assert {**first, **rest} == whole
    assert all(first[n] == rest[n] for n in first.keys() & rest.keys())


def goes_on(place, style, earliest):
    """Checks that a killed program has the losses of one that was not."""
    whole = run_style(style, place / "whole")
    rest = run_style(style, place / "parts")
    assert earliest <= min(rest, default=NUM_STEPS)
    assert rest == {n: whole[n] for n in range(min(rest, default=6), NUM_STEPS)}


KILLED = ["manager", "sharded", "imagenet"]


@pytest.mark.parametrize("style", family(KILLED, short=["sharded"]))
def test_a_program_that_is_killed_goes_on_to_the_bit(place, run_python, style):
    killed = run_python(PROGRAM, style, place / "parts", "step:5", check=False)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    # A checkpoint that was not complete is one that the program does not find.
    goes_on(place, style, 2)


@pytest.mark.long
@pytest.mark.parametrize("style", ["manager", "imagenet"])
@pytest.mark.parametrize("share", [0.6, 0.8, 0.95])
def test_a_program_killed_while_it_saves_goes_on(place, run_python, style, share):
    """At a part of its operations on files; its own checkpoint decides."""
    count = int(run_python(PROGRAM, style, place / "counted").stdout)
    at = f"file:{int(share * count)}"
    killed = run_python(PROGRAM, style, place / "parts", at, check=False)
    assert killed.returncode in (-signal.SIGKILL, 0), killed.stderr
    goes_on(place, style, 0)


@pytest.mark.long
def test_four_devices(place, run_python):
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=4", "PJRT_NPROC": "8"}
    done = run_python(PROGRAM, "mesh", place, "manager", "sharded", **flags)
    assert done.stdout == "manager agrees\nsharded agrees\n"
