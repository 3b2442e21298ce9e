"""Programs in the styles of public ones: the optimizer's line is all that changes."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import program_styles
import pytest
import saving_programs
from families import BEYOND
from program_styles import STYLES, Killed, run_changed, run_plain


def killed_at(number):
    def kill(begun):
        if begun == number:
            raise Killed

    return kill


def in_make_test(*chosen):
    """Returns all styles as parameters; those that are not chosen are long."""
    return [
        s if s in chosen else pytest.param(s, marks=pytest.mark.long) for s in STYLES
    ]


@pytest.mark.long
@pytest.mark.parametrize("style", in_make_test("manager", "mesh"))
def test_losses_are_plain_optax_s_and_a_restart_goes_on_to_the_bit(place, style):
    plain = run_plain(style, place / "plain")
    assert plain[4] < plain[0]  # the same batch
    whole = run_changed(style, place / "whole")
    np.testing.assert_allclose([*whole.values()], [*plain.values()], rtol=1e-4)
    first = run_changed(style, place / "parts", kill=killed_at(5))
    assert list(first) == [0, 1, 2, 3, 4]
    rest = run_changed(style, place / "parts")
    assert rest == {4: whole[4], 5: whole[5]}


def run_program(program, place, *arguments, **environment):
    return subprocess.run(
        [sys.executable, program.__file__, place, *map(str, arguments)],
        env={**os.environ, "JAX_PLATFORMS": "cpu", **environment},
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
    )


@pytest.mark.long
def test_four_devices(place):
    flags = "--xla_force_host_platform_device_count=4"
    done = run_program(program_styles, place, *STYLES, XLA_FLAGS=flags, PJRT_NPROC="8")
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[:-1] == [f"{style} agrees" for style in STYLES]


KILLED = Path(__file__).with_name("killed_style.py")


@pytest.mark.parametrize("style", in_make_test())
def test_a_program_that_is_killed_goes_on_to_the_bit(place, run_python, style):
    whole = run_changed(style, place / "whole")
    killed = run_python(KILLED, style, place / "parts", check=False)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    rest = run_changed(style, place / "parts")
    # A checkpoint that was not complete is one that the program does not find.
    assert min(rest) in (2, 4)
    assert rest == {number: whole[number] for number in range(min(rest), 6)}


@pytest.mark.long
@pytest.mark.parametrize(
    ("form", "way", "points"),
    [
        ("lm1b", "background", [15]),
        pytest.param("nanodo", "background", [16], marks=pytest.mark.long),
        *(
            pytest.param(form, way, points, marks=marks)
            for i, form in enumerate(saving_programs.FORMS)
            for j, way in enumerate(("sync", "background"))
            for points, marks in (
                (range(3 + 2 * i + j, 21, 8), pytest.mark.long),
                (range(2, 21, 3), BEYOND),
            )
        ),
    ],
)
def test_a_program_goes_on_from_its_own_checkpoint(place, form, way, points):
    """Killed at points of 20; without a setting, losses as without the kill."""
    done = run_program(saving_programs, place, form, way, 20, *points)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("went on after step") == len(points)
