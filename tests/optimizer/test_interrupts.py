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
    """The first waits for its end, a second ends it, a program's handler stays."""
    checks = ["first_waits", "same_waits", "second_ends_it"]
    assert run_python(PROGRAM, tmp_path, *checks).stdout.split() == checks
