"""Ctrl-C in a program's own loop: a KeyboardInterrupt, and nothing lost."""

from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[1] / "programs" / "interrupted_steps.py"


@pytest.mark.long
@pytest.mark.parametrize("way", ["", pytest.param("io", marks=pytest.mark.long)])
def test_every_interrupt_is_a_keyboard_interrupt_and_the_run_goes_on(
    run_python, tmp_path, way
):
    said = run_python(PROGRAM, tmp_path, "storm", 7, CALLBACK_FORM=way).stdout
    assert said.split()[2:] == ["interrupts", "30"]


@pytest.mark.long
def test_interrupts_in_a_callback(run_python, tmp_path):
    """The first waits for its end, a second ends it, a program's handler stays."""
    checks = ["own_handler", "first_waits", "second_ends_it"]
    assert run_python(PROGRAM, tmp_path, *checks).stdout.split() == checks
