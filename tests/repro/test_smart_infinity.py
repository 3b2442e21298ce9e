"""The model of Smart-Infinity's testbed beside the paper's figures."""

import statistics

import pytest
from smart_infinity import compare_with_paper, gflops_per_dollar

pytestmark = pytest.mark.long

ROWS = [*compare_with_paper()]


def rows(quantity, *figures):
    return [r for r in ROWS if r.quantity == quantity and r.figure in figures]


def test_published_speedups():
    speedups = rows("speedup", "9", "10", "11a")
    assert len(speedups) == 54
    assert sum(abs(row.error) <= 0.1 for row in speedups) >= 52


def test_published_update_times():
    times = rows("update_s", "9", "10")
    assert len(times) == 50
    assert statistics.median(abs(row.error) for row in times) <= 0.03


@pytest.mark.parametrize(
    ("figure", "worst"), [("11b", 0.03), ("12", 0.20), ("17", 0.16), ("cost", 0.16)]
)
def test_figures_of_which_less_is_known(figure, worst):
    errors = [abs(row.error) for row in ROWS if row.figure == figure]
    assert errors
    assert max(errors) <= worst


@pytest.mark.parametrize(("num_csds", "pays"), [(1, False), (4, False), (5, True)])
def test_smartssds_pay_above_four(num_csds, pays):
    csds, base = (gflops_per_dollar(m, num_csds) for m in ("SU+O+C", "BASE"))
    assert (csds > base) == pays
