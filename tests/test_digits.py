"""A plain optax loop reaches the same accuracy from a drive, in two runs."""

import runpy
from pathlib import Path

import pytest


@pytest.mark.long
def test_one_changed_line_gives_the_same_accuracy(place):
    script = Path(__file__).parents[1] / "scripts" / "digits.py"
    main = runpy.run_path(str(script))["main"]
    plain = main(num_steps=150)
    main(place / "store", num_steps=100)
    assert plain > 0.85
    assert main(place / "store", num_steps=150) == plain
