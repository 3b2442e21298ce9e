"""The planner: against every choice there is, and against simple rules."""

from dataclasses import replace
from functools import cache
from itertools import chain, combinations

import pytest
from streaming import assert_same_bits, prepared, streamed
from zoo import ZOO

from jaxinf.activations import Scratch
from jaxinf.stream import absences, choice
from jaxinf.stream.absences import fitted
from jaxinf.stream.calls import Calls, make_calls
from jaxinf.stream.choice import Profile, choose, simulate
from jaxinf.stream.values import Offloaded


@pytest.fixture(autouse=True)
def small_values_leave(monkeypatch):
    monkeypatch.setattr(absences, "SMALL_BYTES", 1)


@cache
def cut():
    program = ZOO["haiku"](depth=8)
    ready = prepared(program)
    plan = ready.plan(ready.smallest_bytes() * 3 // 2, "offload")
    return program, ready.lifetimes.graph, plan


def profile(plan, bytes_per_s):
    """Backward takes twice the time of forward, a second in all."""
    keys = {program.key: 2.0 for program in plan.programs.backward if program}
    keys |= {program.key: 1.0 for program in plan.programs.forward}
    keys |= {program.key: 0.0 for program in plan.programs.free}
    return Profile(keys, bytes_per_s, bytes_per_s)


def budget_of(plan, share):
    return int(share * max(plan.calls.value_bytes()))


def every_choice(graph, plan, budget, rates):
    """The time of each set of segments that fits."""
    segments = range(len(plan.programs.forward) - 1)
    subsets = chain.from_iterable(
        combinations(segments, size) for size in range(len(segments) + 1)
    )
    found = {}
    for repeated in map(frozenset, subsets):
        calls = make_calls(graph, plan.programs, "offload", repeated)
        calls = fitted(calls, budget, Calls.value_bytes)
        if max(calls.value_bytes()) <= budget:
            found[repeated] = simulate(calls, rates)
    return found


@pytest.mark.parametrize("share", [0.45, 0.7])
@pytest.mark.parametrize("rate", [50.0, 1500.0, 1e9])
@pytest.mark.parametrize("most_exhaustive", [7, 0], ids=["all", "searched"])
def test_no_choice_is_faster(share, rate, most_exhaustive, monkeypatch):
    monkeypatch.setattr(choice, "_MOST_EXHAUSTIVE", most_exhaustive)
    _, graph, plan = cut()
    budget, rates = budget_of(plan, share), profile(plan, rate)
    found = choose(graph, plan.programs, budget, Calls.value_bytes, rates)
    every = every_choice(graph, plan, budget, rates)
    assert (found is None) == (not every)
    if found is None:
        return
    assert found.peak_bytes <= budget
    assert found.expected_s == pytest.approx(simulate(found.calls, rates))
    assert found.expected_s <= 1.02 * min(every.values())
    assert found.bound_s <= found.expected_s
    # The baselines: offload alone, and all segments again.
    for rule in (frozenset(), frozenset(range(len(plan.programs.forward) - 1))):
        assert found.expected_s <= every.get(rule, float("inf"))


def test_a_fast_drive_offloads_and_a_slow_one_recomputes():
    _, graph, plan = cut()
    budget = budget_of(plan, 0.7)
    fast, slow = (
        choose(graph, plan.programs, budget, Calls.value_bytes, profile(plan, rate))
        for rate in (1e9, 10.0)
    )
    assert not fast.repeated
    assert fast.offloaded_bytes > 0
    assert slow.repeated
    assert slow.offloaded_bytes < fast.offloaded_bytes
    assert fast.expected_s == pytest.approx(fast.bound_s, rel=1e-3)
    assert "0 segments run forward again" in str(fast)


def test_what_fits_stays():
    _, graph, plan = cut()
    budget = budget_of(plan, 1.0)
    found = choose(graph, plan.programs, budget, Calls.value_bytes, profile(plan, 1.0))
    assert not found.repeated
    assert not found.calls.absences


def test_a_budget_that_is_too_small_has_no_plan():
    _, graph, plan = cut()
    assert (
        choose(graph, plan.programs, 1, Calls.value_bytes, profile(plan, 1.0)) is None
    )


@pytest.mark.parametrize("rate", [1500.0, 1e9])
def test_a_chosen_plan_has_the_bits_of_keep(rate, tmp_path):
    program, graph, plan = cut()
    budget, rates = budget_of(plan, 0.6), profile(plan, rate)
    found = choose(graph, plan.programs, budget, Calls.value_bytes, rates)
    executables = {}
    expected = streamed(program, plan, executables)
    num_compiled = len(executables)
    values = Offloaded(found.calls, Scratch([tmp_path]))
    mixed = replace(plan, calls=found.calls)
    assert_same_bits(streamed(program, mixed, executables, values=values), expected)
    assert values.peak_bytes == found.peak_bytes
    assert len(executables) == num_compiled, "a choice compiles nothing"
    values.close()
