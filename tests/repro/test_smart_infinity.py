"""The model of Smart-Infinity's testbed beside the paper's figures."""

import statistics

import pytest
from smart_infinity import (
    A5000,
    METHODS,
    TESTBED,
    Rate,
    Workload,
    phases,
    update_s,
)
from smart_infinity_figures import compare_with_paper, gflops_per_dollar

pytestmark = pytest.mark.long

GPT2 = Workload(4e9)
ROWS = compare_with_paper()


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


def test_an_update_by_hand():
    """Per param and CSD: 16 bytes read, 12 written, 16 through the kernel, 4 up."""
    expected = 0.4 * (16 / 2.79 + 12 / 1.65 + 16 / 8.22) + 4 * 4 / 8
    assert update_s(TESTBED, GPT2, "SU+O", 10) == pytest.approx(expected)


def test_compression_costs_its_decompressor_and_the_choice():
    names = {m: [p.name for p in phases(TESTBED, A5000, GPT2, m, 6)] for m in METHODS}
    assert set(names["SU+O+C"]) - set(names["SU+O"]) == {"select", "decompress"}
    assert set(names["SU"]) - set(names["SU+O"]) == {"buffers"}


@pytest.mark.parametrize(("num_csds", "pays"), [(1, False), (4, False), (5, True)])
def test_smartssds_pay_above_four(num_csds, pays):
    csds, base = (gflops_per_dollar(m, num_csds) for m in ("SU+O+C", "BASE"))
    assert (csds > base) == pays


def test_every_rate_says_where_it_is_from():
    for name, rate in {**vars(TESTBED), **vars(A5000)}.items():
        assert isinstance(rate, Rate)
        assert rate.source, name
        assert (rate.basis == "fitted") == ("fitted" in rate.source), name


@pytest.mark.parametrize(
    ("method", "num_csds", "message"),
    [("ZERO", 1, "expected one of BASE, SU"), ("SU", 0, "expected 1 or more")],
)
def test_refusals(method, num_csds, message):
    with pytest.raises(ValueError, match=message):
        phases(TESTBED, A5000, GPT2, method, num_csds)
