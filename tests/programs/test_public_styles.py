"""Trainers in the styles of ten public ones: lines changed, losses, restarts."""

import difflib
import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from families import family
from program_styles import Killed, Run
from public_styles import (
    CHANGES,
    RESUMING,
    STYLES,
    all_changes,
    run_style,
    source_of,
)

import jaxinf

pytestmark = pytest.mark.filterwarnings("ignore:.*given no params")

LINES = dict.fromkeys(("lm1b", "imagenet", "big_vision"), 2)
"""Lines that are changed or added; one in each of the others."""

RESUMING_LINES = {"purejaxrl": 4}
"""Further ones for a program without checkpoints; the same number in the others."""


def changed_lines(before: str, after: str) -> int:
    found = difflib.ndiff(before.splitlines(), after.splitlines())
    return sum(line.startswith("+ ") for line in found)


def killing(*, at: int) -> Callable[[int], None]:
    def kill(begun: int) -> None:
        if begun == at:
            raise Killed

    return kill


@pytest.mark.parametrize("style", STYLES)
def test_lines_changed(style):
    plain, changed = source_of(style, {}), source_of(style, CHANGES[style])
    assert changed_lines(plain, changed) == LINES.get(style, 1)
    if style in RESUMING:
        both = source_of(style, all_changes(style))
        assert changed_lines(changed, both) == RESUMING_LINES.get(style, 4)


@pytest.mark.long
@pytest.mark.parametrize("style", family(STYLES, short=["jax_flow", "equinox_frozen"]))
def test_losses_are_optax_s_and_a_restart_goes_on_to_the_bit(place, style):
    for name in ("plain", "whole", "parts"):
        (place / name).mkdir()
    plain = run_style(style, {}, Run(place / "plain"))
    whole = run_style(style, CHANGES[style], Run(place / "whole"))
    assert list(whole) == list(plain)
    np.testing.assert_allclose([*whole.values()], [*plain.values()], rtol=1e-4)
    assert whole[5] < whole[1]
    run = Run(place / "parts", kill=killing(at=5))
    with pytest.raises(Killed):
        run_style(style, all_changes(style), run)
    rest = run_style(style, all_changes(style), Run(place / "parts"))
    assert rest
    assert {**run.losses, **rest} == whole
    assert all(run.losses[n] == rest[n] for n in run.losses.keys() & rest.keys())


KILLED = Path(__file__).with_name("killed_public_style.py")
# Two programs that save, each in a way of its own, and two that go on from the store
# alone. The others are interrupted by an exception above.
NOT_KILLED = {*STYLES} - {"lm1b", "big_vision", "haiku_transformer", "purejaxrl"}


@pytest.mark.long
@pytest.mark.parametrize(
    "style", family(STYLES, short=["purejaxrl"], beyond=NOT_KILLED)
)
def test_a_program_that_is_killed_goes_on_to_the_bit(place, run_python, style):
    for name in ("whole", "parts"):
        (place / name).mkdir()
    whole = run_style(style, CHANGES[style], Run(place / "whole"))
    killed = run_python(KILLED, style, place / "parts", check=False)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    rest = run_style(style, all_changes(style), Run(place / "parts"))
    assert min(rest) in (3, 4, 5)
    expected = {number: whole[number] for number in rest}
    if style == "purejaxrl":  # a shorter scan is another program, with XLA's own bits
        assert rest == pytest.approx(expected, rel=1e-6, abs=0)
    else:
        assert rest == expected


@pytest.mark.parametrize(
    "style",
    ["equinox_frozen", pytest.param("haiku_transformer", marks=pytest.mark.long)],
)
def test_fresh_params_never_train_on_the_old_state(place, style):
    """Without the lines that resume, the second run is refused."""
    run_style(style, CHANGES[style], Run(place))
    with pytest.raises(Exception, match=r"on_existing=.restart"):
        run_style(style, CHANGES[style], Run(place))
    with jaxinf.open_store(place / "store") as store:
        assert store.step == 6
