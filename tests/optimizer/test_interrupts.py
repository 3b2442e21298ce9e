"""Ctrl-C in a program's own loop: the next call works, and nothing is lost."""

from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[1] / "programs" / "interrupted_steps.py"


@pytest.mark.long
@pytest.mark.parametrize("form", ["", "start"])
def test_an_interrupt_in_a_callback_waits_for_its_end(run_python, tmp_path, form):
    """A program's handler stays."""
    assert run_python(PROGRAM, tmp_path, CALLBACK_FORM=form).stdout == "done\n"
