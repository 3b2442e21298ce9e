"""The model of Deep Optimizer States' machines beside the published runs."""

import pytest
from k_sweep import measure

pytestmark = pytest.mark.long


def test_published_iterations():
    """Of models whose runs no rate is fitted to, and of those; and choices of k."""
    found = measure()
    groups = {one["sizes"]: one for one in found["groups"]}
    others, fitted = groups["others"], groups["fitted"]
    assert (others["runs"], fitted["runs"]) == (114, 103)
    assert others["median"] < 0.09
    assert others["within 25 %"] == 94
    assert fitted["median"] < 0.03
    assert fitted["worst"] < 0.2
    choices = found["intervals"]
    assert sum(one["modelled"] == 2 for one in choices) == 9 == len(choices) - 1
    assert sum(one["published"] == one["modelled"] for one in choices) == 7
