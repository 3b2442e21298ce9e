"""The model of Deep Optimizer States' machines beside the published runs."""

import statistics

import pytest
from k_sweep import (
    FITTED_PARAMS,
    fitted_rates,
    iteration,
    published_runs,
)

pytestmark = pytest.mark.long

RUNS = published_runs()
RATES = fitted_rates()


def errors(runs):
    found = [(iteration(RATES[one.machine], one), one.found) for one in runs]
    return [abs(seconds.total / known.total - 1) for seconds, known in found]


def test_published_iterations():
    """Of models whose runs no rate is fitted to, and of those."""
    others = errors(one for one in RUNS if one.num_params not in FITTED_PARAMS)
    fitted = errors(one for one in RUNS if one.num_params in FITTED_PARAMS)
    assert (len(others), len(fitted)) == (114, 103)
    assert statistics.median(others) < 0.09
    assert sum(error <= 0.25 for error in others) == 94
    assert statistics.median(fitted) < 0.03
    assert max(fitted) < 0.2


def test_every_second_subgroup_is_fastest_on_the_device():
    def fastest(runs, seconds):
        return min(runs, key=seconds).interval

    for size in (7e9, 8e9, 13e9, 20e9):
        runs = [
            one
            for one in RUNS
            if (one.machine, one.num_params) == ("a100", size) and one.interval
        ]
        assert len(runs) > 5
        assert fastest(runs, lambda one: one.found.total) == 2
        assert fastest(runs, lambda one: iteration(RATES["a100"], one).total) == 2
