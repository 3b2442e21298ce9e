"""Ctrl-C in a program's own loop: the next call works, and nothing is lost."""

from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[1] / "programs" / "interrupted_steps.py"


@pytest.mark.long
@pytest.mark.parametrize("form", ["", "start"])
def test_after_each_of_sixty_interrupts_the_run_goes_on(run_python, tmp_path, form):
    said = run_python(PROGRAM, tmp_path, "storm", 7, CALLBACK_FORM=form).stdout
    assert "interrupts 60" in said


@pytest.mark.long
def test_interrupts_in_a_callback(run_python, tmp_path):
    """It waits for the callback's end, and a program's handler stays."""
    said = run_python(PROGRAM, tmp_path, "first_waits").stdout
    assert said.split() == ["first_waits"]
