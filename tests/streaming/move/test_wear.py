"""Predicted life of drives: the paper's formula, and when a warning is due."""

import pytest

from jaxinf.streaming.plan.wear import Wear


def test_life_is_endurance_over_what_is_written():
    wear = Wear(step_bytes=10**9, step_s=1.0)
    assert wear.day_bytes == 86_400e9
    # 600 TB at 1 GB/s: 600,000 s.
    assert wear.years(600) == pytest.approx(600_000 / 86_400 / 365.25)
    assert "consumer 0.019" in str(wear)
    assert wear.warning is None
    assert Wear(10**9, 2.0).years(600) == pytest.approx(2 * wear.years(600))


def test_less_than_a_year_is_warned_of():
    short = Wear(10**9, 1.0, endurance_tbw=600)
    assert "wear a drive of 600 TBW out in 0.2 months" in (short.warning or "")
    assert "600 TBW 0.019" in str(short)
    assert Wear(10**9, 1.0, endurance_tbw=40_000).warning is None


def test_nothing_written_lasts():
    none = Wear(0, 1.0, endurance_tbw=1)
    assert none.years(1) == float("inf")
    assert none.warning is None
